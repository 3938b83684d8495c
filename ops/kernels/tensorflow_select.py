"""Selection of the largest entries in TensorFlow, with shapes that XLA can compile.

XLA needs array shapes that depend only on the lengths of the inputs. With XLA, positions of
selected entries are in arrays of a fixed length, filled up with n, the number of entries, after the
last position; the caller cuts the arrays. Without XLA, the selection functions of `tensorflow_scan`
are used instead. The selection compares magnitudes of float32 entries as integers: the bits of the
float without the sign bit. The order of floats' bits without sign is the order of their magnitudes,
even for subnormal numbers, which TensorFlow's float operations flush to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from thinwire.ops.kernels import numpy_chunks, numpy_select, tensorflow_scan
from thinwire.ops.kernels.device import (
    FLOAT,
    FLOATS,
    NUMBER,
    USES_XLA,
    DeviceArray,
    fused,
    tensor_of,
)
from thinwire.ops.kernels.numpy_select import accumulate as accumulate_on_host
from thinwire.ops.kernels.tensorflow_scan import magnitudes_of
from thinwire.ops.types import Float32, Int64

# number of rounds of the binary search for a position: enough for 2**31 entries
_HALVINGS = 31
_SAMPLED_KEPT = 200  # number of selected entries expected in a sample
_SAFETY = 4.0  # number of standard deviations of the sampled rank by which a threshold is lowered
_SPARE = 64  # number of places for candidates in addition to two per selected entry


def plan(size: int, k: int) -> tuple[int, int, int, int]:
    """Plan the selection of k entries, 0 < k <= size; return (k, stride, rank, capacity).

    To plan a selection of entries, every stride-th entry of the array belongs to a sample. The
    magnitude threshold for a selection is the rank-th largest magnitude of a sample, which slightly
    more than k entries of the array are expected to reach. If more than `capacity` entries reach
    the magnitude threshold from the sample, the selection compares all entries.
    """
    stride = max(k // _SAMPLED_KEPT, 1)
    num_sampled = -(-size // stride)
    expected = k * num_sampled / size
    rank = min(int(expected + _SAFETY * math.sqrt(expected)) + 1, num_sampled)
    return k, stride, rank, min(size, 2 * k + _SPARE)


def _first_reaching(magnitudes: Any, threshold: Any, capacity: Any) -> tuple[Any, Any]:
    """Return the first `capacity` positions of magnitudes >= threshold, and how many there are."""
    size = tf.size(magnitudes)
    reached = tf.cumsum(tf.cast(magnitudes >= threshold, tf.int32))
    ranks = tf.range(1, capacity + 1)
    low, high = tf.zeros_like(ranks), tf.fill(tf.shape(ranks), size)
    for _ in tf.range(_HALVINGS):
        middle = low + (high - low) // 2
        short = tf.gather(reached, tf.minimum(middle, size - 1)) < ranks
        short = tf.logical_and(short, middle < high)
        low = tf.ensure_shape(tf.where(short, middle + 1, low), [None])
        high = tf.ensure_shape(tf.where(short, high, middle), [None])
    return low, reached[-1]


def _values_at(x: Any, places: Any) -> Any:
    size = tf.size(x)
    return tf.where(places < size, tf.gather(x, tf.minimum(places, size - 1)), 0.0)


def _largest(x: Any, k: Any, stride: Any, rank: Any, capacity: Any) -> tuple[Any, Any, Any]:
    """Return positions, values and number of the k entries of largest magnitude.

    Candidates for the k largest entries are the entries that reach a magnitude threshold from a
    sample of the entries. If fewer than k or more than `capacity` entries reach the magnitude
    threshold, `_largest` selects the k largest among all entries.
    """
    size, magnitudes = tf.size(x), magnitudes_of(x)
    lowest = tf.math.top_k(magnitudes[::stride], rank).values[-1]
    # the threshold is at least 1, the lowest nonzero magnitude, so that zeros are never selected
    threshold = tf.maximum(lowest, 1)
    candidates, count = _first_reaching(magnitudes, threshold, capacity)
    if tf.logical_and(count >= k, count <= capacity):
        reached = tf.gather(magnitudes, tf.minimum(candidates, size - 1))
        reached = tf.where(candidates < size, reached, 0)
        # tf.math.top_k returns the lowest position first among equal magnitudes
        highest = tf.math.top_k(reached, k)
        places = tf.gather(candidates, highest.indices)
    else:
        highest = tf.math.top_k(magnitudes, k)
        places = highest.indices
    chosen = highest.values > 0
    places = tf.sort(tf.where(chosen, places, size))
    return places, _values_at(x, places), tf.reduce_sum(tf.cast(chosen, tf.int32))


@fused(FLOATS, *[NUMBER] * 4)
def _top_k(x: Any, k: Any, stride: Any, rank: Any, capacity: Any) -> Any:
    return _largest(x, k, stride, rank, capacity)


@fused(FLOATS, FLOATS, FLOAT, *[NUMBER] * 4)
def _feedback_top_k(
    residual: Any, addend: Any, factor: Any, k: Any, stride: Any, rank: Any, capacity: Any
) -> Any:
    """Add an addend to a residual; return the sum and, cut out of it, its k largest entries."""
    total = residual + factor * addend
    places, values, count = _largest(total, k, stride, rank, capacity)
    # `places` contains n only if fewer than k entries are not 0. All of these entries are selected,
    # so the remainder is all 0, and writing 0 to entry 0 instead of entry n changes nothing.
    taken = tf.where(places < tf.size(total), places, 0)
    remainder = tf.tensor_scatter_nd_update(total, taken[:, None], tf.zeros_like(values))
    return remainder, places, values, count


@fused(FLOATS, FLOAT, NUMBER)
def _reaching(x: Any, threshold: Any, capacity: Any) -> Any:
    """Return the first `capacity` entries of magnitude >= threshold, and how many there are."""
    places, count = _first_reaching(magnitudes_of(x), tf.bitcast(threshold, tf.int32), capacity)
    return places, _values_at(x, places), count


def _cut(places: Any, values: Any, count: Any) -> tuple[Int64, Float32]:
    number = int(count)
    return places.numpy()[:number].astype(np.int64), values.numpy()[:number]


def _whole(places: Any, values: Any) -> tuple[Int64, Float32]:
    return places.numpy(), values.numpy()


def _none() -> tuple[Int64, Float32]:
    return np.empty(0, np.int64), np.empty(0, np.float32)


def top_k(x: Any, k: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude: positions and values, as numpy arrays."""
    x = tensor_of(x)
    size = int(x.shape[0])
    k = min(k, size)
    if k <= 0:
        return _none()
    planned = plan(size, k)
    return (
        _cut(*_top_k(x, *planned)) if USES_XLA else _whole(*tensorflow_scan.top_k(x, *planned[:3]))
    )


def feedback_top_k(
    residual: Any, addend: Any, k: int, factor: float = 1.0, hint: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Add an addend to a residual, then remove and return the sum's k largest entries.

    `feedback_top_k` changes a residual that is a DeviceArray on the device, and a numpy residual on
    the host. The hint (expected k-th magnitude) that the TensorFlow kernel returns is 0 (unknown).
    """
    k = min(k, residual.size)
    if k > 0 and isinstance(residual, DeviceArray):
        inputs = residual.value, tensor_of(addend), np.float32(factor), *plan(residual.size, k)
        if USES_XLA:
            residual.value, *selected = _feedback_top_k(*inputs)
            return *_cut(*selected), 0.0
        residual.value, *selected = tensorflow_scan.feedback_top_k(*inputs[:-1])
        return *_whole(*selected), 0.0
    accumulate(residual, addend, factor)
    indices, values = top_k(residual, k)
    residual[indices] = 0
    return indices, values, 0.0


@fused(FLOATS, *[NUMBER] * 3)
def _chunk_top_k(x: Any, k: Any, chunk: Any, last: Any) -> Any:
    """Return the k largest entries of each full chunk, and the `last` largest of the last chunk.

    In the array of positions, n (the number of entries) fills the places after the last selected
    position.
    """
    size = tf.size(x)
    count = (size + chunk - 1) // chunk
    rows = tf.reshape(tf.pad(magnitudes_of(x), [[0, count * chunk - size]]), [count, chunk])
    # tf.math.top_k returns the lowest position first among equal magnitudes
    highest = tf.math.top_k(rows, k)
    numbers = tf.range(count)[:, None]
    limits = tf.where(numbers == count - 1, last, k)
    chosen = tf.logical_and(highest.values > 0, tf.range(k)[None] < limits)
    places = tf.where(chosen, highest.indices + numbers * chunk, size)
    places = tf.sort(tf.reshape(places, [-1]))
    return places, _values_at(x, places), tf.reduce_sum(tf.cast(chosen, tf.int32))


def chunk_top_k(x: Any, k: int, chunk: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude of each chunk of x, as numpy arrays."""
    x = tensor_of(x)
    size = int(x.shape[0])
    if not size:
        return _none()
    return _cut(*_chunk_top_k(x, k, chunk, numpy_chunks.kept_of_last(size, k, chunk)))


def feedback_chunk_top_k(
    residual: Any, addend: Any, k: int, chunk: int, factor: float = 1.0
) -> tuple[Int64, Float32]:
    """Add an addend to a residual, then remove and return the k largest entries of each chunk."""
    if not isinstance(residual, DeviceArray):
        return numpy_chunks.feedback_chunk_top_k(residual, np.asarray(addend), k, chunk, factor)
    accumulate(residual, addend, factor)
    indices, values = chunk_top_k(residual, k, chunk)
    residual[indices] = 0
    return indices, values


@fused(FLOATS, FLOATS, FLOAT, FLOAT)
def _accumulated(target: Any, addend: Any, factor: Any, decay: Any) -> Any:
    return decay * target + factor * addend


def accumulate(target: Any, addend: Any, factor: float = 1.0, decay: float = 1.0) -> None:
    """Do ``target = decay * target + factor * addend`` in place, on the target's device."""
    if not isinstance(target, DeviceArray):
        accumulate_on_host(target, np.asarray(addend), factor, decay)
        return
    operands = target.value, tensor_of(addend)
    target.value = _accumulated(*operands, np.float32(factor), np.float32(decay))


def _bounds(k: int, size: int) -> tuple[int, int, int]:
    """Return the least and greatest acceptable number of selected entries, and array length."""
    least, most = math.ceil(numpy_select.TOO_FEW * k), math.floor(numpy_select.TOO_MANY * k)
    return least, most, min(size, most + 1)


def carried_top_k(x: Any, k: int, threshold: float) -> tuple[Int64, Float32, float]:
    """Return about k entries that reach a magnitude threshold, and the next step's threshold."""
    if not isinstance(x, DeviceArray):
        return numpy_select.carried_top_k(x, k, threshold)
    if threshold > 0 and x.size > numpy_select.EXACT_BELOW:
        least, most, capacity = _bounds(k, x.size)
        if USES_XLA:
            places, values, count = _reaching(x.value, np.float32(threshold), capacity)
        else:
            places, values = tensorflow_scan.reaching(x.value, np.float32(threshold))
            count = tf.size(places)
        if least <= int(count) <= most:
            indices, values = _cut(places, values, count)
            return indices, values, numpy_select.magnitude_at(np.abs(values), k)
    indices, values = top_k(x, k)
    return indices, values, numpy_select.lowest_of(values, k)


def feedback_of_each(
    residuals: Sequence[Float32],
    addends: Sequence[Float32],
    counts: Sequence[int],
    factors: Sequence[float],
    hints: Sequence[float],
) -> list[tuple[Int64, Float32, float]]:
    """Apply `feedback_top_k` (add a gradient, take the k largest entries) to several residuals."""
    inputs = zip(residuals, addends, counts, factors, hints, strict=True)
    return [feedback_top_k(*arguments) for arguments in inputs]


def feedback_carried(
    residual: Any, addend: Any, k: int, factor: float = 1.0, threshold: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Apply `carried_top_k` to a residual plus an addend; set the selected entries to zero."""
    if not isinstance(residual, DeviceArray):
        return numpy_select.feedback_carried(residual, np.asarray(addend), k, factor, threshold)
    accumulate(residual, addend, factor)
    indices, values, threshold = carried_top_k(residual, k, threshold)
    residual[indices] = 0
    return indices, values, threshold

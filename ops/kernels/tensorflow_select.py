"""Selection as `tf.function`s: shapes follow from the lengths alone, so that XLA can compile them.

What is selected comes back in arrays of a fixed length with n behind the last position; the caller
cuts them. Without XLA the bodies of `tensorflow_scan` take their place. Magnitudes are compared as
the bits of the float without its sign: the same order, and exact for subnormal numbers, which
TensorFlow's threads flush to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

_HALVINGS = 31  # of a range of positions
_SAMPLED_KEPT = 200
_SAFETY = 4.0
_SPARE = 64  # candidates beyond two for each entry kept


def plan(size: int, k: int) -> tuple[int, int, int, int]:
    """Return (k, stride, rank, capacity): every stride-th entry is a sample.

    Its rank-th largest magnitude is one that somewhat more than k entries should reach, and at most
    `capacity` may, 0 < k <= size.
    """
    stride = max(k // _SAMPLED_KEPT, 1)
    num_sampled = -(-size // stride)
    expected = k * num_sampled / size
    rank = min(int(expected + _SAFETY * math.sqrt(expected)) + 1, num_sampled)
    return k, stride, rank, min(size, 2 * k + _SPARE)


def _first_reaching(magnitudes: Any, threshold: Any, capacity: Any) -> tuple[Any, Any]:
    """Return the first `capacity` positions that reach a threshold, and how many do."""
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
    """Sampled threshold, exact top-k among the first that reach it; of all where that fails."""
    size, magnitudes = tf.size(x), magnitudes_of(x)
    lowest = tf.math.top_k(magnitudes[::stride], rank).values[-1]
    threshold = tf.maximum(lowest, 1)  # zeros are never selected
    candidates, count = _first_reaching(magnitudes, threshold, capacity)
    if tf.logical_and(count >= k, count <= capacity):
        found = tf.gather(magnitudes, tf.minimum(candidates, size - 1))
        found = tf.where(candidates < size, found, 0)
        highest = tf.math.top_k(found, k)  # ties: lowest position first
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
    """`_top_k` of the residual plus an addend, and what is left; where few are found, zeros."""
    total = residual + factor * addend
    places, values, count = _largest(total, k, stride, rank, capacity)
    taken = tf.where(places < tf.size(total), places, 0)  # fewer than k: all else is zero anyway
    rest = tf.tensor_scatter_nd_update(total, taken[:, None], tf.zeros_like(values))
    return rest, places, values, count


@fused(FLOATS, FLOAT, NUMBER)
def _reaching(x: Any, threshold: Any, capacity: Any) -> Any:
    """Return the first `capacity` entries of at least this magnitude, and how many there are."""
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
    """See `numpy_select.top_k`."""
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
    """See `numpy_select.feedback_top_k`; a numpy residual is added to on the host."""
    del hint
    k = min(k, residual.size)
    if k > 0 and isinstance(residual, DeviceArray):
        given = residual.value, tensor_of(addend), np.float32(factor), *plan(residual.size, k)
        if USES_XLA:
            residual.value, *found = _feedback_top_k(*given)
            return *_cut(*found), 0.0
        residual.value, *found = tensorflow_scan.feedback_top_k(*given[:-1])
        return *_whole(*found), 0.0
    accumulate(residual, addend, factor)
    indices, values = top_k(residual, k)
    residual[indices] = 0
    return indices, values, 0.0


@fused(FLOATS, *[NUMBER] * 3)
def _chunk_top_k(x: Any, k: Any, chunk: Any, last: Any) -> Any:
    """Return the k largest of each chunk, of the last one `last`; n behind the last position."""
    size = tf.size(x)
    count = (size + chunk - 1) // chunk
    rows = tf.reshape(tf.pad(magnitudes_of(x), [[0, count * chunk - size]]), [count, chunk])
    highest = tf.math.top_k(rows, k)  # ties: lowest position first
    numbers = tf.range(count)[:, None]
    most = tf.where(numbers == count - 1, last, k)
    chosen = tf.logical_and(highest.values > 0, tf.range(k)[None] < most)
    places = tf.where(chosen, highest.indices + numbers * chunk, size)
    places = tf.sort(tf.reshape(places, [-1]))
    return places, _values_at(x, places), tf.reduce_sum(tf.cast(chosen, tf.int32))


def chunk_top_k(x: Any, k: int, chunk: int) -> tuple[Int64, Float32]:
    """See `numpy_chunks.chunk_top_k`."""
    x = tensor_of(x)
    size = int(x.shape[0])
    if not size:
        return _none()
    return _cut(*_chunk_top_k(x, k, chunk, numpy_chunks.kept_of_last(size, k, chunk)))


def feedback_chunk_top_k(
    residual: Any, addend: Any, k: int, chunk: int, factor: float = 1.0
) -> tuple[Int64, Float32]:
    """See `numpy_chunks.feedback_chunk_top_k`."""
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
    """See `numpy_select.accumulate`."""
    if not isinstance(target, DeviceArray):
        accumulate_on_host(target, np.asarray(addend), factor, decay)
        return
    given = target.value, tensor_of(addend)
    target.value = _accumulated(*given, np.float32(factor), np.float32(decay))


def _bounds(k: int, size: int) -> tuple[int, int, int]:
    """Return the fewest and the most entries that are good enough, and the capacity for them."""
    least, most = math.ceil(numpy_select.TOO_FEW * k), math.floor(numpy_select.TOO_MANY * k)
    return least, most, min(size, most + 1)


def carried_top_k(x: Any, k: int, threshold: float) -> tuple[Int64, Float32, float]:
    """See `numpy_select.carried_top_k`."""
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
    """See `numpy_select.feedback_of_each`; here one by one."""
    given = zip(residuals, addends, counts, factors, hints, strict=True)
    return [feedback_top_k(*each) for each in given]


def feedback_carried(
    residual: Any, addend: Any, k: int, factor: float = 1.0, threshold: float = 0.0
) -> tuple[Int64, Float32, float]:
    """See `numpy_select.feedback_carried`."""
    if not isinstance(residual, DeviceArray):
        return numpy_select.feedback_carried(residual, np.asarray(addend), k, factor, threshold)
    accumulate(residual, addend, factor)
    indices, values, threshold = carried_top_k(residual, k, threshold)
    residual[indices] = 0
    return indices, values, threshold

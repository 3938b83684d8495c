"""The kernels in TensorFlow, for any device; each kernel is traced once for all array lengths.

The TensorFlow kernels take numpy arrays, tensors or `DeviceArray`s as arguments. The TensorFlow
kernels return selected and coded values as numpy arrays; all other results stay on the device.
TensorFlow's threads flush subnormal numbers to zero, so results of the TensorFlow kernels can
differ from results of the numpy kernels by less than the smallest normal number. In a function that
XLA compiles, a product and the following sum can be rounded once instead of twice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from thinwire.ops.kernels import (
    device,
    few_bits,
    numpy_chunks,
    numpy_ops,
    numpy_select,
    tensorflow_select,
)
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.kernels.device import (
    FLOAT,
    FLOATS,
    NUMBER,
    PLACES,
    DeviceArray,
    fused,
    tensor_of,
    traced,
)
from thinwire.ops.types import Array, Bool, CodedValues, Float32, Int64, UInt8

_MAGNITUDE_BITS = 0x7FFFFFFF
_MATRIX = tf.TensorSpec([None, None], tf.float32)


@traced(FLOATS, FLOATS, FLOATS)
def _changed(theta: Any, values: Any, rates: Any) -> Any:
    return theta - rates * values


@traced(FLOATS, FLOATS)
def _product(rates: Any, values: Any) -> Any:
    return rates * values


@fused(FLOATS)
def _is_finite(x: Any) -> Any:
    return tf.reduce_all(tf.math.is_finite(x))


@fused(FLOATS)
def _norm(x: Any) -> Any:
    return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64))))


@traced(FLOATS)
def _to_bfloat16(values: Any) -> Any:
    cut = tf.clip_by_value(values, -numpy_ops.LARGEST_BFLOAT16, numpy_ops.LARGEST_BFLOAT16)
    bits = tf.bitcast(cut, tf.uint32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 16), tf.constant(1, tf.uint32))
    return tf.cast(tf.bitwise.right_shift(bits + odd + 0x7FFF, 16), tf.uint16)


@traced(FLOATS)
def _to_float16(values: Any) -> Any:
    cut = tf.clip_by_value(values, -numpy_ops.LARGEST_FLOAT16, numpy_ops.LARGEST_FLOAT16)
    return tf.cast(cut, tf.float16)


@traced(FLOATS)
def _largest(values: Any) -> Any:
    return tf.reduce_max(tf.concat([tf.abs(values), [0.0]], 0))


@traced(FLOATS, FLOAT)
def _to_int8(values: Any, scale: Any) -> Any:
    return tf.cast(tf.clip_by_value(tf.round(values / scale), -127.0, 127.0), tf.int8)


@traced(FLOATS, PLACES, NUMBER)
def _chunk_figures(values: Any, chunks: Any, count: Any) -> Any:
    """Return sums over each chunk of values, and flags of magnitudes above their chunk's mean.

    Returns:
        Largest magnitude [c] and sum of magnitudes [c] of each chunk; flags [k] of magnitudes above
        their chunk's mean; sum [c] and number [c] of the flagged magnitudes of each chunk.
    """
    magnitudes = tf.abs(values)
    largest = tf.math.unsorted_segment_max(magnitudes, chunks, count)
    exact = tf.cast(magnitudes, tf.float64)
    sums = tf.math.unsorted_segment_sum(exact, chunks, count)
    lengths = tf.math.unsorted_segment_sum(tf.ones_like(exact), chunks, count)
    above = magnitudes > tf.gather(tf.cast(sums / lengths, tf.float32), chunks)
    upper = tf.math.unsorted_segment_sum(tf.where(above, exact, 0.0), chunks, count)
    num_above = tf.math.unsorted_segment_sum(tf.cast(above, tf.int64), chunks, count)
    return largest, sums, above, upper, num_above


@traced(FLOATS, PLACES, FLOATS, FLOATS)
def _uniform_levels(values: Any, chunks: Any, scales: Any, boundaries: Any) -> Any:
    limits = tf.gather(scales, chunks)[:, None] * boundaries[None]
    return tf.reduce_sum(tf.cast(tf.abs(values)[:, None] >= limits, tf.uint8), 1)


@traced(FLOATS)
def _is_negative(values: Any) -> Any:
    return tf.bitcast(values, tf.int32) < 0


@traced(PLACES)
def _damp(sigma: Any) -> Any:
    # The division is in double precision, because float32 division can use an approximate
    # reciprocal.
    return tf.cast(1.0 / tf.cast(tf.maximum(sigma, 1), tf.float64), tf.float32)


@traced(*[FLOATS] * 4)
def _compensate(values: Any, theta: Any, base: Any, strengths: Any) -> Any:
    return (theta - base) * values * values * strengths + values


@traced(FLOATS, FLOATS, *[FLOAT] * 3)
def _adapt(mean_square: Any, values: Any, decay: Any, share: Any, strength: Any) -> Any:
    averaged = values * values * share + decay * mean_square
    return averaged, strength / tf.sqrt(averaged + numpy_ops.FLOOR)


@traced(FLOATS, NUMBER, FLOATS, *[FLOAT] * 2)
def _contribution(values: Any, block_entries: Any, averages: Any, alpha: Any, share: Any) -> Any:
    """Return the new average magnitudes of gradient blocks and the blocks' sums of magnitudes."""
    num_full = tf.size(values) // block_entries
    rows = tf.reshape(values[: num_full * block_entries], [num_full, block_entries])
    tail = values[num_full * block_entries :][None][: tf.size(averages) - num_full]
    magnitudes = tf.constant(_MAGNITUDE_BITS, tf.uint32)
    sums, any_set = [], []
    for part in (rows, tail):
        bits = tf.bitwise.bitwise_and(tf.bitcast(part, tf.uint32), magnitudes)
        sums.append(tf.reduce_sum(tf.abs(part), 1))
        any_set.append(tf.reduce_any(bits != 0, 1))
    # TensorFlow flushes subnormal sums to zero, but callers take a sum of 0 for a block of zeros.
    # So a block with only subnormal numbers gets the smallest normal number as its sum.
    total = tf.concat(sums, 0)
    total = tf.where((total == 0) & tf.concat(any_set, 0), np.finfo(np.float32).tiny, total)
    counts = tf.concat(
        [tf.fill([num_full], block_entries), tf.fill([tf.shape(tail)[0]], tf.shape(tail)[1])], 0
    )
    averaged = alpha * averages + share * (total / tf.cast(counts, tf.float32))
    return tf.where(tf.math.is_finite(total), averaged, averages), total


@traced(_MATRIX, NUMBER)
def _to_levels(rows: Any, bits: Any) -> Any:
    num_levels = tf.cast(tf.bitwise.left_shift(1, bits), tf.float32)
    lows = tf.reduce_min(rows, 1)
    steps = (tf.reduce_max(rows, 1) - lows) / num_levels
    divisors = tf.where(steps > 0, steps, 1.0)[:, None]
    levels = tf.minimum((rows - lows[:, None]) / divisors, num_levels - 1)
    return tf.cast(tf.floor(levels), tf.uint16), lows, steps


@traced(FLOATS)
def _block_flags(sums: Any) -> Any:
    return sums != 0, tf.logical_not(tf.math.is_finite(sums))


@traced(FLOATS, tf.TensorSpec([None], tf.uint8))
def _best_first(scores: Any, classes: Any) -> Any:
    order = tf.argsort(scores, direction="DESCENDING", stable=True)
    order = tf.gather(order, tf.argsort(tf.gather(classes, order), stable=True))
    return order[: tf.math.count_nonzero(classes < 2)]


@traced(FLOATS, PLACES, NUMBER)
def _take_blocks(values: Any, numbers: Any, block_entries: Any) -> Any:
    body = tf.size(values) // block_entries * block_entries
    return tf.gather(tf.reshape(values[:body], [-1, block_entries]), numbers)


@traced(FLOATS, PLACES, NUMBER, NUMBER)
def _code_blocks(values: Any, numbers: Any, block_entries: Any, bits: Any) -> Any:
    """Return the quantization of some gradient blocks, and the rounding errors of all entries."""
    rows = _take_blocks(values, numbers, block_entries)
    levels, lows, steps = _to_levels(rows, bits)
    decoded = (tf.cast(levels, tf.float32) + 0.5) * steps[:, None] + lows[:, None]
    num_rows, size = tf.size(values) // block_entries, tf.size(values)
    shape = tf.stack([num_rows, block_entries])
    errors = tf.scatter_nd(tf.cast(numbers, tf.int32)[:, None], rows - decoded, shape)
    padding = tf.zeros([size - num_rows * block_entries])
    return levels, lows, steps, tf.concat([tf.reshape(errors, [-1]), padding], 0)


@traced(tf.TensorSpec([None, None], tf.uint16))
def _octets(levels: Any) -> Any:
    return tf.cast(levels, tf.uint8)


@traced(tf.TensorSpec([None, None], tf.uint16))
def _nibbles(levels: Any) -> Any:
    """Pack two 4-bit levels into one byte, to copy half as many bytes from the device."""
    octets = tf.cast(levels, tf.uint8)
    return tf.bitwise.bitwise_or(octets[:, ::2], tf.bitwise.left_shift(octets[:, 1::2], 4))


@traced(FLOATS, _MATRIX)
def _image(tensor: Any, right: Any) -> Any:
    return tf.matmul(tf.reshape(tensor, [-1, tf.shape(right)[0]]), right)


@traced(FLOATS, _MATRIX)
def _following(tensor: Any, left: Any) -> Any:
    return tf.matmul(tf.reshape(tensor, [tf.shape(left)[0], -1]), left, transpose_a=True)


@traced(_MATRIX, FLOATS, FLOATS)
def _plus_outer(total: Any, down: Any, across: Any) -> Any:
    return total + down[:, None] * across[None]


def _rates(rate: float | Float32, size: int) -> Any:
    """Return learning rates of k entries as an array [k], or one rate for all entries as [1]."""
    return np.broadcast_to(np.asarray(rate, np.float32), (size if np.ndim(rate) else 1,))


def zeros(sizes: Sequence[int]) -> list[Float32]:
    """Return one DeviceArray of zeros for each size."""
    return cast("list[Float32]", [DeviceArray(tf.zeros(size)) for size in sizes])


def joined(arrays: Sequence[Any]) -> Float32:
    """Return one DeviceArray with the entries of all arrays, in order."""
    return cast("Float32", DeviceArray(tf.concat([tensor_of(array) for array in arrays], 0)))


def first_not_finite(tensors: Sequence[Any]) -> int | None:
    """Return the index of the first tensor with NaN or infinity; None if there is none.

    The function `first_not_finite` copies its flags of all tensors from the device together.
    """
    if not any(isinstance(tensor, DeviceArray) for tensor in tensors):
        return numpy_ops.first_not_finite(tensors)
    finite = tf.stack([_is_finite(tensor_of(tensor)) for tensor in tensors]).numpy()
    return None if finite.all() else int(finite.argmin())


def norm(tensor: Any) -> float:
    """Return the L2 norm of a finite tensor; the sum over a DeviceArray has double precision."""
    if not isinstance(tensor, DeviceArray):
        return numpy_ops.norm(tensor)
    return float(_norm(tensor.value))


def apply_sparse(theta: Float32, indices: Any, values: Any, rate: float | Float32) -> None:
    """Do ``theta[indices] -= rate * values``; theta is a numpy array or a `tf.Variable` [n]."""
    rates = _rates(rate, int(values.shape[0]))
    if isinstance(theta, tf.Variable):
        product = _product(rates, values)
        tf.raw_ops.ResourceScatterSub(resource=theta.handle, indices=indices, updates=product)
        return
    theta[indices] = _changed(theta[indices], values, rates).numpy()


def apply_dense(theta: Float32, values: Any, rate: float | Float32) -> None:
    """Do ``theta -= rate * values``; theta is a numpy array or a `tf.Variable` [n]."""
    rates = _rates(rate, int(values.shape[0]))
    if isinstance(theta, tf.Variable):
        theta.assign_sub(_product(rates, values))
        return
    np.copyto(theta, _changed(theta, values, rates).numpy())


def scale(values: Any, rate: float | Float32) -> Any:
    """Return ``rate * values``: a DeviceArray if `values` is a DeviceArray, else a numpy array."""
    if isinstance(values, DeviceArray):
        return DeviceArray(_product(_rates(rate, values.size), values.value))
    return _product(_rates(rate, int(values.shape[0])), values).numpy()


def damp(sigma: Any) -> Float32:
    """Return 1 / max(1, sigma), the factor on the learning rate of weights with staleness sigma."""
    shares: Float32 = _damp(tf.cast(sigma, tf.int64)).numpy()
    return shares


def compensate(values: Any, theta: Any, base: Any, strength: float | Float32) -> Float32:
    """Return ``g + L * g * g * (theta - base)``: a late gradient g corrected to newer weights."""
    strengths = _rates(strength, int(values.shape[0]))
    compensated: Float32 = _compensate(values, theta, base, strengths).numpy()
    return compensated


def adapt(mean_square: Any, values: Any, decay: float, strength: float) -> tuple[Float32, Float32]:
    """Return the next running mean of squared gradients and the delay compensation strengths.

    The compensation strengths can differ from `numpy_ops.adapt`'s strengths in the last bit.
    """
    averaged, strengths = _adapt(mean_square, values, decay, 1 - decay, strength)
    return averaged.numpy(), strengths.numpy()


def contribution(values: Any, block_entries: int, averages: Any, alpha: float) -> tuple[Any, Any]:
    """Return new averages and sums of magnitudes of blocks, on the device if `values` is there.

    The sums of magnitudes can differ from the sums of `numpy_ops.contribution` in their last bits.
    """
    inputs = tensor_of(values), block_entries, tensor_of(averages)
    averaged, sums = _contribution(*inputs, alpha, 1 - alpha)
    if isinstance(values, DeviceArray):
        return DeviceArray(averaged), DeviceArray(sums)
    return averaged.numpy(), sums.numpy()


def to_levels(rows: Any, bits: int) -> tuple[Array, Float32, Float32]:
    """Quantize blocks [m, e]: levels of 16, 8 or 4 bits, lowest values [m], step widths [m]."""
    levels, lows, steps = _to_levels(rows, bits)
    return _levels_on_host(levels, bits), lows.numpy(), steps.numpy()


def _levels_on_host(levels: Any, bits: int) -> Array:
    """Copy quantization levels [m, e] from device to host, in as few bytes as possible."""
    if bits == 16:
        return cast("Array", levels.numpy())
    if bits == 8 or levels.shape[1] % 2:
        return cast("Array", _octets(levels).numpy())
    pairs = _nibbles(levels).numpy()
    return np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(pairs), 2 * pairs.shape[1])


def block_flags(sums: Any) -> tuple[Bool, Bool]:
    """Return two flags per block: True if its sum of magnitudes is not 0, or is not finite."""
    if not isinstance(sums, DeviceArray):
        return numpy_ops.block_flags(sums)
    not_zero, not_finite = _block_flags(sums.value)
    return not_zero.numpy(), not_finite.numpy()


def best_first(scores: Sequence[Any], classes: UInt8) -> Int64:
    """Return positions of scores by class, then by descending score, then by position.

    The function `best_first` sorts on the device if at least one array of scores is a DeviceArray.
    """
    if not any(isinstance(part, DeviceArray) for part in scores):
        return numpy_ops.best_first(scores, classes)
    order = _best_first(tensor_of(joined(scores)), classes)
    return cast("Int64", order.numpy().astype(np.int64))


def take_blocks(values: Any, numbers: Int64, out: Array) -> None:
    """Copy some gradient blocks of a tensor, on the device or the host, into `out` [m, e]."""
    if isinstance(values, DeviceArray):
        np.copyto(out, _take_blocks(values.value, numbers, out.shape[1]).numpy())
    else:
        numpy_ops.take_blocks(values, numbers, out)


def code_blocks(
    values: Any, numbers: Int64, block_entries: int, bits: int
) -> tuple[Array, Float32, Float32, Any]:
    """Quantize some full gradient blocks; the rounding errors of a DeviceArray stay on the device.

    Returns:
        Levels [m, e], lowest values [m], step widths [m], and the coding errors of all entries.
    """
    if not isinstance(values, DeviceArray):
        return numpy_ops.code_blocks(values, numbers, block_entries, bits)
    levels, lows, steps, errors = _code_blocks(values.value, numbers, block_entries, bits)
    return _levels_on_host(levels, bits), lows.numpy(), steps.numpy(), DeviceArray(errors)


def power_step(tensor: Any, right: Float32) -> tuple[Float32, Float32] | None:
    """Do one step of PowerSGD's subspace iteration; only the factors are copied from the device.

    The device sums the entries of matrix products in another order than `numpy_ops.power_step`.
    """
    if not isinstance(tensor, DeviceArray):
        return numpy_ops.power_step(tensor, right)
    return numpy_ops.subspace_step(
        lambda: _image(tensor.value, right).numpy(),
        lambda left: _following(tensor.value, left).numpy(),
    )


def entries(left: Float32, right: Float32, first: int, size: int) -> Any:
    """Return entries of ``left @ right.T`` on the device, summed in the order of `numpy_ops`."""
    product = tf.zeros([len(left), len(right)])
    for down, across in zip(left.T, right.T, strict=True):
        product = _plus_outer(product, down, across)
    return DeviceArray(tf.reshape(product, [-1])[first : first + size])


def quantise(values: Any, dtype: str) -> CodedValues:
    """Code values as float32, bfloat16, float16 or int8; the coded values are numpy arrays."""
    if dtype == "float32":
        return numpy_ops.quantise(np.asarray(values), dtype)
    values = tensor_of(values)
    if dtype == "bfloat16":
        return CodedValues(dtype, _to_bfloat16(values).numpy())
    if dtype == "float16":
        return CodedValues(dtype, _to_float16(values).numpy())
    if dtype == "int8":
        factor = numpy_ops.int8_scale(float(_largest(values)))
        return CodedValues(dtype, _to_int8(values, factor).numpy(), factor)
    raise numpy_ops.unknown_dtype(dtype)


def quantise_chunks(values: Any, edges: Int64, dtype: str) -> tuple[UInt8, Float32]:
    """Code values of consecutive chunks with a few bits each, and compute each chunk's scales.

    The TensorFlow kernel sums each chunk's magnitudes in double precision, in another order than
    `few_bits.quantise_chunks`.
    """
    # selected values are few, and on the host already
    if not isinstance(values, DeviceArray):
        return few_bits.quantise_chunks(values, edges, dtype)
    if not values.size:
        return few_bits.quantise_chunks(np.empty(0, np.float32), edges, dtype)
    tensor, lengths = values.value, np.diff(edges)
    chunks = np.repeat(np.arange(lengths.size), lengths)
    largest, sums, above, upper, num_above = _chunk_figures(tensor, chunks, lengths.size)
    if dtype.startswith("int"):
        scales = few_bits.rounded(largest.numpy())[:, None]
        levels = _uniform_levels(tensor, chunks, scales[:, 0], few_bits.boundaries(dtype)).numpy()
    elif dtype == "sign":
        scales = few_bits.rounded(sums.numpy() / lengths)[:, None]
        levels = np.zeros(values.size, np.uint8)
    else:
        levels = above.numpy().view(np.uint8)
        means = few_bits.side_means(sums.numpy(), upper.numpy(), num_above.numpy(), lengths)
        scales = few_bits.rounded(means)
    return few_bits.with_signs(levels, _is_negative(tensor).numpy(), dtype), scales


#: The TensorFlow kernels; operations that this module does not replace are numpy functions.
KERNELS = Kernels.of(
    "tf",
    *(sys.modules[__name__], tensorflow_select, device),
    *(numpy_ops, numpy_select, numpy_chunks, few_bits),
)

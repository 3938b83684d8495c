"""The kernels in numpy, named like the fields of `thinwire.ops.kernels.base.Kernels`.

The numpy kernels that apply an update compute in float32 in a fixed order: product = rate * value,
then weight - product. The TensorFlow kernels use the same order of operations as the numpy kernels,
so the results are equal bit for bit above the subnormal range (TensorFlow's threads flush subnormal
numbers to zero).

The module `numpy_ops` has kernels for arrays of a codec's state, for applying updates, for counting
updates per weight (AdaComp's staleness), for delay compensation (DC-ASGD), for coding values in
fewer bits, for blocks of a gradient (DGT), and for products of thin matrices (PowerSGD). Kernels
that select entries are in `thinwire.ops.kernels.numpy_select` and `numpy_chunks`. Kernels for
values quantized to few bits, with scales for each chunk, are in `few_bits`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thinwire.ops.kernels import few_bits, numpy_chunks, numpy_select
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import (
    Array,
    Bool,
    ChunkedValues,
    CodedValues,
    Float32,
    Int32,
    Int64,
    State,
    UInt8,
)

# Number of entries that the function `peak` reads twice; the second read is from the processor's
# cache.
_FINITE_PIECE = 1 << 18
# number of weights whose hits (updates of the weight) the function `hits` counts together, for any
# model size
_REGION = 1 << 19
# number of entries of a dense update, or of gradient blocks, that are processed at a time
_PIECE = 1 << 16
# number of entries of one tile of a matrix product in the function `entries`
_TILE_ENTRIES = 1 << 15

#: Term under the square root in `adapt`, which keeps the strength of the delay compensation finite
#: where all gradients were 0.
FLOOR = 1e-7

LARGEST_FLOAT16 = np.float32(65504)
LARGEST_BFLOAT16 = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# int8 codes are from -127 to 127, so that 0 is exact and both signs have the same range
_LARGEST_CODE = 127
# Limit of the entries of PowerSGD's factors, below float32's largest number (3.4e38), with a margin
# for sums and rounding.
_LARGEST_FACTOR = np.float32(1e37)


# -- arrays of a codec's state ---------------------------------------------------------------------


def zeros(sizes: Sequence[int]) -> list[Float32]:
    """Return one float32 array of zeros for each size; the arrays are adjacent in memory."""
    return np.split(np.zeros(sum(sizes), np.float32), np.cumsum(sizes)[:-1])


def joined(arrays: Sequence[Float32]) -> Float32:
    """Return one array [sum of n] with the entries of all [n] float32 arrays, in order."""
    return np.concatenate(arrays)


def aligned(size: int) -> Float32:
    """Return zeros [size] float32, aligned to 64 bytes for TensorFlow's import without a copy."""
    raw = np.zeros(size + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + size]


def all_finite(values: Float32) -> bool:
    """Return True if `values` [k] holds no NaN or infinity, without temporary arrays."""
    return peak(values) < math.inf


def peak(values: Float32) -> float:
    """Return the largest magnitude in `values` [k], or infinity if a value is NaN."""
    largest = 0.0
    for start in range(0, values.size, _FINITE_PIECE):
        piece = values[start : start + _FINITE_PIECE]
        high, low = float(piece.max()), float(piece.min())
        # The max and min of NaN are NaN, and a comparison with NaN is False, so the `not` in this
        # condition catches NaN too.
        if not (high < math.inf and low > -math.inf):
            return math.inf
        largest = max(largest, high, -low)
    return largest


def first_not_finite(tensors: Sequence[Float32]) -> int | None:
    """Return the index of the first tensor [n] float32 with NaN or infinity, else None."""
    for number, tensor in enumerate(tensors):
        if not all_finite(tensor):
            return number
    return None


def norm(tensor: Float32) -> float:
    """Return the L2 norm of a finite tensor [n] float32."""
    with np.errstate(over="ignore"):
        square = float(np.dot(tensor, tensor))
    if 1e-30 < square < math.inf:
        return math.sqrt(square)
    # The sum of squares leaves the range of float32, so the tensor is divided by its largest
    # magnitude first.
    largest = float(np.max(np.abs(tensor), initial=0.0))
    return largest * float(np.linalg.norm(tensor / np.float32(largest))) if largest else 0.0


def as_saved(state: State) -> State:
    """Return a codec's state unchanged: its arrays are numpy arrays, ready for a checkpoint."""
    return state


def as_kept(saved: State, fresh: State) -> State:
    """Return a codec's saved state unchanged: its arrays are numpy arrays, as codecs need."""
    return saved


# -- applying updates ------------------------------------------------------------------------------


def apply_sparse(theta: Float32, indices: Int64, values: Float32, rate: float | Float32) -> None:
    """Subtract a sparse update from weights: ``theta[indices] -= rate * values`` in place.

    Args:
        theta: [n] float32, weights, which `apply_sparse` changes in place.
        indices: [k] int64, unique positions of the values in theta.
        values: [k] float32, gradients or weight changes to subtract, times `rate`.
        rate: One learning rate for all entries, or [k] float32 with a rate for each entry.
    """
    np.subtract.at(theta, indices, scale(values, rate))


def apply_dense(theta: Float32, values: Float32, rate: float | Float32) -> None:
    """Do ``theta -= rate * values`` in place for [n] float32 arrays; `rate` may be a number."""
    rates, product = np.asarray(rate, np.float32), np.empty(min(_PIECE, values.size), np.float32)
    for start in range(0, values.size, _PIECE):
        part = slice(start, start + _PIECE)
        piece = values[part]
        times = rates[part] if rates.ndim else rates
        theta[part] -= np.multiply(piece, times, out=product[: piece.size])


def scale(values: Float32, rate: float | Float32) -> Float32:
    """Return ``rate * values`` in float32; `rate` is a number or has one entry per value."""
    product: Float32 = np.multiply(values, np.asarray(rate, np.float32))
    return product


# -- how often entries were hit --------------------------------------------------------------------
# Source: AdaComp's update of the parameter server; docs/methods/adacomp.md.


def hits(
    window: Sequence[Array | None],
    indices: Int64 | None,
    scratch: Array,
) -> Int32:
    """Count how many updates changed each weight: the weight's staleness sigma.

    The cost of `hits` is O(number of updates * number of changed entries per update). The function
    `hits` processes its scratch array in regions that fit the processor's cache.

    Args:
        window: For each update, the positions of the weights that it changed: ascending, unique,
            [k] of any integer dtype. None: a dense update, which changed every weight.
        indices: [k] int64, ascending positions of the weights for which to count updates. None: all
            weights.
        scratch: [n] integers for a shard of n weights, all zero before and after the call.

    Returns:
        Number of updates that changed each weight: [k] int32, or [n] int32 if `indices` is None.
    """
    sparse = [touched for touched in window if touched is not None]
    num_dense = len(window) - len(sparse)
    sigma = np.full(scratch.size if indices is None else indices.size, num_dense, np.int32)
    if indices is None:
        for touched in sparse:
            np.add.at(sigma, touched.astype(np.int64), np.int32(1))
        return sigma
    # The counts are made in groups of sets, because more sets than `largest_count` would overflow a
    # counter in `scratch`.
    largest_count = int(np.iinfo(scratch.dtype).max)
    for first in range(0, len(sparse), largest_count):
        _add_hits(sparse[first : first + largest_count], indices, scratch, sigma)
    return sigma


def _add_hits(
    window: Sequence[Array],
    indices: Int64,
    scratch: Array,
    sigma: Int32,
) -> None:
    """Add to sigma [k] how many updates in the window changed each weight, counted in `scratch`."""
    edges = np.arange(0, scratch.size + _REGION, _REGION)
    borders = indices.searchsorted(edges)
    stops = [touched.searchsorted(edges.astype(touched.dtype)) for touched in window]
    counter = scratch[:_REGION]
    increment = scratch.dtype.type(1)
    for region, start in enumerate(edges[:-1].tolist()):
        part = slice(borders[region], borders[region + 1])
        if part.start == part.stop:
            continue
        positions = [
            touched[stop[region] : stop[region + 1]].astype(np.int64) - start
            for touched, stop in zip(window, stops, strict=True)
        ]
        for touched in positions:
            counter[touched] += increment
        sigma[part] += counter.take(indices[part] - start)
        # set the scratch array to zero again for the next region and call
        for touched in positions:
            counter[touched] = 0


def damp(sigma: Array) -> Float32:
    """Return 1 / max(1, sigma), the factor on the learning rate of each weight.

    Args:
        sigma: [k] integers, number of updates that changed each weight (its staleness).
    """
    shares: Float32 = np.float32(1) / np.maximum(sigma, 1).astype(np.float32)
    return shares


def union(sets: Sequence[Int64]) -> Int64:
    """Return all positions in any of the given sets of positions, ascending, without duplicates.

    The function `union` of sets of positions does not use np.unique, which hashes. A stable sort
    merges sets of positions that are sorted already a hundred times faster than np.unique.

    Args:
        sets: Sets of positions, at least one set; each is ascending and unique, [k] int64.
    """
    if len(sets) == 1:
        return sets[0]
    joined = np.concatenate(sets)
    joined.sort(kind="stable")
    is_new = np.ones(joined.size, bool)
    np.not_equal(joined[1:], joined[:-1], out=is_new[1:])
    return joined[is_new]


# -- delay compensation ----------------------------------------------------------------------------
# Source: Zheng et al., ICML 2017; docs/methods/grouping_sgd.md.


def compensate(
    values: Float32, theta: Float32, base: Float32, strength: float | Float32
) -> Float32:
    """Return ``g + L * g * g * (theta - base)``: a late gradient g corrected to newer weights.

    Args:
        values: g, [k] float32, the gradient computed at the weights `base`.
        theta: [k] float32, the current weights, to which the gradient is corrected.
        base: [k] float32, the weights at which the gradient g was computed.
        strength: L, the strength of the correction for delay, one number or [k] float32.

    Returns:
        The corrected gradient, [k] float32, a new array.
    """
    result = np.subtract(theta, base)
    result *= values
    result *= values
    result *= np.asarray(strength, np.float32)
    result += values
    return result


def adapt(
    mean_square: Float32, values: Float32, decay: float, strength: float
) -> tuple[Float32, Float32]:
    """Return the next running mean of squared gradients, and strengths L of delay compensation.

    With gradient g and running mean m of squared gradients, `adapt` computes
    ``m = decay * m + (1 - decay) * g * g`` and the compensation strength
    ``L = strength / sqrt(m + 1e-7)``.

    Args:
        mean_square: Previous running mean m of squared gradients, [k] float32, not negative; 0
            before the first gradient.
        values: Gradient values of k weights, [k] float32.
        decay: Weight of the previous mean of squared gradients, from 0 (use only the new gradient)
            to below 1.
        strength: Numerator of the strength L of delay compensation, not negative.

    Returns:
        The next mean m and the strengths L, [k] float32 each, new arrays.
    """
    averaged = values * values
    averaged *= np.float32(1 - decay)
    # One scratch array is used for all operations, because fresh memory pages cost more time than
    # the arithmetic.
    scratch = np.multiply(mean_square, np.float32(decay))
    averaged += scratch
    np.sqrt(np.add(averaged, np.float32(FLOOR), out=scratch), out=scratch)
    return averaged, np.divide(np.float32(strength), scratch, out=scratch)


# -- values in fewer bits --------------------------------------------------------------------------
# Values that are finite stay finite after coding and decoding.


def quantise(values: Float32, dtype: str) -> CodedValues:
    """Code float32 values in float32, bfloat16, float16 or int8.

    Args:
        values: [k] float32, finite values of k gradient entries, to code in `dtype`.
        dtype: Dtype of the coded values: float32 (no copy); bfloat16 (round to nearest even);
            float16 (limit to +-65504); int8 (one scale = max|v| / 127 for all values, round half to
            even).

    Raises:
        ValueError: `dtype` is not float32, bfloat16, float16 or int8.
    """
    if dtype == "float32":
        return CodedValues(dtype, values)
    if dtype == "bfloat16":
        return CodedValues(dtype, _to_bfloat16(values))
    if dtype == "float16":
        cut = np.clip(values, -LARGEST_FLOAT16, LARGEST_FLOAT16)
        return CodedValues(dtype, cut.astype(np.float16))
    if dtype == "int8":
        scale = int8_scale(float(np.max(np.abs(values), initial=0.0)))
        codes = np.divide(values, np.float32(scale))
        np.clip(np.rint(codes, out=codes), -_LARGEST_CODE, _LARGEST_CODE, out=codes)
        return CodedValues(dtype, codes.astype(np.int8), scale)
    raise unknown_dtype(dtype)


def dequantise(coded: CodedValues) -> Float32:
    """Return the values [k] float32 that `coded` represents: data * scale, rounded once.

    float32 data with scale 1 is returned without a copy.

    Raises:
        ValueError: The dtype of the coded values is not float32, bfloat16, float16 or int8.
    """
    if isinstance(coded, ChunkedValues):
        return few_bits.dequantise_chunks(coded)
    if coded.dtype == "float32":
        values = coded.data
    elif coded.dtype == "bfloat16":
        bits = coded.data.astype(np.uint32)
        bits <<= 16
        values = bits.view(np.float32)
    elif coded.dtype in ("float16", "int8"):
        values = coded.data.astype(np.float32)
    else:
        raise unknown_dtype(coded.dtype)
    return values if coded.scale == 1 else values * np.float32(coded.scale)


def int8_scale(largest: float) -> float:
    """Return the factor on int8 codes of values with a given largest magnitude, above 0."""
    if largest == 0:
        return 1.0
    scale = np.float32(largest / _LARGEST_CODE)
    # If the scale was rounded up, the largest code may decode to infinity, so the scale is rounded
    # down.
    if float(scale) * _LARGEST_CODE > _LARGEST_FLOAT32:
        scale = np.nextafter(scale, np.float32(0))
    return max(float(scale), _SMALLEST_SCALE)


def unknown_dtype(dtype: str) -> ValueError:
    """Return the ValueError to raise for a dtype of coded values that is unknown."""
    return ValueError(
        f"the value dtype {dtype!r} is unknown; expected float32, bfloat16, float16 or int8."
    )


def _to_bfloat16(values: Float32) -> np.ndarray:
    """Return [k] uint16: upper halves of float32 values, rounded to nearest even, always finite."""
    bits = np.clip(values, -LARGEST_BFLOAT16, LARGEST_BFLOAT16).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    return bits.astype(np.uint16)


# -- contributions of blocks -----------------------------------------------------------------------
# Source: DGT's contribution; docs/methods/dgt.md. Sums are pairwise in float32.


def contribution(
    values: Float32, block_entries: int, averages: Float32, alpha: float
) -> tuple[Float32, Float32]:
    """Update the running mean magnitude (contribution) of each block of a gradient tensor.

    The new average magnitude of a gradient block is
    ``alpha * average + (1 - alpha) * mean magnitude``. If the sum of magnitudes of a gradient block
    is not finite, the block's average magnitude stays unchanged.

    Args:
        values: [size] float32, the gradient tensor's values.
        block_entries: Number of entries per gradient block. The last block of a tensor can have
            fewer entries; its mean is over its own entries only.
        averages: [n] float32, previous average magnitude of each gradient block, n = ceil(size /
            block_entries).
        alpha: Weight of a block's previous average magnitude, 0 to 1.

    Returns:
        The new averages [n] float32, and the sums of magnitudes [n] float32. A sum is 0 only for a
        block of zeros. A sum is not finite if a value is not finite, or if the sum exceeds float32.
    """
    sums = np.empty(averages.size, np.float32)
    num_full = values.size // block_entries
    step = max(1, _PIECE // block_entries)
    scratch = np.empty(min(step, num_full) * block_entries, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, num_full, step):
            last = min(first + step, num_full)
            piece = values[first * block_entries : last * block_entries]
            magnitudes = np.abs(piece, out=scratch[: piece.size])
            np.add.reduce(magnitudes.reshape(-1, block_entries), axis=1, out=sums[first:last])
        if num_full < sums.size:
            sums[-1] = np.add.reduce(np.abs(values[num_full * block_entries :]))
        return carried_on(averages, sums, values.size, block_entries, alpha), sums


def contribution_at(
    values: Float32, edges: Int64, size: int, block_entries: int, averages: Float32, alpha: float
) -> tuple[Float32, Float32]:
    """Update each block's running mean magnitude for a sparse tensor; missing entries count as 0.

    Args:
        values: [k] float32, stored entries of the sparse tensor, in order of their positions.
        edges: [n + 1] int64: the values of gradient block b are ``values[edges[b] : edges[b +
            1]]``.
        size: Number of entries of the sparse tensor, with the zeros.
        block_entries: Number of entries per gradient block.
        averages: [n] float32, previous average magnitude of each gradient block.
        alpha: Weight of a block's previous average magnitude, 0 to 1.
    """
    sums = np.zeros(averages.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        filled = np.flatnonzero(edges[1:] > edges[:-1])
        if filled.size:
            sums[filled] = np.add.reduceat(np.abs(values), edges[:-1][filled])
        return carried_on(averages, sums, size, block_entries, alpha), sums


def carried_on(
    averages: Float32, sums: Float32, size: int, block_entries: int, alpha: float
) -> Float32:
    """Return the average magnitudes [n] of gradient blocks after a step with given sums [n]."""
    means = sums / np.float32(block_entries)
    if means.size:
        means[-1] = sums[-1] / np.float32(size - (means.size - 1) * block_entries)
    updated = np.float32(alpha) * averages
    updated += np.float32(1 - alpha) * means
    return np.where(np.isfinite(sums), updated, averages)


# -- levels of a block's values --------------------------------------------------------------------
# ``step = (hi - lo) / 2**bits``, ``level = floor((v - lo) / step)``, at most ``2**bits - 1``.
# A level represents ``lo + (level + 0.5) * step``. A block of equal values has step 0, and its
# levels represent ``lo``. Values and ``hi - lo`` must be finite. Source: docs/methods/dgt.md.


def to_levels(rows: Float32, bits: int) -> tuple[Array, Float32, Float32]:
    """Quantize blocks of equal length, each to uniform levels from its lowest to its highest value.

    Args:
        rows: [m, e] float32, m gradient blocks of e values each, one block per row.
        bits: Number of bits per quantization level: 16, 8 or 4.

    Returns:
        Levels [m, e], uint16 with 16 bits and uint8 with 8 or 4 bits; the blocks' lowest values [m]
        float32 and step widths [m] float32.
    """
    lows = rows.min(axis=1, initial=np.inf)
    steps = step_of(lows, rows.max(axis=1, initial=-np.inf), bits)
    return _levels(rows, lows[:, None], steps[:, None], bits), lows, steps


def to_levels_at(values: Float32, starts: Int64, bits: int) -> tuple[Array, Float32, Float32]:
    """Quantize adjacent blocks of any length above 0 to uniform levels (see `to_levels`).

    Args:
        values: [k] float32, the values of all gradient blocks, block after block.
        starts: [m] int64, ascending from 0: the start of each gradient block in `values`.
        bits: Number of bits per quantization level: 16, 8 or 4.

    Returns:
        Levels [k]; the blocks' lowest values [m] and step widths [m].
    """
    if not starts.size:
        return np.zeros(0, _dtype(bits)), np.zeros(0, np.float32), np.zeros(0, np.float32)
    lows = np.minimum.reduceat(values, starts)
    steps = step_of(lows, np.maximum.reduceat(values, starts), bits)
    lengths = np.diff(starts, append=values.size)
    spread = np.repeat(lows, lengths), np.repeat(steps, lengths)
    return _levels(values, *spread, bits), lows, steps


def from_levels(levels: Array, lows: Float32, steps: Float32) -> Float32:
    """Return the values of quantization levels, given each block's lowest value and step width."""
    values = levels.astype(np.float32)
    values += np.float32(0.5)
    values *= steps
    values += lows
    return values


def step_of(lows: Float32, highs: Float32, bits: int) -> Float32:
    """Return the quantization steps of blocks, float32: (highest - lowest value) / 2**bits."""
    return (highs - lows) / np.float32(2**bits)


def _levels(values: Float32, lows: Float32, steps: Float32, bits: int) -> Array:
    levels = values - lows
    # A block of equal values has step width 0, so its differences, which are 0, are divided by 1.
    levels /= np.where(steps > 0, steps, np.float32(1))
    np.minimum(levels, np.float32(2**bits - 1), out=levels)
    # the cast to an integer truncates, which equals floor for levels >= 0
    return levels.astype(_dtype(bits))


def _dtype(bits: int) -> type:
    return np.uint16 if bits == 16 else np.uint8


# -- blocks of a tensor ----------------------------------------------------------------------------


def is_on_device(array: Any) -> bool:
    """Return True if the array is on a device of a framework, and not a numpy array."""
    return not isinstance(array, np.ndarray)


def block_flags(sums: Float32) -> tuple[Bool, Bool]:
    """Return two flags per block [n]: True if its sum of magnitudes is not 0, or is not finite."""
    return sums != 0, ~np.isfinite(sums)


def best_first(scores: Sequence[Float32], classes: UInt8) -> Int64:
    """Return the positions of scores, sorted by class, and within a class by descending score.

    `best_first` sorts equal scores of gradient blocks within a class by position.

    Args:
        scores: Arrays that together have m float32 scores of gradient blocks. Scores in class 1 are
            finite.
        classes: [m] uint8, class of each score: class 0 comes first, then class 1; class 2 is
            omitted from the result.
    """
    # lexsort is stable: equal scores of a class stay in order of their positions.
    order = np.lexsort((-joined(scores), classes))
    positions: Int64 = order[: int(np.count_nonzero(classes < 2))]
    return positions


def take_blocks(values: Array, numbers: Int64, out: Array) -> None:
    """Copy some blocks of full length out of a gradient tensor.

    Args:
        values: [size] of any dtype, the gradient tensor that consists of blocks.
        numbers: [m] int64, indices of the gradient blocks to copy.
        out: [m, entries per block], overwritten with the copied gradient blocks.
    """
    np.take(rows_of(values, out.shape[1]), numbers, axis=0, out=out, mode="clip")


def code_blocks(
    values: Float32, numbers: Int64, block_entries: int, bits: int
) -> tuple[Array, Float32, Float32, Float32]:
    """Quantize some gradient blocks of full length of a tensor with `to_levels`.

    Args:
        values: [size] float32, the gradient tensor that consists of blocks.
        numbers: [m] int64, ascending indices of the gradient blocks to quantize.
        block_entries: e, the number of entries per gradient block.
        bits: Number of bits per quantization level: 16, 8 or 4.

    Returns:
        Levels [m, e], lowest values [m], step widths [m], and errors [size] float32. The error of a
        coded entry is its value minus the value that its level represents; entries of blocks that
        were not coded have error 0.
    """
    errors = np.zeros(values.size, np.float32)
    rows, missed = rows_of(values, block_entries), rows_of(errors, block_entries)
    levels: Array = np.empty((numbers.size, block_entries), _dtype(bits))
    lows, steps = np.empty((2, numbers.size), np.float32)
    piece = max(1, _PIECE // block_entries)
    for first in range(0, numbers.size, piece):
        at = slice(first, first + piece)
        chunk = rows[numbers[at]]
        levels[at], lows[at], steps[at] = to_levels(chunk, bits)
        chunk -= from_levels(levels[at], lows[at, None], steps[at, None])
        missed[numbers[at]] = chunk
    return levels, lows, steps, errors


def rows_of(values: Array, block_entries: int) -> Array:
    """Return a view [m, e] of a tensor's blocks of full length, one block per row."""
    body = values.size - values.size % block_entries
    return values[:body].reshape(-1, block_entries)


# -- products of thin matrices ---------------------------------------------------------------------


def entries(left: Float32, right: Float32, first: int, size: int) -> Float32:
    """Return consecutive entries, counted row by row, of the matrix product ``left @ right.T``.

    The function `entries` sums each entry of the matrix product separately in a fixed order, so
    that any part of the matrix has the same bits on every machine. A matrix product computed by
    BLAS does not have equal bits on every machine.

    Args:
        left: Left factor of the product, [rows, rank] float32, rank at least 1.
        right: Right factor of the product, [columns, rank] float32.
        first: Index in the flattened matrix product of the first entry to return.
        size: Number of entries of the matrix product to return.

    Returns:
        The entries [size] float32; not finite where factors or sums are not finite.
    """
    rows, rank = left.shape
    across = np.ascontiguousarray(right.T)  # [rank, columns]
    product = np.empty((rows, across.shape[1]), np.float32)
    height = max(1, _TILE_ENTRIES // across.shape[1])
    addend = np.empty((min(height, rows), across.shape[1]), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for top in range(0, rows, height):
            tile, down = product[top : top + height], left[top : top + height]
            np.multiply(down[:, :1], across[0], out=tile)
            for number in range(1, rank):
                term = addend[: len(tile)]
                np.multiply(down[:, number, None], across[number], out=term)
                tile += term
    return product.reshape(-1)[first : first + size]


def power_step(tensor: Float32, right: Float32) -> tuple[Float32, Float32] | None:
    """Approximate a matrix M by P Q^T in one power step: P = orthonormal(M Q), then Q = M^T P.

    Args:
        tensor: Gradient matrix M, row by row: [rows * columns] float32, finite.
        right: Factor Q of the previous step, [columns, rank] float32, rank at most rows. Only the
            span of Q's columns affects the result.

    Returns:
        P [rows, rank] and the new Q [columns, rank], float32; None if P or Q leaves the range of
        float32.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1. Differences:
    Householder's QR instead of Gram-Schmidt, because QR accepts linearly dependent columns.
    """
    matrix = tensor.reshape(-1, len(right))
    return subspace_step(lambda: matrix @ right, lambda left: matrix.T @ left)


def subspace_step(
    image_of: Callable[[], Float32], following_of: Callable[[Float32], Float32]
) -> tuple[Float32, Float32] | None:
    """Do a `power_step` of PowerSGD, given functions that compute its two matrix products.

    Args:
        image_of: Function that returns the product M Q [rows, rank] float32 of PowerSGD.
        following_of: Function that takes P and returns the product M^T P [columns, rank] float32 of
            PowerSGD.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        image = image_of()
        if not np.isfinite(image).all():
            return None
        left = np.linalg.qr(image)[0].astype(np.float32, copy=False)
        following = following_of(left)
        if not (np.abs(following) < _LARGEST_FACTOR).all():
            return None
    return left, following


def directed(right: Float32, rng: np.random.Generator) -> Float32:
    """Scale each column of Q to largest magnitude 1; replace columns of zeros by random columns.

    A column of zeros in PowerSGD's factor Q would stay zero in all later steps. The lengths of
    nonzero columns of Q have no effect on a step of PowerSGD, but unscaled columns would leave the
    range of float32 after some steps.

    Args:
        right: Right factor Q [columns, rank] of PowerSGD, float32, finite.
        rng: Generator of random numbers, used only if PowerSGD's factor Q has a column of zeros.
    """
    largest = np.abs(right).max(axis=0)
    empty = largest == 0
    largest[empty] = 1
    scaled: Float32 = right / largest
    if empty.any():
        scaled[:, empty] = rng.standard_normal((len(right), int(empty.sum())), np.float32)
    return scaled


KERNELS = Kernels.of("numpy", sys.modules[__name__], numpy_select, numpy_chunks, few_bits)

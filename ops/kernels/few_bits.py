"""Coding of values with 1, 2 or 4 bits: a sign, and one of a few magnitudes per chunk of entries.

====== ==== =======================================================================
dtype  bits magnitudes of a chunk in which M is the largest magnitude
====== ==== =======================================================================
int4   4    M/15, 3M/15, 5M/15, ... M: 16 uniform levels from -M to M
int2   2    M/3, M: 4 uniform levels from -M to M
means2 2    the mean of the magnitudes up to the overall mean, the mean of the larger
sign   1    the mean of the magnitudes
====== ==== =======================================================================

int4 and int2 code a value as the nearest magnitude, and a value half-way between two magnitudes as
the larger magnitude. means2 codes a magnitude above the overall mean as the mean of the magnitudes
above it, and a smaller magnitude as the mean of the magnitudes up to it. A chunk's largest
magnitude and its mean magnitudes are sent as bfloat16, so the coding rounds them to bfloat16 before
it compares values with them. Each product of a few-bit code and its scale is rounded to float32
once, so that all nodes decode to equal values.

Source: 2 bits of the selected values: SparseLoCo (arXiv 2508.15706); conditional means: Seide et
al., "1-bit stochastic gradient descent", INTERSPEECH 2014; the scaled sign: Karimireddy et al.,
"Error feedback fixes SignSGD", ICML 2019, algorithm 2 (the paper scales layers, not chunks).
"""

from __future__ import annotations

import numpy as np

from thinwire.ops.types import FEW_BITS, Array, Bool, ChunkedValues, Float32, Float64, Int64, UInt8

_LARGEST_BFLOAT16 = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
_UPPER_HALF = np.uint32(0xFFFF0000)
_SIGN_BIT = np.uint32(1 << 31)


def num_magnitudes(dtype: str) -> int:
    """Return how many magnitudes a value of a few-bit dtype, such as int4, can have."""
    return int(1 << (FEW_BITS[dtype] - 1))


def num_scales(dtype: str) -> int:
    """Return how many scales a chunk of values of a few-bit dtype, such as int4, has."""
    return 2 if dtype == "means2" else 1


def dense_edges(size: int, chunk: int, first: int = 0) -> Int64:
    """Return [c + 1] int64: the start of each of c chunks of a dense block, and the block's end."""
    inner = np.arange(chunk - first, size, chunk, dtype=np.int64)
    return np.concatenate([[0], inner, [size]]) if size else np.zeros(1, np.int64)


def sparse_edges(indices: Int64, chunk: int, first: int = 0) -> Int64:
    """Return [c + 1] int64: the index of each chunk's first value, then the number of values."""
    if not indices.size:
        return np.zeros(1, np.int64)
    numbers = (indices + first) // chunk
    inner = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
    return np.concatenate([[0], inner, [indices.size]])


def edges_of(indices: Int64 | None, size: int, chunk: int, first: int = 0) -> Int64:
    """Return `dense_edges` of a block without positions (None), `sparse_edges` of other blocks."""
    if indices is None:
        return dense_edges(size, chunk, first)
    return sparse_edges(indices, chunk, first)


def quantise_chunks(values: Float32, edges: Int64, dtype: str) -> tuple[UInt8, Float32]:
    """Code values of consecutive chunks with a few bits each, and compute each chunk's scales.

    Args:
        values: [k] float32, finite values of k gradient entries, to code in few bits.
        edges: [c + 1] int64, ascending: the start of each of c chunks in `values`, then the number
            k of values.
        dtype: Few-bit dtype to code the values in, for example int4 or sign (FEW_BITS).

    Returns:
        Codes [k] uint8 and scales [c, m] float32, in the layout of a `ChunkedValues`.
    """
    scales = np.empty((edges.size - 1, num_scales(dtype)), np.float32)
    if not values.size:
        return np.empty(0, np.uint8), scales
    magnitudes, starts, lengths = np.abs(values), edges[:-1], np.diff(edges)
    if dtype.startswith("int"):
        scales[:, 0] = rounded(np.maximum.reduceat(magnitudes, starts))
        levels = uniform_levels(magnitudes, np.repeat(scales[:, 0], lengths), dtype)
    else:
        sums = np.add.reduceat(magnitudes, starts, dtype=np.float64)
        if dtype == "sign":
            scales[:, 0], levels = rounded(sums / lengths), np.zeros(values.size, np.uint8)
        else:
            above = magnitudes > np.repeat((sums / lengths).astype(np.float32), lengths)
            levels = above.view(np.uint8)
            upper = np.add.reduceat(np.where(above, magnitudes, 0), starts, dtype=np.float64)
            num_above = np.add.reduceat(above, starts, dtype=np.int64)
            scales[:] = rounded(side_means(sums, upper, num_above, lengths))
    return with_signs(levels, np.signbit(values), dtype), scales


def side_means(sums: Float64, upper: Float64, most: Int64, lengths: Int64) -> Float64:
    """Return the means [c, 2] of each chunk's magnitudes up to the chunk's mean and above the mean.

    Args:
        sums: [c] sum of all magnitudes of each chunk.
        upper: [c] sum of those magnitudes of each chunk that are above the chunk's mean.
        most: [c] number of magnitudes above the mean, for each chunk. 0 means that all magnitudes
            of the chunk are equal, so that the two means are equal too.
        lengths: [c] number of magnitudes in each chunk.
    """
    lower = np.maximum(sums - upper, 0) / np.maximum(lengths - most, 1)
    return np.stack([lower, np.where(most, upper / np.maximum(most, 1), lower)], axis=1)


def rounded(scales: Array) -> Float32:
    """Return non-negative numbers rounded to the nearest bfloat16, ties to even, as float32."""
    bits = np.minimum(scales, _LARGEST_BFLOAT16).astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nearest: Float32 = (bits & _UPPER_HALF).view(np.float32)
    np.minimum(nearest, _LARGEST_BFLOAT16, out=nearest)
    return nearest


def boundaries(dtype: str) -> list[np.float32]:
    """Return boundaries between int4 or int2 magnitudes, as fractions of the largest magnitude."""
    count = num_magnitudes(dtype)
    return [np.float32(2 * number / (2 * count - 1)) for number in range(1, count)]


def uniform_levels(magnitudes: Float32, scales: Float32, dtype: str) -> UInt8:
    """Return [k] uint8: for each value the index of its nearest int4 or int2 magnitude."""
    levels = np.zeros(magnitudes.size, np.uint8)
    for boundary in boundaries(dtype):
        levels += magnitudes >= scales * boundary
    return levels


def with_signs(levels: UInt8, negative: Bool, dtype: str) -> UInt8:
    """Return [k] uint8 codes: the index of a magnitude, and the sign in the bit above the index."""
    codes: UInt8 = levels | negative.view(np.uint8) << np.uint8(FEW_BITS[dtype] - 1)
    return codes


def dequantise_chunks(coded: ChunkedValues) -> Float32:
    """Return the values [k] float32 that the codes of few-bit values represent."""
    count = num_magnitudes(coded.dtype)
    if coded.dtype == "means2":
        table = coded.scales
    else:
        parts = (np.arange(count, dtype=np.float64) * 2 + 1) / (2 * count - 1)
        table = coded.scales * parts.astype(np.float32)
    if coded.scale != 1:
        table = table * np.float32(coded.scale)
    places = np.repeat(np.arange(len(table)) * count, np.diff(coded.edges))
    places += coded.data & np.uint8(count - 1)
    values: Float32 = table.reshape(-1).take(places)
    bits = values.view(np.uint32)
    bits |= (coded.data >= count).astype(np.uint32) * _SIGN_BIT
    return values

"""Few-bit values: the decoded values, the rounding error, and equality of both kernels."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from thinwire.ops.kernels import few_bits, load_kernels
from thinwire.ops.types import FEW_BITS, ChunkedValues

LARGEST = np.finfo(np.float32).max
#: 8 bits of a mantissa: the relative error of a rounded scale.
ROUNDED = 2.0**-8
any_values = arrays_of.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1.0, -3.0, float(LARGEST), 2e-40]),
    ),
)


def coded(values, edges, dtype, bodies=None):
    codes, scales = (bodies or load_kernels("numpy")).quantise_chunks(values, edges, dtype)
    return ChunkedValues(dtype, codes, scales=scales, edges=edges, chunk=7)


def chunks(values, edges):
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def reference(chunk, dtype):
    """The decoded values of one chunk, in double precision; its scales are not rounded."""
    sizes = np.abs(chunk.astype(np.float64))
    if dtype == "sign":
        levels = np.full(sizes.size, sizes.mean())
    elif dtype == "means2":
        above = sizes > np.float32(sizes.mean())
        low = sizes[~above].mean() if not above.all() else sizes.mean()
        high = sizes[above].mean() if above.any() else sizes.mean()
        levels = np.where(above, high, low)
    else:
        count = 2 ** (FEW_BITS[dtype] - 1)
        magnitudes = (2 * np.arange(count) + 1) / (2 * count - 1) * sizes.max()
        levels = magnitudes[np.abs(sizes[:, None] - magnitudes).argmin(1)]
    return np.where(np.signbit(chunk), -levels, levels)


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_codes_stand_for_the_nearest_levels(dtype):
    values = np.random.default_rng(3).standard_normal(3000).astype(np.float32)
    edges = few_bits.dense_edges(values.size, 256)
    found = few_bits.dequantise_chunks(coded(values, edges, dtype))
    expected = np.concatenate([reference(chunk, dtype) for chunk in chunks(values, edges)])
    far = np.abs(found - expected) > 2 * ROUNDED * np.abs(expected)
    if dtype.startswith("int"):  # a rounded scale moves the borders between levels, too
        assert far.mean() < 0.03
        steps = 1 / (2 ** FEW_BITS[dtype] - 1)
        largest = np.repeat([abs(chunk).max() for chunk in chunks(values, edges)], np.diff(edges))
        assert (np.abs(found - values) <= (steps + 2 * ROUNDED) * largest).all()
    else:
        assert not far.any()


@pytest.mark.parametrize("dtype", FEW_BITS)
@settings(max_examples=30, deadline=None)
@given(values=any_values, chunk=st.integers(1, 12), first=st.integers(0, 11))
def test_codes_are_of_their_bits_and_decode_to_finite_values(dtype, values, chunk, first):
    edges = few_bits.dense_edges(values.size, chunk, first % chunk)
    found = coded(values, edges, dtype)
    assert found.data.dtype == np.uint8 and (found.data < 2 ** FEW_BITS[dtype]).all()
    assert found.scales.shape == (edges.size - 1, few_bits.num_scales(dtype))
    assert np.isfinite(found.scales).all() and (found.scales >= 0).all()
    assert not (found.scales.view(np.uint32) & 0xFFFF).any(), "exact in bfloat16"
    decoded = few_bits.dequantise_chunks(found)
    assert np.isfinite(decoded).all() and decoded.dtype == np.float32
    assert (np.signbit(decoded) == np.signbit(values)).all()
    exact = values.astype(np.float64)
    for part, there in zip(chunks(decoded, edges), chunks(exact, edges), strict=True):
        assert np.abs(part).max() <= np.abs(there).max() * (1 + 2 * ROUNDED) + 1e-40


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_a_device_gives_the_same_codes(device, dtype):
    values = np.random.default_rng(0).standard_normal(5000, np.float32)
    values[:4] = [1e30, -1e30, 0, -0.0]
    values[4096:4200] = 0.25  # a chunk of equal ones
    edges = np.sort(np.append(few_bits.dense_edges(values.size, 1000, 7), [4096, 4200]))
    one = load_kernels("numpy").quantise_chunks(values, edges, dtype)
    other = device.quantise_chunks(device.joined([values]), edges, dtype)
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_chunk_of_zeros_decodes_to_zeros():
    for dtype in FEW_BITS:
        found = coded(np.zeros(5, np.float32), np.array([0, 5]), dtype)
        assert not few_bits.dequantise_chunks(found).any() and not found.scales.any()


def test_the_common_factor_is_rounded_once_more():
    values = np.float32([3, -1, 1.5])
    found = coded(values, np.array([0, 3]), "int2")
    np.testing.assert_array_equal(few_bits.dequantise_chunks(found), np.float32([3, -1, 1]))
    halved = ChunkedValues("int2", found.data, 0.5, scales=found.scales, edges=found.edges, chunk=3)
    np.testing.assert_array_equal(few_bits.dequantise_chunks(halved), np.float32([1.5, -0.5, 0.5]))


def test_edges_of_positions_and_of_whole_blocks():
    np.testing.assert_array_equal(few_bits.dense_edges(10, 4), [0, 4, 8, 10])
    np.testing.assert_array_equal(few_bits.dense_edges(10, 4, 3), [0, 1, 5, 9, 10])
    np.testing.assert_array_equal(few_bits.dense_edges(2, 4, 1), [0, 2])
    np.testing.assert_array_equal(few_bits.dense_edges(0, 4), [0])
    positions = np.array([0, 3, 4, 11, 12, 15])
    np.testing.assert_array_equal(few_bits.sparse_edges(positions, 4), [0, 2, 3, 4, 6])
    np.testing.assert_array_equal(few_bits.sparse_edges(positions, 4, 1), [0, 1, 3, 5, 6])
    np.testing.assert_array_equal(few_bits.sparse_edges(positions[:0], 4), [0])


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 60),
    chunk=st.integers(1, 20),
    cut=st.tuples(st.integers(0, 59), st.integers(1, 60)),
    sparse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_part_decodes_to_the_same_values(size, chunk, cut, sparse, seed):
    rng = np.random.default_rng(seed)
    start, stop = min(cut[0], size - 1), min(max(cut[1], cut[0] + 1), size)
    start = min(start, stop - 1)
    indices = np.flatnonzero(rng.random(size) < 0.5) if sparse else None
    values = rng.standard_normal(size if indices is None else indices.size).astype(np.float32)
    edges = few_bits.edges_of(indices, size, chunk)
    codes, scales = few_bits.quantise_chunks(values, edges, "means2")
    whole = ChunkedValues("means2", codes, scales=scales, edges=edges, chunk=chunk)
    first, last = (start, stop) if indices is None else indices.searchsorted((start, stop))
    if first == last:
        return
    part = whole.part(slice(int(first), int(last)), start)
    np.testing.assert_array_equal(
        few_bits.dequantise_chunks(part), few_bits.dequantise_chunks(whole)[first:last]
    )
    there = None if indices is None else indices[first:last] - start
    expected = few_bits.edges_of(there, stop - start, chunk, part.first)
    np.testing.assert_array_equal(part.edges, expected)

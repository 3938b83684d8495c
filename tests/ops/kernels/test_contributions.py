"""Contributions and levels equal the formulas block by block, in both kernels."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels import numpy_ops as numpy_body

FLOAT = np.float32


def drawn(seed, size):
    return np.random.default_rng(seed).standard_normal(size).astype(FLOAT)


def blocks_of(values, entries):
    return [values[start : start + entries] for start in range(0, len(values), entries)]


def test_the_average_by_hand(bodies):
    averages = np.zeros(1, FLOAT)
    for mean, wanted in ((1.0, 0.7), (3.0, 2.31)):
        values = np.array([mean, -mean, mean], FLOAT)
        averages, sums = bodies.contribution(values, 4, averages, 0.3)
        np.testing.assert_allclose(averages, [wanted], rtol=1e-6)
        np.testing.assert_allclose(sums, [3 * mean])


@pytest.mark.parametrize(("alpha", "wanted"), [(1.0, [0, 0, 0]), (0.0, [1.5, 0, 4])])
def test_the_past_alone_and_the_present_alone(bodies, alpha, wanted):
    values = np.array([1, -2, 0, 0, 4], FLOAT)
    averages = np.zeros(3, FLOAT)
    for _ in range(2):
        averages, _ = bodies.contribution(values, 2, averages, alpha)
    np.testing.assert_array_equal(averages, np.array(wanted, FLOAT))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 70),
    entries=st.integers(1, 20),
    seed=st.integers(0, 99),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_equals_the_loop_over_blocks(bodies, size, entries, seed, alpha):
    values = drawn(seed, size)
    blocks = blocks_of(values, entries)
    before = np.abs(drawn(seed + 1, len(blocks)))
    averages, sums = bodies.contribution(values, entries, before, alpha)
    wanted = [
        alpha * old + (1 - alpha) * np.abs(block).mean(dtype=float)
        for old, block in zip(before, blocks, strict=True)
    ]
    assert averages.dtype == sums.dtype == FLOAT
    np.testing.assert_allclose(averages, wanted, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(sums, [np.abs(block).sum(dtype=float) for block in blocks], 1e-5)


def test_the_usual_block_size_and_more_than_a_piece(bodies):
    values = drawn(7, 3 * (1 << 16) + 77)
    averages, _ = bodies.contribution(values, 1024, np.zeros(193, FLOAT), 0.3)
    wanted = [0.7 * np.abs(block).mean(dtype=float) for block in blocks_of(values, 1024)]
    np.testing.assert_allclose(averages, wanted, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_its_average_and_no_other(bodies, bad):
    values = np.array([1, 2, bad, 3, 5, 5], FLOAT)
    averages, sums = bodies.contribution(values, 2, np.array([1, 8, 1], FLOAT), 0.5)
    np.testing.assert_array_equal(averages, np.array([1.25, 8, 3], FLOAT))
    np.testing.assert_array_equal(np.isfinite(sums), [True, False, True])


def test_only_a_block_of_zeros_has_the_sum_zero(bodies):
    tiny = np.array([0, -0.0, 0, 1e-45, -1e-45, 0, 0], FLOAT)
    _, sums = bodies.contribution(tiny, 2, np.zeros(4, FLOAT), 0.3)
    np.testing.assert_array_equal(sums != 0, [False, True, True, False])


def test_one_trace_serves_every_size_and_step():
    tensorflow_bodies = pytest.importorskip("thinwire.ops.kernels.tensorflow_ops")
    for size, entries in ((5, 2), (6, 2), (100, 7), (1, 1)):
        averages = np.zeros(-(-size // entries), FLOAT)
        tensorflow_bodies.contribution(drawn(1, size), entries, averages, size / 100)
        tensorflow_bodies.to_levels(drawn(1, 12).reshape(-1, 3), 8 if size % 2 else 4)
    assert tensorflow_bodies._contribution.experimental_get_tracing_count() == 1
    assert tensorflow_bodies._to_levels.experimental_get_tracing_count() == 1


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 70), entries=st.integers(1, 20), seed=st.integers(0, 99))
def test_entries_alone_count_as_a_dense_tensor_with_zeros(size, entries, seed):
    values = drawn(seed, size) * (np.random.default_rng(seed).random(size) < 0.3)
    at = np.flatnonzero(values)
    count = -(-size // entries)
    edges = np.searchsorted(at, np.arange(count + 1) * entries)
    before = np.abs(drawn(seed + 1, count))
    dense = numpy_body.contribution(values.astype(FLOAT), entries, before, 0.3)
    sparse = numpy_body.contribution_at(values[at].astype(FLOAT), edges, size, entries, before, 0.3)
    for one, other in zip(dense, sparse, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        np.testing.assert_array_equal(one == 0, other == 0)


@pytest.mark.parametrize("place", ["host", "device"])
def test_ranks_go_by_class_then_score_then_position(bodies, place):
    wrap = np.asarray if place == "host" else lambda values: bodies.joined([values])
    parts = [wrap(np.array(part, FLOAT)) for part in ([1, 3, 1], [3, 2, 0, 9])]
    classes = np.array([1, 1, 1, 1, 1, 1, 2], np.uint8)
    assert bodies.best_first(parts, classes).tolist() == [1, 3, 4, 0, 2, 5]
    classes[5] = 0
    assert bodies.best_first(parts, classes).tolist() == [5, 1, 3, 4, 0, 2]
    assert bodies.best_first([wrap(np.zeros(0, FLOAT))], classes[:0]).tolist() == []


# -- levels -------------------------------------------------------------------------------------


def levels_of(block, bits):
    """The formula, value by value, in float64."""
    low, high = float(min(block)), float(max(block))
    step = (high - low) / 2**bits
    if step == 0:
        return [0] * len(block), low, 0.0
    return [min(max(int((v - low) // step), 0), 2**bits - 1) for v in block], low, step


@pytest.mark.parametrize("bits", [16, 8, 4])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 6),
    entries=st.integers(1, 65),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_levels_are_at_most_half_a_step_away(bodies, bits, rows, entries, seed, scale):
    values = (drawn(seed, rows * entries) * FLOAT(scale)).reshape(rows, entries)
    coded, lows, steps = bodies.to_levels(values, bits)
    assert coded.dtype == (np.uint16 if bits == 16 else np.uint8)
    assert coded.size == 0 or coded.max() <= 2**bits - 1
    for row, got, low, step in zip(values, coded, lows, steps, strict=True):
        wanted, wanted_low, wanted_step = levels_of(row, bits)
        assert low == wanted_low and np.isclose(step, wanted_step, rtol=1e-6, atol=0)
        assert np.abs(np.array(wanted) - got.astype(int)).max() <= 1  # a quotient on a border
    back = numpy_body.from_levels(coded, lows[:, None], steps[:, None])
    rounding = 4 * np.spacing(np.abs(values).max(initial=FLOAT(0)))  # of four float32 operations
    assert (np.abs(values - back) <= steps[:, None] / 2 * (1 + 1e-4) + rounding).all()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_equal_values_are_exact_and_ends_have_the_end_levels(bodies, bits):
    values = np.array([[3.5, 3.5, 3.5], [-1, 0, 1], [0, 0, 0]], FLOAT)
    coded, lows, steps = bodies.to_levels(values, bits)
    np.testing.assert_array_equal(coded[[0, 2]], 0)
    np.testing.assert_array_equal(steps[[0, 2]], 0)
    np.testing.assert_array_equal(lows, np.array([3.5, -1, 0], FLOAT))
    np.testing.assert_array_equal(coded[1], [0, 2 ** (bits - 1), 2**bits - 1])
    back = numpy_body.from_levels(coded, lows[:, None], steps[:, None])
    np.testing.assert_array_equal(back[[0, 2]], values[[0, 2]])


@pytest.mark.parametrize("bits", [16, 8, 4])
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), max_size=6), seed=st.integers(0, 99))
def test_blocks_of_any_length_get_the_levels_of_rows(bits, lengths, seed):
    values = drawn(seed, sum(lengths))
    starts = np.cumsum([0, *lengths])
    coded, lows, steps = numpy_body.to_levels_at(values, starts[:-1].astype(np.int64), bits)
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        row, low, step = numpy_body.to_levels(values[None, start:stop], bits)
        np.testing.assert_array_equal(coded[start:stop], row[0])
        assert (lows[number], steps[number]) == (low[0], step[0])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_all_bodies_choose_the_same_levels(bodies, bits):
    values = drawn(3, 40 * 64).reshape(40, 64)
    one, other = (each.to_levels(values, bits) for each in (load_kernels("numpy"), bodies))
    np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_allclose(one[2], other[2], rtol=1e-6)
    assert np.abs(one[0].astype(int) - other[0]).max() <= 1

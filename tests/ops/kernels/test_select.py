"""Selection equals sorting, for all sizes, ties, zeros and magnitudes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.frameworks import SIZES
from tests.ops.kernels import reference
from thinwire.ops.kernels import numpy_select

TINY = np.float32(1e-45)  # the smallest subnormal


def check(bodies, x, k):
    expected = reference.top_k(x, k)
    untouched = x.copy()
    indices, values = bodies.top_k(x, k)
    assert indices.dtype == np.int64 and values.dtype == np.float32
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_array_equal(values, expected[1])
    np.testing.assert_array_equal(x, untouched)


@settings(max_examples=150, deadline=None)
@given(
    x=arrays_of.arrays(
        np.float32,
        st.sampled_from(SIZES),
        elements=st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.sampled_from([0.0, -0.0, 1.0, -1.0, float(TINY), -float(TINY), 2e-40]),
        ),
    ),
    k=st.integers(0, 45),
)
def test_small_arrays_equal_sorting(bodies, x, k):
    check(bodies, x, k)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(4096, 150_000),
    kept=st.floats(0, 0.06),
    levels=st.sampled_from([0, 2, 30, 1000]),
    zeros=st.sampled_from([0.0, 0.5, 0.98, 0.9999]),
    exponent=st.sampled_from([0, -42, 30]),
    seed=st.integers(0, 9),
)
def test_sampled_arrays_equal_sorting(bodies, size, kept, levels, zeros, exponent, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size, np.float32)
    if levels:
        x = np.round(x * levels / 2).astype(np.float32)
    x[rng.random(size) < zeros] = 0
    check(bodies, x * np.float32(10.0**exponent), int(kept * size))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(numpy_select, "_PIECE", 1 << 10)
    monkeypatch.setattr(numpy_select, "_REGION", 1 << 13)


@pytest.mark.parametrize("size", [1 << 13, (1 << 13) + 1, (1 << 14) - 3, (1 << 14) + 1027])
@pytest.mark.usefixtures("small_pieces")
def test_sizes_around_the_pieces(bodies, size):
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    x[-1] = 50
    check(bodies, x, size // 100)


def test_a_misleading_sample_is_noticed(bodies):
    size, k = 100_000, 1000
    x = np.full(size, 1e-3, np.float32)
    x[:: max(1, k // 200) | 1] = 9.0  # just the sampled entries
    x[:: max(1, k // 200)] = 9.0
    check(bodies, x, 50_000 - 1)
    x = np.random.default_rng(0).standard_normal(size, np.float32)
    x[:: max(1, k // 200) | 1] *= 0.01
    check(bodies, x, k)


@pytest.mark.parametrize(
    ("size", "rate"),
    [(3, 0.5), (5000, 0.0001), (5000, 0.01), (20_001, 0.003), (20_001, 0.3), (20_001, 1.0)],
)
@pytest.mark.usefixtures("small_pieces")
def test_feedback_takes_out_the_largest_of_the_sum(bodies, size, rate):
    rng = np.random.default_rng(7)
    residual = rng.standard_normal(size, np.float32)
    addend = rng.standard_normal(size, np.float32)
    total = residual + addend
    k = max(1, int(rate * size))
    indices, values, _ = bodies.feedback_top_k(residual, addend, k)
    expected = reference.top_k(total, k)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_array_equal(values, expected[1])
    total[indices] = 0
    np.testing.assert_array_equal(residual, total)


@given(
    arrays=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, 1e38]), max_size=8),
            st.integers(0, 9),
            st.sampled_from([1.0, 0.5, -3.0]),
        ),
        max_size=6,
    ),
    large=st.booleans(),
)
def test_what_is_taken_of_small_arrays_together_is_what_is_taken_of_each(arrays, large):
    if large:
        arrays = [
            *arrays[:2],
            (np.random.default_rng(1).standard_normal(2000), 20, 1.0),
            *arrays[2:],
        ]
    residuals = [np.array(values, np.float32) for values, _, _ in arrays]
    addends = [np.flip(each) * np.float32(0.25) for each in residuals]
    counts, factors = ([each[place] for each in arrays] for place in (1, 2))
    alone = [each.copy() for each in residuals]
    hints = [0.0] * len(arrays)
    found = numpy_select.feedback_of_each(residuals, addends, counts, factors, hints)
    for number, (indices, values, _) in enumerate(found):
        expected = numpy_select.feedback_top_k(
            alone[number], addends[number], counts[number], factors[number]
        )
        np.testing.assert_array_equal(indices, expected[0])
        np.testing.assert_array_equal(values.view(np.uint32), expected[1].view(np.uint32))
        assert residuals[number].tobytes() == alone[number].tobytes()


def test_feedback_falls_back_when_too_few_survive(monkeypatch):
    monkeypatch.setattr(numpy_select, "_sampled_threshold", lambda *_: np.float32(3.5))
    rng = np.random.default_rng(1)
    residual, addend = rng.standard_normal((2, 60_000)).astype(np.float32)
    total = residual + addend
    indices, values, _ = numpy_select.feedback_top_k(residual, addend, 6000)
    np.testing.assert_array_equal(indices, reference.top_k(total, 6000)[0])
    np.testing.assert_array_equal(values, total[indices])
    total[indices] = 0
    np.testing.assert_array_equal(residual, total)


@pytest.mark.parametrize("hint", [0.0, 1e-3, 1.0, 3.0, 1e3, None])
@pytest.mark.usefixtures("small_pieces")
def test_a_hint_changes_nothing_but_the_time(hint):
    """None: the hint of the step before."""
    rng, following = np.random.default_rng(9), 0.0
    residual = np.zeros(20_000, np.float32)
    for _ in range(12):
        addend = rng.standard_normal(residual.size, np.float32)
        total = residual + np.float32(0.5) * addend
        given = following if hint is None else hint
        indices, values, following = numpy_select.feedback_top_k(residual, addend, 200, 0.5, given)
        expected = reference.top_k(total, 200)
        np.testing.assert_array_equal(indices, expected[0])
        np.testing.assert_array_equal(values, expected[1])
        total[indices] = 0
        np.testing.assert_array_equal(residual, total)
        assert 0 < following < np.abs(values).min()


@pytest.mark.parametrize("size", [300, 1000])
def test_the_next_hint_is_the_magnitude_at_rank_280(size):
    """Or beyond the entries that are known, where magnitudes falling on would have it."""
    magnitudes = np.arange(1, 20_001, dtype=np.float32)[::-1] ** np.float32(-0.5)
    ranked = np.sort(magnitudes)[::-1]
    signs = np.where(np.random.default_rng(4).random(magnitudes.size) < 0.5, -1, 1)
    for known in (size, 250):
        addend = (signs * magnitudes).astype(np.float32)
        hint = float(ranked[known - 1])
        following = numpy_select.feedback_top_k(np.zeros_like(addend), addend, 200, hint=hint)[2]
        assert following == pytest.approx(ranked[279], rel=0.0 if known >= 280 else 0.02)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("share", [0.05, 0.6, 0.75, 1.0])
def test_many_magnitudes_are_counted_and_the_same_is_the_kth(spread, share):
    rng, size = np.random.default_rng(5), 20_000
    magnitudes = np.exp(rng.normal(size=size) * spread).astype(np.float32)
    magnitudes[::3] = magnitudes[0]  # ties
    k = int(share * size)
    ranked = np.sort(magnitudes)[::-1]
    lowest, hint = numpy_select._lowest_and_hint(magnitudes.copy(), k)
    assert lowest == ranked[k - 1]
    if 1.4 * k <= size:  # counted in steps of a 64th of a power of two
        assert hint <= ranked[int(np.ceil(1.4 * k)) - 1] < hint * (1 + 1 / 64)
    assert 0 < hint <= lowest


def test_a_hint_that_is_no_float32_is_none():
    residual, addend = np.zeros(10_000, np.float32), np.full(10_000, 1e-35, np.float32)
    indices, _, following = numpy_select.feedback_top_k(residual, addend, 100, hint=1e-60)
    np.testing.assert_array_equal(indices, np.arange(100))
    assert following > 0


def test_set_bits():
    rng = np.random.default_rng(3)
    for probability in (0.0, 0.01, 0.3, 1.0):
        mask = rng.random(32 * 300) < probability
        words = np.packbits(mask, bitorder="little").view(np.uint32)
        np.testing.assert_array_equal(numpy_select._set_bits(words), mask.nonzero()[0])


def test_nothing_is_traced_again_as_sizes_vary():
    pytest.importorskip("tensorflow")
    from thinwire.ops.kernels import tensorflow_scan, tensorflow_select

    for size, k in ((10, 1), (5000, 50), (20_000, 7), (1, 1)):
        tensorflow_select.top_k(np.ones(size, np.float32), k)
    assert tensorflow_scan.top_k.experimental_get_tracing_count() == 1


def test_random_positions():
    rng = np.random.default_rng(5)
    chosen = numpy_select.random_k(1000, 100, rng)
    assert chosen.dtype == np.int64 and len(set(chosen.tolist())) == 100
    assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < 1000
    np.testing.assert_array_equal(numpy_select.random_k(3, 5, rng), [0, 1, 2])
    again = numpy_select.random_k(1000, 100, np.random.default_rng(5))
    np.testing.assert_array_equal(chosen, again)
    counts = np.zeros(20)
    for _ in range(2000):
        counts[numpy_select.random_k(20, 2, rng)] += 1
    assert abs(counts - 200).max() < 60  # four standard deviations

"""Delay compensation equals the formula entry by entry, in both kernels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FLOAT = np.float32


def drawn(seed, size):
    return np.random.default_rng(seed).standard_normal((4, size)).astype(FLOAT)


def entry(g, now, then, strength):
    """One entry, each product rounded to float32."""
    result = FLOAT(now - then)
    for factor in (g, g, FLOAT(strength)):
        result = FLOAT(result * factor)
    return FLOAT(result + g)


def test_a_vector_by_hand(bodies):
    got = bodies.compensate(*np.array([[2, -1, 3], [1, 2, 5], [0.5, 4, 5]], FLOAT), 0.5)
    np.testing.assert_array_equal(got, [2 + 0.5 * 4 * 0.5, -1 + 0.5 * 1 * -2, 3])
    mean_square, strengths = bodies.adapt(np.array([4, 0], FLOAT), np.array([2, 0], FLOAT), 0.5, 3)
    np.testing.assert_array_equal(mean_square, [4, 0])
    np.testing.assert_allclose(strengths, [1.5, 3 / 1e-7**0.5], rtol=1e-6)


@pytest.mark.parametrize("per_entry", [False, True])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(0, 40), seed=st.integers(0, 99))
def test_equals_the_scalar_loop_bit_for_bit(bodies, per_entry, size, seed):
    values, now, then, rows = drawn(seed, size)
    strength = np.abs(rows) if per_entry else 0.04
    before = values.copy(), now.copy(), then.copy()
    got = bodies.compensate(values, now, then, strength)
    expected = [
        entry(*row) for row in zip(values, now, then, np.broadcast_to(strength, size), strict=True)
    ]
    assert got.dtype == FLOAT
    np.testing.assert_array_equal(got, np.array(expected, FLOAT))
    for array, untouched in zip((values, now, then), before, strict=True):
        np.testing.assert_array_equal(array, untouched)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(0, 40), decay=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_the_running_mean_of_squares(bodies, size, decay, seed):
    values, rows = drawn(seed, size)[:2]
    earlier = np.abs(rows)
    mean_square, strengths = bodies.adapt(earlier, values, decay, 2.0)
    wanted = decay * earlier.astype(float) + (1 - decay) * values.astype(float) ** 2
    assert mean_square.dtype == strengths.dtype == FLOAT
    np.testing.assert_allclose(mean_square, wanted, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(strengths, 2.0 / np.sqrt(wanted + 1e-7), rtol=1e-5)
    np.testing.assert_array_equal(earlier, np.abs(rows))

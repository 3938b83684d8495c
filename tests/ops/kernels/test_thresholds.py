"""Selection by threshold gives about k entries, always the largest, never zeros."""

import numpy as np
import pytest

from tests.ops.kernels import reference
from thinwire.ops.kernels import numpy_select

SIZE, K = 50_000, 500


def is_the_largest(x, indices, values):
    np.testing.assert_array_equal(values, x[indices])
    rest = np.delete(np.abs(x), indices)
    assert (np.diff(indices) > 0).all() and (values != 0).all()
    assert not values.size or np.abs(values).min() >= rest.max(initial=0)


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
def test_a_carried_threshold_keeps_to_k(draw):
    """For a residual with error feedback, as in training: about k, on average a little more."""
    rng = np.random.default_rng(0)
    residual, threshold, counts = np.zeros(SIZE, np.float32), 0.0, []
    for _ in range(60):
        residual += getattr(rng, draw)(SIZE, np.float32)
        before = residual.copy()
        indices, values, threshold = numpy_select.carried_top_k(residual, K, threshold)
        np.testing.assert_array_equal(residual, before)
        is_the_largest(residual, indices, values)
        counts.append(indices.size)
        residual[indices] = 0
    assert counts[0] == K
    assert 0.95 < np.mean(counts[20:]) / K < 1.1
    assert min(counts) >= 0.8 * K and max(counts) <= 1.3 * K


@pytest.mark.parametrize("threshold", [0.0, 0.1, 2.0, 2.6, 9.0])
def test_a_carried_threshold_with_feedback(threshold):
    rng = np.random.default_rng(2)
    residual, addend = rng.standard_normal((2, SIZE)).astype(np.float32)
    total = residual + np.float32(0.5) * addend
    expected = numpy_select.carried_top_k(total, K, threshold)
    got = numpy_select.feedback_carried(residual, addend, K, 0.5, threshold)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    total[got[0]] = 0
    np.testing.assert_array_equal(residual, total)


def test_a_threshold_that_is_far_off_is_found_anew():
    x = np.random.default_rng(1).standard_normal(SIZE, np.float32)
    for threshold in (1e-3, 1e3):
        indices, _, following = numpy_select.carried_top_k(x, K, threshold)
        np.testing.assert_array_equal(indices, reference.top_k(x, K)[0])
        assert following == np.abs(x[indices]).min()
    for x in (np.zeros(SIZE, np.float32), np.zeros(1, np.float32)):
        indices, values, following = numpy_select.carried_top_k(x, 1, 0.5)
        assert (indices.size, values.size, following) == (0, 0, 0.0)

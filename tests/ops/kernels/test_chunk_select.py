"""Selecting the largest entries of each chunk equals sorting, for all sizes, ties and zeros."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.frameworks import SIZES
from tests.ops.kernels import reference

some_values = arrays_of.arrays(
    np.float32,
    st.sampled_from(SIZES),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 2e-40]),
    ),
)


def expected_of(x, k, chunk):
    indices = [np.empty(0, np.int64)]
    for start in range(0, x.size, chunk):
        piece = x[start : start + chunk]
        kept = -(-k * piece.size // chunk)
        indices.append(reference.top_k(piece, kept)[0] + start)
    indices = np.concatenate(indices)
    return indices, x[indices]


def check(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[0].dtype == np.int64 and found[1].dtype == np.float32


@settings(max_examples=50, deadline=None)
@given(x=some_values, chunk=st.sampled_from([1, 2, 7, 20]), k=st.integers(1, 20))
def test_small_arrays_equal_sorting(bodies, x, chunk, k):
    k, untouched = min(k, chunk), x.copy()
    check(bodies.chunk_top_k(x, k, chunk), expected_of(x, k, chunk))
    np.testing.assert_array_equal(x, untouched)


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize(("size", "chunk", "k"), [(300_001, 4096, 64), (5000, 4096, 64)])
def test_large_arrays_equal_sorting(bodies, size, chunk, k, levels):
    x = np.random.default_rng(1).standard_normal(size, np.float32)
    if levels:
        x = np.round(x * levels)
    check(bodies.chunk_top_k(x, k, chunk), expected_of(x, k, chunk))


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_feedback_takes_out_what_it_selects(bodies, factor):
    check_feedback(bodies, factor, np.asarray)


def test_feedback_takes_out_what_it_selects_on_a_device(device):
    check_feedback(device, -0.5, lambda residual: device.joined([residual]))


def check_feedback(bodies, factor, wrap):
    rng = np.random.default_rng(2)
    residual, addend = (rng.standard_normal(9000).astype(np.float32) for _ in range(2))
    total = residual + np.float32(factor) * addend
    expected = expected_of(total, 5, 512)
    kept = wrap(residual.copy())
    check(bodies.feedback_chunk_top_k(kept, addend, 5, 512, factor), expected)
    total[expected[0]] = 0
    np.testing.assert_array_equal(np.asarray(kept), total)


def test_the_last_chunk_keeps_its_part_rounded_up(bodies):
    x = np.arange(1, 4096 + 65, dtype=np.float32)
    indices, _ = bodies.chunk_top_k(x, 64, 4096)
    np.testing.assert_array_equal(indices, [*range(4032, 4096), 4159])

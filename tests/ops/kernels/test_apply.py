"""The apply kernel equals the scalar loop bit for bit; sigma equals counting in sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.frameworks import kernels_of
from tests.ops.kernels import reference
from thinwire.ops.kernels import numpy_ops

# AdaComp's rule by hand: (pulled version, indices) in order of arrival, and sigma of each.
ARRIVALS = [(0, [0, 3]), (0, [0, 2]), (0, [0, 3]), (3, [0, 1]), (1, [0, 2])]
SIGMAS = [[0, 0], [1, 0], [2, 1], [0, 0], [3, 1]]
RATES = [[0.1, 0.1], [0.1, 0.1], [0.05, 0.1], [0.1, 0.1], [0.1 / 3, 0.1]]


def test_vectors_of_the_specification(bodies):
    scratch = np.zeros(4, np.uint16)
    history = []
    for (version, indices), sigma, rates in zip(ARRIVALS, SIGMAS, RATES, strict=True):
        window = history[version:]  # for d = 0 this is empty: there is no damping
        got = bodies.hits(window, np.array(indices), scratch)
        np.testing.assert_array_equal(got, sigma)
        np.testing.assert_allclose(np.float32(0.1) * bodies.damp(got), rates, rtol=1e-6)
        assert not scratch.any()
        history.append(np.array(indices))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 60),
    densities=st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=6),
    everything=st.booleans(),
    dtype=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_hits_equal_counting_in_sets(bodies, size, densities, everything, dtype, seed):
    rng = np.random.default_rng(seed)
    window = [
        None if density is None else (rng.random(size) < density).nonzero()[0].astype(dtype)
        for density in densities
    ]
    indices = None if everything else (rng.random(size) < 0.5).nonzero()[0]
    scratch = np.zeros(size, np.uint16)
    got = bodies.hits(window, indices, scratch)
    np.testing.assert_array_equal(got, reference.hits(window, indices, size))
    assert not scratch.any()
    np.testing.assert_array_equal(
        bodies.damp(got), np.float32(1) / np.maximum(got, 1).astype(np.float32)
    )


def test_hits_across_regions_and_beyond_the_counter(bodies, monkeypatch):
    monkeypatch.setattr(numpy_ops, "_REGION", 64)
    rng = np.random.default_rng(3)
    size = 1000
    window = [(rng.random(size) < 0.3).nonzero()[0].astype(np.int32) for _ in range(600)]
    indices = (rng.random(size) < 0.2).nonzero()[0]
    scratch = np.zeros(size, np.uint8)  # 600 hits do not fit into one counter
    got = bodies.hits(window, indices, scratch)
    np.testing.assert_array_equal(got, reference.hits(window, indices, size))
    assert got.max() < 256 and not scratch.any()
    always = [indices] * 600
    np.testing.assert_array_equal(bodies.hits(always, indices, scratch), 600)


@pytest.mark.parametrize("per_entry", [False, True])
def test_apply_equals_the_scalar_loop(bodies, per_entry):
    rng = np.random.default_rng(11)
    theta = rng.standard_normal(3000, np.float32)
    indices = np.sort(rng.choice(3000, 300, replace=False))
    values = rng.standard_normal(300, np.float32)
    rate = rng.random(300, np.float32) if per_entry else 0.02
    expected = reference.apply_sparse(theta, indices, values, np.broadcast_to(rate, 300))
    bodies.apply_sparse(theta, indices, values, rate)
    np.testing.assert_array_equal(theta, expected)

    every = np.arange(300)
    dense = theta[:300].copy()
    bodies.apply_dense(dense, values, rate)
    expected = reference.apply_sparse(theta[:300], every, values, np.broadcast_to(rate, 300))
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(bodies.scale(values, rate), values * np.float32(rate))


def test_subnormal_products_differ_by_less_than_the_smallest_normal(bodies):
    theta = np.zeros(2, np.float32)
    bodies.apply_sparse(theta, np.array([0, 1]), np.array([1e-30, 1.0], np.float32), 1e-10)
    np.testing.assert_allclose(theta, [-1e-40, -1e-10], rtol=1e-6, atol=np.finfo(np.float32).tiny)


def test_nothing_to_apply(bodies):
    theta = np.ones(3, np.float32)
    bodies.apply_sparse(theta, np.empty(0, np.int64), np.empty(0, np.float32), 0.1)
    np.testing.assert_array_equal(theta, 1)


def test_a_variable_is_changed_where_it_lives():
    bodies = kernels_of("tf")
    import tensorflow as tf

    theta = tf.Variable(tf.ones([4]))
    bodies.apply_sparse(theta, np.array([1, 3]), np.array([2.0, 4.0], np.float32), 0.5)
    np.testing.assert_array_equal(theta.numpy(), [1, 0, 1, -1])
    bodies.apply_dense(theta, np.ones(4, np.float32), 1.0)
    np.testing.assert_array_equal(theta.numpy(), [0, -1, 0, -2])


@settings(max_examples=100, deadline=None)
@given(values=arrays_of.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
def test_all_finite_equals_isfinite(values):
    assert numpy_ops.all_finite(values) == bool(np.isfinite(values).all())


def test_all_finite_looks_at_every_piece():
    values = np.full((1 << 18) + 5, 3e38, np.float32)
    assert numpy_ops.all_finite(values)
    for bad in (np.nan, np.inf, -np.inf):
        values[-1] = bad
        assert not numpy_ops.all_finite(values)

"""Different machinery gives the same arithmetic: exact equality of weights between runs."""

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import Softmax, method
from thinwire.ops.kernels import load_kernels


def sequential_sgd(run: MiniRun, rounds: list[list[np.ndarray]], rate: float) -> np.ndarray:
    """Ten obvious lines: plain SGD on the mean gradient of each round's batches."""
    theta = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * 0.1
    problem = Softmax()
    for batches in rounds:
        theta = theta - rate * problem.gradient(theta, np.concatenate(batches))[1]
    return theta


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_bsp_without_codec_equals_single_process_sgd(nb_ps):
    run = MiniRun(method("bsp", nb_workers=3), iter_max=50, nb_ps=nb_ps).run()
    rounds = [[batch for _, batch in run.log[i : i + 3]] for i in range(0, 150, 3)]
    np.testing.assert_allclose(run.theta, sequential_sgd(run, rounds, 0.1), atol=1e-6)


def test_asp_with_one_worker_equals_sgd():
    run = MiniRun(method("asgd", nb_workers=1), iter_max=50).run()
    rounds = [[batch] for _, batch in run.log]
    np.testing.assert_allclose(run.theta, sequential_sgd(run, rounds, 0.1), atol=1e-6)


def test_bsp_as_ssgd_and_as_gsp_with_one_group():
    runs = [
        MiniRun(method("ssgd", nb_workers=3), iter_max=30).run(),
        MiniRun(method("bsp", nb_workers=3), iter_max=30).run(),
        MiniRun(method("gsp", nb_workers=3), iter_max=30).run(),
    ]
    np.testing.assert_array_equal(runs[0].theta, runs[1].theta)
    np.testing.assert_array_equal(runs[0].theta, runs[2].theta)


def test_singleton_groups_with_inverse_weighting_are_asp_with_inverse_weighting():
    singles = ((1,), (2,), (3,))
    gsp = MiniRun(method("gsp", nb_workers=3, groups=singles), iter_max=40).run()
    asp = MiniRun(
        method("asgd", nb_workers=3, overrides={"weighting": "inverse"}), iter_max=40
    ).run()
    np.testing.assert_array_equal(gsp.theta, asp.theta)


def test_fixed_with_one_local_step_is_every():
    every = MiniRun(method("bsp", nb_workers=2), iter_max=30).run()
    fixed = MiniRun(method("bsp", nb_workers=2, overrides={"pacer": "fixed"}), iter_max=30).run()
    np.testing.assert_array_equal(every.theta, fixed.theta)


def test_one_worker_with_local_steps_is_sgd_too():
    chosen = method("asgd", nb_workers=1, local_steps=4, overrides={"pacer": "fixed"})
    run = MiniRun(chosen, iter_max=10).run()
    rounds = [[batch] for _, batch in run.log]
    np.testing.assert_allclose(run.theta, sequential_sgd(run, rounds, 0.1), atol=1e-5)


@pytest.mark.parametrize("name", ["adacomp", "asgd"])
def test_the_number_of_shards_does_not_change_one_worker_s_run(name):
    """Bit for bit: selection sees whole tensors, shards only cut the packet."""
    thetas = [
        MiniRun(method(name, nb_workers=1, compression_rate=0.2), iter_max=40, nb_ps=nb_ps)
        .run()
        .theta
        for nb_ps in (1, 2, 3)
    ]
    np.testing.assert_array_equal(thetas[0], thetas[1])
    np.testing.assert_array_equal(thetas[0], thetas[2])


def test_adacomp_damps_nothing_with_one_worker():
    damped = MiniRun(method("adacomp", nb_workers=1, compression_rate=0.2), iter_max=40).run()
    plain = MiniRun(
        method("adacomp", nb_workers=1, compression_rate=0.2, overrides={"weighting": "none"}),
        iter_max=40,
    ).run()
    np.testing.assert_array_equal(damped.theta, plain.theta)


def test_tensorflow_kernels_train_the_same_model():
    """Selection, quantisation, damping and apply as tf.functions, against numpy."""
    chosen = method("adacomp", nb_workers=3, compression_rate=0.2, value_dtype="int8")
    plain = MiniRun(chosen, iter_max=30).run()
    traced = MiniRun(chosen, iter_max=30, bodies=load_kernels("tf")).run()
    np.testing.assert_allclose(plain.theta, traced.theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nb_ps", [1, 3])
def test_esync_with_one_local_step_is_ssgd(nb_ps):
    esync = MiniRun(method("esync", nb_workers=3, max_local_steps=1), 50, nb_ps=nb_ps).run()
    ssgd = MiniRun(method("ssgd", nb_workers=3), 50, nb_ps=nb_ps).run()
    for (worker, batch), (other, same) in zip(esync.log, ssgd.log, strict=True):
        assert worker == other
        np.testing.assert_array_equal(batch, same)
    np.testing.assert_allclose(esync.theta, ssgd.theta, rtol=0, atol=1e-6)

"""Methods that send weight changes give equal weights with and without distribution."""

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import Softmax, method


def momentum_sgd(run, momentum, rate):
    """Ten obvious lines: u <- m u + h; theta <- theta - eta u."""
    theta = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * 0.1
    problem, velocity = Softmax(), np.zeros(28)
    for _, batch in run.log:
        velocity = momentum * velocity + problem.gradient(np.float32(theta), batch)[1]
        theta = theta - rate * velocity
    return theta


@pytest.mark.parametrize("down_codec", ["dense", "delta", "sparse", "auto"])
@pytest.mark.parametrize("name", ["dgs", "dgc", "gd"])
def test_everything_sent_without_momentum_is_asgd(name, down_codec):
    momenta = {"dgs": {"dgs_momentum": 0.0}, "dgc": {"dgc_momentum": 0.0}}.get(name, {})
    chosen = method(
        name, nb_workers=3, compression_rate=1.0, overrides={"down_codec": down_codec}, **momenta
    )
    run = MiniRun(chosen, iter_max=60).run()
    other = MiniRun(method("asgd", nb_workers=3), iter_max=60).run()
    np.testing.assert_allclose(run.theta, other.theta, rtol=0, atol=1e-5)


def test_everything_sent_by_one_worker_is_momentum_sgd():
    run = MiniRun(
        method("dgs", nb_workers=1, compression_rate=1.0, dgs_momentum=0.7), iter_max=60
    ).run()
    np.testing.assert_allclose(run.theta, momentum_sgd(run, 0.7, 0.1), rtol=0, atol=1e-5)
    assert run.problem.accuracy(run.theta) > 0.7


def test_dgc_without_masking_is_momentum_sgd_too():
    chosen = method("dgc", nb_workers=1, compression_rate=1.0, dgc_masking=False)
    run = MiniRun(chosen, iter_max=60).run()
    np.testing.assert_allclose(run.theta, momentum_sgd(run, 0.9, 0.1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dgs", "dgc", "gd"])
def test_the_number_of_shards_does_not_change_one_worker_s_run(name):
    thetas = [
        MiniRun(method(name, nb_workers=1, compression_rate=0.2), iter_max=40, nb_ps=nb_ps)
        .run()
        .theta
        for nb_ps in (1, 3)
    ]
    np.testing.assert_array_equal(*thetas)


@pytest.mark.parametrize("name", ["dgs", "dgc", "gd"])
@pytest.mark.parametrize("value_dtype", ["float32", "int8"])
def test_they_train(name, value_dtype):
    chosen = method(name, nb_workers=3, compression_rate=0.1, value_dtype=value_dtype)
    run = MiniRun(chosen, iter_max=600, nb_ps=2).run()
    assert run.problem.accuracy(run.theta) > 0.9


def test_keras_momentum_is_momentum_sgd_at_a_constant_rate():
    """Keras has the rate inside the velocity, so a drop of the rate separates the two."""
    from thinwire.ops.optimizers.server import OptimizerUpdate
    from thinwire.ops.optimizers.variables import VariablesOptimizer
    from thinwire.ops.types import Update

    theta = np.zeros(3, np.float32)
    flat = VariablesOptimizer(OptimizerUpdate("momentum", 0.9).described, theta)
    wanted, velocity = np.zeros(3), np.zeros(3)
    rng = np.random.default_rng(0)
    for _ in range(30):
        gradient = rng.standard_normal(3, np.float32)
        velocity = 0.9 * velocity + gradient
        wanted = wanted - 0.1 * velocity
        flat.step(theta, Update(None, gradient), 0.1, negate=False)
    np.testing.assert_allclose(theta, wanted, rtol=0, atol=1e-5)
    flat.step(theta, Update(None, np.zeros(3, np.float32)), 0.01, negate=False)
    np.testing.assert_allclose(theta, wanted - 0.1 * 0.9 * velocity, rtol=0, atol=1e-5)

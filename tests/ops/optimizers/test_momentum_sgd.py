"""Momentum SGD in numpy equals Keras's SGD operation by operation."""

import keras
import numpy as np
import pytest

from thinwire.ops.optimizers.adam import FlatAdam
from thinwire.ops.optimizers.momentum_sgd import _PIECE, MomentumSGD
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.variables import VariablesOptimizer
from thinwire.ops.types import Kind, Update

SIZE = 2 * _PIECE + 17


def gradients(count, size=SIZE, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size, np.float32) for _ in range(count)]


def start(size=SIZE):
    return np.random.default_rng(9).standard_normal(size, np.float32)


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_every_bit_is_keras_own(momentum, nesterov):
    theta = start()
    variable = keras.Variable(theta)
    optimizer = keras.optimizers.SGD(0.05, momentum=momentum, nesterov=nesterov)
    optimizer.build([variable])
    ball = MomentumSGD(momentum, theta, nesterov)
    for step, gradient in enumerate(gradients(12)):
        rate = 0.05 / (1 + step // 4)
        optimizer.learning_rate.assign(rate)
        optimizer.apply([gradient], [variable])
        ball.step(theta, Update(None, gradient), rate, negate=False)
        np.testing.assert_array_equal(theta, variable.numpy())
    assert int(ball.save()["0"]) == int(optimizer.iterations) == 12


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_a_sparse_update_is_a_dense_one_with_zeros(nesterov):
    sparse, dense = start(), start()
    few, all_of_it = (MomentumSGD(0.9, each, nesterov) for each in (sparse, dense))
    for gradient in gradients(6):
        touched = np.flatnonzero(gradient > 1.5)
        full = np.zeros_like(gradient)
        full[touched] = gradient[touched]
        few.step(sparse, Update(touched, gradient[touched]), 0.1, negate=True)
        all_of_it.step(dense, Update(None, full), 0.1, negate=True)
    np.testing.assert_array_equal(sparse, dense)


def test_the_opposite_of_a_gradient_goes_the_other_way():
    up, down = start(), start()
    gradient = gradients(1)[0]
    MomentumSGD(0.9, up).step(up, Update(None, gradient), 0.1, negate=True)
    MomentumSGD(0.9, down).step(down, Update(None, -gradient), 0.1, negate=False)
    np.testing.assert_array_equal(up, down)


def test_what_keras_saved_is_taken_up_and_the_other_way_round():
    ours, theirs = start(100), start(100)
    choice = OptimizerUpdate("momentum", 0.9)
    ball, flat = MomentumSGD(0.9, ours), VariablesOptimizer(choice.described, theirs)
    first, second, third = gradients(3, 100)
    flat.step(theirs, Update(None, first), 0.1, negate=False)
    np.copyto(ours, theirs)
    ball.restore(flat.save(), ours)
    ball.step(ours, Update(None, second), 0.1, negate=False)
    flat.restore(ball.save(), ours)
    np.copyto(theirs, ours)
    ball.step(ours, Update(None, third), 0.1, negate=False)
    flat.step(theirs, Update(None, third), 0.1, negate=False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert flat.save()["0"] == ball.save()["0"] == 3


def test_who_steps_with_what():
    theta, kernels = start(100), None
    for choice, expected in (
        (OptimizerUpdate("momentum", 0.9), MomentumSGD),
        (OptimizerUpdate("sgd", 0.9), MomentumSGD),
        (OptimizerUpdate("momentum", 0.9, weight_decay=0.1), VariablesOptimizer),
        (OptimizerUpdate("adam"), FlatAdam),
        (OptimizerUpdate("adam", weight_decay=0.1), VariablesOptimizer),
    ):
        state = choice.init(theta)
        assert type(state["optimizer"]) is expected
        before = theta.copy()
        gradient = Update(None, np.ones(100, np.float32))
        choice.step(theta, gradient, Kind.GRADIENT, 0.1, kernels, state)
        assert (theta < before).all()
    assert OptimizerUpdate("sgd").init(theta) == {}


def test_sparse_steps_count_as_dense_ones_do():
    """A script that takes its optimizer back continues its schedule from that step count."""
    theta = start(8)
    ball = MomentumSGD(0.9, theta)
    ball.step(theta, Update(np.array([3]), np.ones(1, np.float32)), 0.1, negate=False)
    ball.step(theta, Update(None, np.ones(8, np.float32)), 0.1, negate=False)
    assert int(ball.save()["0"]) == 2

"""Adam in numpy equals Keras' Adam, bit for bit on TensorFlow."""

import keras
import numpy as np
import pytest

from thinwire.ops.offer import Described
from thinwire.ops.optimizers.adam import _PIECE, FlatAdam
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.variables import VariableRules, VariablesOptimizer, optimizer_of
from thinwire.ops.types import ModelSpec, TensorSpec, Update

SPEC = ModelSpec((TensorSpec("w", (_PIECE, 2)), TensorSpec("b", (17,))))
SIZE = SPEC.num_parameters
BETAS = {"beta_1": 0.8, "beta_2": 0.97, "epsilon": 1e-5}


def numbers(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def adam(theta, **config):
    return FlatAdam(Described("Adam", {"learning_rate": 0.0, **config}), theta, SPEC.tensors)


@pytest.mark.parametrize("config", [{}, BETAS], ids=["defaults", "betas"])
@pytest.mark.parametrize("first", [0, 5, 99_990])
def test_every_bit_is_keras_own(config, first):
    theta = numbers(0)
    variable = keras.Variable(theta)
    optimizer = keras.optimizers.Adam(0.05, **config)
    optimizer.build([variable])
    optimizer.iterations.assign(first)
    flat = adam(theta, **config)
    flat.set_iterations(first)
    for step in range(12):
        gradient, rate = numbers(step + 1) * np.float32(10.0 ** (step % 5 - 3)), 0.05 / (1 + step)
        optimizer.learning_rate.assign(rate)
        optimizer.apply([gradient], [variable])
        flat.step(theta, Update(None, gradient), rate, negate=False)
        np.testing.assert_array_equal(theta, variable.numpy())
    assert int(flat.save()["0"]) == int(optimizer.iterations) == first + 12


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999])
def test_the_rate_of_every_step_is_keras_own(beta):
    theta, gradient = np.zeros(1, np.float32), np.ones(1, np.float32)
    described = Described("Adam", {"learning_rate": 0.0, "beta_1": 0.9, "beta_2": beta})
    keras_own = VariablesOptimizer(described, theta)
    flat = FlatAdam(described, theta, (TensorSpec("shard", (1,)),))
    for count in sorted({int(1.09**power) for power in range(150)}):
        two = theta.copy(), theta.copy()
        for optimizer, weights in zip((keras_own, flat), two, strict=True):
            optimizer.restore(None, weights)
            optimizer.set_iterations(count)
            optimizer.step(weights, Update(None, gradient), 0.1, negate=False)
        np.testing.assert_array_equal(*two)


def test_a_sparse_update_is_a_dense_one_with_zeros():
    sparse, dense = numbers(1), numbers(1)
    few, whole = adam(sparse), adam(dense)
    for seed in range(4):
        gradient = numbers(seed)
        touched = np.flatnonzero(gradient > 1.5)
        full = np.zeros_like(gradient)
        full[touched] = gradient[touched]
        few.step(sparse, Update(touched, gradient[touched]), 0.1, negate=True)
        whole.step(dense, Update(None, -full), 0.1, negate=False)
    np.testing.assert_array_equal(sparse, dense)


def test_slots_are_those_of_the_keras_optimizer_and_go_both_ways():
    # the Keras optimizer of a larger shard is compiled by XLA, which rounds less often
    spec = ModelSpec((TensorSpec("w", (40, 2)), TensorSpec("b", (17,))))
    described, size = Described("Adam", {"learning_rate": 0.0}), spec.num_parameters
    thetas = numbers(1, size), numbers(1, size)
    flat = FlatAdam(described, thetas[0], spec.tensors)
    two = flat, VariablesOptimizer(described, thetas[1], spec)
    for optimizer, theta in zip(two, thetas, strict=True):
        for seed in range(3):
            optimizer.step(theta, Update(None, numbers(seed, size)), 0.1, negate=False)
    ours, theirs = (optimizer.slots() for optimizer in two)
    assert [(s.slice, s.role) for s in ours] == [(s.slice, s.role) for s in theirs]
    for own, slot in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(own.values, slot.values)
    fresh = FlatAdam(described, thetas[0], spec.tensors)
    fresh.load(theirs)
    fresh.set_iterations(3)
    for optimizer, theta in zip((fresh, two[1]), thetas, strict=True):
        optimizer.step(theta, Update(None, numbers(9, size)), 0.1, negate=False)
    np.testing.assert_array_equal(*thetas)


def test_a_saved_state_goes_on():
    theta = numbers(1)
    optimizer = adam(theta)
    for seed in range(3):
        optimizer.step(theta, Update(None, numbers(seed)), 0.1, negate=False)
    saved, copy = optimizer.save(), theta.copy()
    optimizer.step(theta, Update(None, numbers(9)), 0.1, negate=False)
    again = adam(copy)
    again.restore(saved, copy)
    again.step(copy, Update(None, numbers(9)), 0.1, negate=False)
    np.testing.assert_array_equal(theta, copy)


@pytest.mark.parametrize(
    ("name", "config", "rules"),
    [
        ("Adam", {"amsgrad": True}, {}),
        ("Adam", {"weight_decay": 0.01}, {}),
        ("Adam", {"clipnorm": 1.0}, {}),
        ("Adam", {"use_ema": True}, {}),
        ("Adam", {}, {"constraints": {"w": Described("NonNeg", {})}}),
        ("Adam", {}, {"unused": ("b",)}),
        ("AdamW", {}, {}),
    ],
)
def test_other_optimizers_are_steps_of_keras(name, config, rules):
    described = Described(name, {"learning_rate": 0.1, **config})
    made = optimizer_of(described, numbers(1), SPEC, VariableRules(**rules))
    assert isinstance(made, VariablesOptimizer)


def test_plain_adam_needs_no_keras():
    config = keras.optimizers.Adam().get_config()
    assert isinstance(optimizer_of(Described("Adam", config), numbers(1), SPEC), FlatAdam)
    assert not OptimizerUpdate("adam").traits.needs_keras
    assert OptimizerUpdate("adam", weight_decay=0.1).traits.needs_keras

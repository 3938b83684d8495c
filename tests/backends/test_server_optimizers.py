"""A server's optimizer steps equal the same Keras optimizer applied alone, on Keras' backend.

The tests run on the backend that KERAS_BACKEND chooses; TensorFlow, JAX and PyTorch all pass them.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

from thinwire.ops.kernels import load_kernels
from thinwire.ops.offer import Described, OptimizerOffer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.described import build_optimizer, describe
from thinwire.ops.optimizers.local import LocalUpdate
from thinwire.ops.optimizers.script import ScriptUpdate
from thinwire.ops.optimizers.slots import OwnSlots, planned
from thinwire.ops.optimizers.variables import VariableRules, VariablesOptimizer
from thinwire.ops.types import Kind, ModelSpec, ShardLayout, Slice, TensorSpec, Update
from thinwire.runtime.keras_backend import installed_backends

ROOT = Path(__file__).resolve().parents[2]
SPEC = ModelSpec((TensorSpec("w", (4, 3)), TensorSpec("b", (3,)), TensorSpec("e", (2, 5))))
SIZE = SPEC.num_parameters
#: Name of a setting -> (arguments of the optimizer, rules of variables).
SETTINGS = {
    "plain": ({}, {}),
    "clipnorm": ({"clipnorm": 0.5}, {}),
    "clipvalue": ({"clipvalue": 0.3}, {}),
    "global_clipnorm": ({"global_clipnorm": 0.5}, {}),
    "ema": ({"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "loss_scale": ({"loss_scale_factor": 4.0}, {}),
    "decay": ({"weight_decay": 0.01}, {}),
    "excluded": ({"weight_decay": 0.01}, {"without_decay": ("b",)}),
    "unused": ({"weight_decay": 0.01}, {"unused": ("e",)}),
    "constraint": ({}, {"constraints": {"w": Described("MaxNorm", {"max_value": 1.0, "axis": 0})}}),
    "excluded_and_constraint": (
        {"weight_decay": 0.01},
        {"without_decay": ("w",), "constraints": {"e": Described("NonNeg", {})}},
    ),
}
#: Settings for all optimizers; the other settings are tried with the optimizers of FEW.
FOR_ALL = ("plain", "excluded")
FEW = ("SGD", "AdamW", "Adafactor")
#: Optimizer -> roles of the slots of one variable, in order; the same on each backend.
ROLES = {
    "SGD": [],
    "RMSprop": ["velocity"],
    "Adam": ["momentum", "velocity"],
    "AdamW": ["momentum", "velocity"],
    "Adadelta": ["accumulated_grad", "accumulated_delta_var"],
    "Adagrad": ["accumulator"],
    "Adamax": ["momentum", "norm"],
    "Adafactor": ["factor", "factor.1", "velocity"],
    "Nadam": ["momentum", "velocity"],
    "Ftrl": ["accumulator", "linear"],
    "Lion": ["momentum"],
    "Lamb": ["momentum", "velocity"],
    "Muon": ["momentum"],
    "ScheduleFreeAdamW": ["momentum", "velocity"],
}
#: Optimizer -> roles of the slots of the whole optimizer, after its step count.
OF_WHOLE = {"Nadam": ["product"]}
#: Learning rate of the first step.
RATE = 0.02


def numbers(seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


def cut(flat):
    pieces = np.split(flat, np.cumsum([tensor.size for tensor in SPEC.tensors])[:-1])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, SPEC.tensors, strict=True)]


def described_as(name, config):
    return Described(name, {"learning_rate": 0.0, **config})


def alone(name, config, rules, steps):
    """Return the weights after Keras' own steps on the variables in their shapes."""
    optimizer = build_optimizer(described_as(name, config))
    variables = [keras.Variable(part, name=f"x{n}") for n, part in enumerate(cut(numbers(0)))]
    named = dict(zip([tensor.path for tensor in SPEC.tensors], variables, strict=True))
    for path, constraint in rules.constraints.items():
        kind = getattr(keras.constraints, constraint.name)
        named[path].constraint = kind(**constraint.config)
    if rules.without_decay:
        exempt = [named[path] for path in rules.without_decay]
        optimizer.exclude_from_weight_decay(var_list=exempt)
    optimizer.build(variables)
    for seed in range(1, steps + 1):
        optimizer.learning_rate.assign(RATE / seed)
        gradients = [keras.ops.convert_to_tensor(part) for part in cut(numbers(seed))]
        pairs = zip(named.items(), gradients, strict=True)
        used = [(gradient, v) for (path, v), gradient in pairs if path not in rules.unused]
        optimizer.apply(*zip(*used, strict=True))
    values = [keras.ops.convert_to_numpy(variable.value).ravel() for variable in variables]
    return np.concatenate(values)


def on_server(name, config, rules, steps):
    theta = numbers(0)
    optimizer = VariablesOptimizer(described_as(name, config), theta, SPEC, rules)
    for seed in range(1, steps + 1):
        gradient = numbers(seed)
        optimizer.step(theta, Update(None, gradient), RATE / seed, negate=False)
        np.testing.assert_array_equal(gradient, numbers(seed))
    return theta, optimizer


def settings():
    for name in allow_list.OPTIMIZERS:
        for setting in SETTINGS if name in FEW else FOR_ALL:
            yield pytest.param(name, setting, id=f"{name}-{setting}")
    yield pytest.param("SGD", "momentum", id="SGD-momentum")
    yield pytest.param("SGD", "nesterov", id="SGD-nesterov")


@pytest.mark.parametrize(("name", "setting"), [*settings()])
def test_steps_equal_those_of_keras_alone(name, setting):
    momentum = {"momentum": 0.9, "nesterov": setting == "nesterov"}
    config, rules = SETTINGS.get(setting, (momentum, {}))
    rules = VariableRules(**rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of variables without a gradient
        expected = alone(name, config, rules, 5)
        theta, optimizer = on_server(name, config, rules, 5)
    np.testing.assert_allclose(theta, expected, rtol=1e-6, atol=1e-6)
    assert (theta != numbers(0)).any()
    assert optimizer.save()["0"] == 5


@pytest.mark.parametrize("name", allow_list.OPTIMIZERS)
def test_a_restored_optimizer_continues_with_the_same_bits(name):
    theta, optimizer = on_server(name, {}, VariableRules(without_decay=("b",)), 3)
    saved, slots, other_theta = optimizer.save(), optimizer.slots(), theta.copy()
    optimizer.step(theta, Update(None, numbers(9)), RATE, negate=False)
    rules = VariableRules(without_decay=("b",))
    for load in ("restore", "load"):
        other, weights = (
            VariablesOptimizer(described_as(name, {}), numbers(5), SPEC, rules),
            other_theta.copy(),
        )
        if load == "restore":
            other.restore(saved, weights)
        else:
            other.set_weights(weights)
            other.load(slots)
            other.set_iterations(3)
        other.step(weights, Update(None, numbers(9)), RATE, negate=False)
        np.testing.assert_array_equal(weights, theta)


def test_saved_slots_are_copies():
    theta, optimizer = on_server("Adam", {}, VariableRules(), 2)
    saved, slots = optimizer.save(), optimizer.slots()
    before = {key: value.copy() for key, value in saved.items()}
    of_slots = [slot.values.copy() for slot in slots]
    start = theta.copy()
    optimizer.restore(saved, theta)
    for seed in (7, 8):
        optimizer.step(theta, Update(None, numbers(seed)), 0.1, negate=False)
    for key, value in saved.items():
        np.testing.assert_array_equal(value, before[key])
    for slot, value in zip(slots, of_slots, strict=True):
        np.testing.assert_array_equal(slot.values, value)
    assert (theta != start).any()


def test_the_weights_of_the_caller_are_not_the_variables_memory():
    """JAX would otherwise compute in the caller's array, and PyTorch step it."""
    theta = numbers(0)
    optimizer = VariablesOptimizer(described_as("Adam", {}), theta, SPEC)
    expected = numbers(0)
    twin = VariablesOptimizer(described_as("Adam", {}), expected, SPEC)
    theta[:] = 0
    for seed in (1, 2):
        optimizer.step(theta, Update(None, numbers(seed)), RATE, negate=False)
        twin.step(expected, Update(None, numbers(seed)), RATE, negate=False)
        np.testing.assert_array_equal(theta, expected)
        theta[:] = 0


def test_a_gradient_that_must_not_be_written_and_a_sparse_one_are_steps():
    gradient = numbers(1)
    gradient[5:] = 0
    frozen = gradient.copy()
    frozen.flags.writeable = False
    sparse = Update(np.arange(5), gradient[:5].copy())
    found = []
    for update, negate in ((Update(None, frozen), False), (sparse, False)):
        theta = numbers(0)
        optimizer = VariablesOptimizer(described_as("Adam", {}), theta, SPEC)
        optimizer.step(theta, update, RATE, negate=negate)
        found.append(theta)
    np.testing.assert_array_equal(*found)


def test_a_change_of_weights_is_a_negative_gradient():
    found = []
    for sign, negate in ((1, False), (-1, True)):
        theta = numbers(0)
        optimizer = VariablesOptimizer(described_as("Adam", {}), theta, SPEC)
        optimizer.step(theta, Update(None, sign * numbers(1)), RATE, negate=negate)
        found.append(theta)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("unused", [("w", "b", "e"), ("w", "b")])
@pytest.mark.parametrize("without_decay", [("w", "b", "e"), ("e",), ()])
def test_a_step_counts_with_any_variables_in_use(unused, without_decay):
    rules = VariableRules(unused=unused, without_decay=without_decay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theta, optimizer = on_server("AdamW", {"weight_decay": 0.1}, rules, 2)
    assert optimizer.save()["0"] == 2
    changed = theta != numbers(0)
    assert not changed[:15].any() and changed[15:].any() == ("e" not in unused)


@pytest.mark.parametrize("name", ROLES)
def test_slots_have_the_same_names_and_order_on_each_backend(name):
    offer = OptimizerOffer(described_as(name, {}), has_slots=True)
    one = ModelSpec((TensorSpec("w", (4, 3)),))
    places = [place for place in planned(offer, one) if place.slice is not None]
    assert [place.role for place in places] == ROLES[name]
    slots = VariablesOptimizer(offer.optimizer, numbers(0)[:12], one).slots()
    assert [slot.role for slot in slots if slot.slice is not None] == ROLES[name]
    assert (slots[0].role, slots[0].values.dtype) == ("iteration", np.int64)
    whole = [slot.role for slot in slots if slot.slice is None]
    assert whole == ["iteration", *OF_WHOLE.get(name, [])]


_OTHER_BACKEND = """
import sys, numpy as np
from tests.backends.test_server_optimizers import *
for name in STORED:
    path = f"{sys.argv[1]}/{name}.npz"
    saved = dict(np.load(path))
    theta = saved.pop("theta")
    optimizer = VariablesOptimizer(described_as(name, {}), numbers(5), SPEC)
    optimizer.restore(saved, theta)
    optimizer.step(theta, Update(None, numbers(9)), RATE, negate=False)
    np.savez(path, theta=theta, **optimizer.save())
"""
#: Optimizers whose state another backend loads. ScheduleFreeAdamW is not one of them: Keras reads
#: its old momentum after the change on TensorFlow and PyTorch, and before the change on JAX.
STORED = (*FEW, "Nadam", "Muon")


@pytest.mark.timeout(300)  # the import of another backend takes a minute on a busy machine
def test_another_backend_continues_from_a_saved_state(tmp_path):
    others = set(installed_backends()) - {keras.backend.backend()}
    if not others:
        pytest.skip("only one backend of Keras is installed")
    stored = {}
    for name in STORED:
        theta, optimizer = stored[name] = on_server(name, {}, VariableRules(), 3)
        np.savez(tmp_path / f"{name}.npz", theta=theta, **optimizer.save())
    subprocess.run(
        [sys.executable, "-c", _OTHER_BACKEND, str(tmp_path)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": sorted(others)[0]},
    )
    for name, (theta, optimizer) in stored.items():
        optimizer.step(theta, Update(None, numbers(9)), RATE, negate=False)
        other = dict(np.load(tmp_path / f"{name}.npz"))
        np.testing.assert_allclose(other.pop("theta"), theta, rtol=1e-5, atol=1e-5)
        ours = optimizer.save()
        assert list(other) == list(ours)
        for key, value in ours.items():
            assert (other[key].dtype, other[key].shape) == (value.dtype, value.shape)
            np.testing.assert_allclose(other[key], value, rtol=1e-4, atol=1e-5)


def test_a_script_optimizer_is_described_and_its_slots_travel():
    variables = [keras.Variable(part, name=f"x{n}") for n, part in enumerate(cut(numbers(0)))]
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.1, 100), weight_decay=0.1, beta_1=0.8
    )
    optimizer.exclude_from_weight_decay(var_list=[variables[1]])
    optimizer.build(variables)
    for seed in (1, 2):
        optimizer.apply([keras.ops.convert_to_tensor(part) for part in cut(numbers(seed))])
    names = [tensor.path for tensor in SPEC.tensors]
    offer = describe(optimizer, variables, paths=names).offer
    assert (offer.iterations, offer.without_decay) == (2, ("b",))
    assert offer.optimizer.config["beta_1"] == 0.8
    slots = OwnSlots(optimizer, offer, variables)
    assert not slots.are_initial
    initial = [slot for slot in slots.collect() if slot.role != "iteration"]
    theta = np.concatenate(
        [keras.ops.convert_to_numpy(variable.value).ravel() for variable in variables]
    )
    update = ScriptUpdate(offer, VariableRules(offer.without_decay), tuple(initial))
    state = update.init(theta, SPEC)
    rate = float(keras.optimizers.schedules.CosineDecay(0.1, 100)(2))
    gradient = Update(None, numbers(3))
    update.step(theta, gradient, Kind.GRADIENT, rate, load_kernels("numpy"), state)
    optimizer.apply([keras.ops.convert_to_tensor(part) for part in cut(numbers(3))])
    values = [keras.ops.convert_to_numpy(variable.value).ravel() for variable in variables]
    np.testing.assert_allclose(theta, np.concatenate(values), rtol=1e-6, atol=1e-6)
    layout = ShardLayout(tuple(Slice(n, 0, t.size) for n, t in enumerate(SPEC.tensors)))
    back = [keras.Variable(part, name=f"y{n}") for n, part in enumerate(cut(theta))]
    fresh = keras.optimizers.AdamW(0.1, weight_decay=0.1, beta_1=0.8)
    fresh.exclude_from_weight_decay(var_list=[back[1]])
    filled = OwnSlots(fresh, offer, back)
    assert filled.are_initial
    filled.fill([layout], update.slots(state), 0.05)
    assert int(fresh.iterations) == 3 and float(fresh.learning_rate) == pytest.approx(0.05)
    for mine, own in zip(fresh.variables[2:], optimizer.variables[1:], strict=True):
        np.testing.assert_allclose(mine.numpy(), own.numpy(), rtol=1e-6, atol=1e-6)


def test_a_loss_scale_is_described_without_its_wrapper():
    variable = keras.Variable(np.zeros(3, np.float32))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=256.0)
    scaled.build([variable])
    scaled.step_counter.assign(5)
    described = describe(scaled, [variable])
    assert (described.loss_scale.initial, described.loss_scale.streak) == (256.0, 5)
    assert described.offer.optimizer.name == "Adam"
    assert described.offer.optimizer.config["learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["adam", "lion", "momentum"])
def test_local_steps_average_their_slots(name):
    local = LocalUpdate(name, 0.9 if name == "momentum" else 0.0, opt_state="average")
    weights, base = numbers(0), numbers(0)
    state = local.restart(weights, local.init(SIZE, SPEC))
    for seed in (1, 2):
        state = local.step(weights, numbers(seed), RATE, state, base)
    packed = local.pack(state)
    assert packed.dtype == np.float32 and len(packed) == local.num_averaged(SIZE)
    assert packed[0] == 2
    saved, before = local.save(state), weights.copy()
    state = local.step(weights, numbers(3), RATE, state, base)
    again = local.restore(saved, before, local.unpack(packed, local.init(SIZE, SPEC)))
    again = local.step(before, numbers(3), RATE, again, base)
    np.testing.assert_array_equal(before, weights)
    averaged = local.unpack(packed, local.restart(weights, local.init(SIZE, SPEC)))
    np.testing.assert_array_equal(local.pack(averaged), packed)
    cleared = local.pack(local.forget(weights, averaged))
    assert not cleared.any()

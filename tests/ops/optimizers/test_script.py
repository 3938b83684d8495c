"""Scripts' optimizers on the PS, without a run: counts, rates, slots, rules about paths."""

import copy

import keras
import numpy as np
import pytest

from thinwire.ops.kernels import load_kernels
from thinwire.ops.offer import Described, OptimizerOffer
from thinwire.ops.optimizers import allow_list, tensorflow_steps
from thinwire.ops.optimizers.base import Moment
from thinwire.ops.optimizers.described import describe
from thinwire.ops.optimizers.script import ScriptUpdate, ScriptUpdates
from thinwire.ops.optimizers.slots import Slot, cut
from thinwire.ops.optimizers.variables import VariableRules, VariablesOptimizer
from thinwire.ops.types import Kind, ModelSpec, ShardLayout, Slice, TensorSpec, Update

KERNELS = load_kernels("numpy")
SPEC = ModelSpec((TensorSpec("w", (2, 3)), TensorSpec("b", (2,))))
SIZE = SPEC.num_parameters
DECAY = {"initial_learning_rate": 0.5, "decay_steps": 10, "decay_rate": 0.5, "staircase": False}
SCHEDULE = {"name": "ExponentialDecay", "config": DECAY}


def offered(name="SGD", config=(), rules=None, **fields):
    described = Described(name, {"learning_rate": 0.1, **dict(config)})
    return ScriptUpdate(OptimizerOffer(described, **fields), rules or VariableRules())


def by_steps(**fields):
    return offered(config={"learning_rate": SCHEDULE}, clock="steps", **fields)


def step(update, theta, state, gradient=None, number=0):
    values = np.zeros_like(theta) if gradient is None else gradient
    return update.step(theta, Update(None, values), Kind.GRADIENT, 0.1, KERNELS, state, number)[1]


def rate(update, state, number=0, **moment):
    return update.rate(Moment(9.0, **moment), state, number).value


def numbers(seed=0):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


def test_a_rate_that_the_script_has_set_outlives_a_restart():
    update, theta = offered(), numbers()
    state = update.init(theta, SPEC)
    assert rate(update, state, set_rate=0.01) == 0.01
    saved = copy.deepcopy(update.save(state))
    again = update.restore(saved, theta, update.init(theta, SPEC))
    assert rate(update, again) == 0.01


@pytest.mark.parametrize("fewest", [1, tensorflow_steps.FEWEST_FOR_XLA], ids=["by XLA", "traced"])
def test_after_a_restore_steps_are_those_of_the_saved_optimizer(fewest, monkeypatch):
    monkeypatch.setattr(tensorflow_steps, "FEWEST_FOR_XLA", fewest)
    update, theta = offered("Adam"), numbers()
    state = step(update, theta, update.init(theta, SPEC), numbers(1))
    saved, restored = copy.deepcopy(update.save(state)), theta.copy()
    step(update, theta, state, numbers(2))
    state = update.restore(saved, restored, update.init(numbers(3), SPEC))
    step(update, restored, state, numbers(2))
    np.testing.assert_array_equal(restored, theta)


def stepped(name, fewest, monkeypatch):
    """Return the weights after two steps; XLA compiles variables of at least this many entries."""
    monkeypatch.setattr(tensorflow_steps, "FEWEST_FOR_XLA", fewest)
    theta, optimizer = (
        numbers(),
        VariablesOptimizer(Described(name, {"learning_rate": 0.0}), numbers(), SPEC),
    )
    for number in (1, 2):
        optimizer.step(theta, Update(None, numbers(number)), 0.1, negate=False)
    return theta, optimizer._steps._step.function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize("name", sorted(allow_list.ELEMENTWISE))
def test_xla_compiles_the_steps_of_many_entries(name, monkeypatch):
    """It may round a product and a sum once, where a traced step rounds twice."""
    compiled, is_compiled = stepped(name, SIZE, monkeypatch)
    traced, is_traced = stepped(name, SIZE + 1, monkeypatch)
    assert (is_compiled, is_traced) == (True, False)
    np.testing.assert_allclose(compiled, traced, rtol=1e-5, atol=1e-6)
    assert (compiled != numbers()).any()


@pytest.mark.parametrize("size", [SIZE, 0])
def test_a_schedule_of_steps_is_read_at_the_steps_taken(size):
    """On a shard that holds nothing of the optimizer as well: shard 0 names the rate to all."""
    update, theta = by_steps(), numbers()[:size].copy()
    state = update.init(theta, SPEC if size else None)
    schedule = keras.optimizers.schedules.ExponentialDecay(**DECAY)
    for count in range(3):
        found = update.rate(Moment(9.0, batches=99), state)
        assert found.schedule_count == count
        assert found.value == pytest.approx(float(schedule(count)))
        state = step(update, theta, state)


def test_an_optimizer_that_has_moved_goes_on_with_its_schedule():
    update = by_steps(iterations=40)
    state = update.init(numbers(), SPEC)
    schedule = keras.optimizers.schedules.ExponentialDecay(**DECAY)
    assert rate(update, state) == pytest.approx(float(schedule(40)))


def test_a_variable_with_a_constraint_is_not_cut():
    norm = Described("MaxNorm", {"max_value": 1.0, "axis": 0})
    assert offered(rules=VariableRules(constraints={"w": norm})).traits.whole_variables
    assert not offered().traits.whole_variables


def test_several_optimizers_go_on_from_weights_that_the_script_has_set():
    first, second = (offered("Adam", paths=(path,)) for path in ("w", "b"))
    update, theta = ScriptUpdates((first, second)), numbers()
    state = update.init(theta, SPEC)
    theta = numbers(1)
    state = update.restore(None, theta, state)
    expected = theta.copy()
    for number in (0, 1):  # with a gradient of zeros Adam stands still
        part = state["parts"][number]
        zeros = np.zeros(SIZE, np.float32)
        state = step(update, theta, state, zeros, number)
        np.testing.assert_array_equal(part.theta, expected[part.positions])
    np.testing.assert_array_equal(theta, expected)


def adam(theta, rules=None, **config):
    described = Described("AdamW", {"learning_rate": 0.0, **config})
    return VariablesOptimizer(described, theta, SPEC, rules or VariableRules())


def test_after_a_restore_the_rate_is_that_of_the_step():
    theta, saved_at = numbers(), numbers()
    optimizer, other = adam(theta), adam(theta)
    optimizer.step(saved_at, Update(None, numbers(1)), 0.1, negate=False)
    saved = optimizer.save()
    theta = saved_at.copy()
    optimizer.step(theta, Update(None, numbers(2)), 0.5, negate=False)
    found = []
    for each in (optimizer, other):
        theta = saved_at.copy()
        each.restore(saved, theta)
        each.step(theta, Update(None, numbers(3)), 0.5, negate=False)
        found.append(theta)
    np.testing.assert_array_equal(*found)


def test_a_variable_without_a_gradient_is_neither_stepped_nor_decayed():
    theta = numbers()
    optimizer = adam(theta, VariableRules(unused=("b",)), weight_decay=0.1)
    before = theta.copy()
    for seed in (1, 2):
        optimizer.step(theta, Update(None, numbers(seed)), 0.1, negate=False)
    np.testing.assert_array_equal(theta[6:], before[6:])
    assert (theta[:6] != before[:6]).all()


def test_a_step_counts_where_no_variable_has_a_gradient():
    """All shards count the same steps, for any slices of the model."""
    optimizer = adam(numbers(), VariableRules(unused=("w", "b")))
    optimizer.step(numbers(), Update(None, numbers(1)), 0.1, negate=False)
    assert int(optimizer.optimizer.iterations.numpy()) == 1


def test_steps_without_an_overflow_go_on_being_counted():
    variable = keras.Variable(np.zeros(3, np.float32))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    scaled.build([variable])
    scaled.step_counter.assign(5)
    assert describe(scaled, [variable]).loss_scale.streak == 5


def test_a_rate_is_set_for_one_of_several_optimizers():
    update = ScriptUpdates(tuple(offered(paths=(path,)) for path in ("w", "b")))
    state = update.init(numbers(), SPEC)
    rate(update, state, 1, set_rate=0.01)
    assert [rate(update, state, number) for number in (0, 1)] == [0.1, 0.01]


def test_each_shard_gets_its_own_part_of_a_slot():
    momentum = np.arange(6, dtype=np.float32).reshape(2, 3)
    bias = np.array([7, 8], np.float32)
    slots = [Slot(0, "momentum", momentum), Slot(1, "momentum", bias), Slot(None, "product", 0.5)]
    one = cut(slots, SPEC, ShardLayout((Slice(0, 0, 2), Slice(1, 0, 2))))
    other = cut(slots, SPEC, ShardLayout((Slice(0, 2, 6),)))
    found = [
        [(each.slice, np.ravel(each.values).tolist()) for each in part] for part in (one, other)
    ]
    assert found == [
        [(None, [0.5]), (0, [0, 1]), (1, [7, 8])],
        [(None, [0.5]), (0, [2, 3, 4, 5])],
    ]

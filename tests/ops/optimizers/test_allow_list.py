"""A PS builds the offered optimizer exactly as Keras does, and builds nothing else."""

import inspect

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.described import build_constraint, build_optimizer
from thinwire.ops.optimizers.keras_schedules import build_schedule
from thinwire.ops.types import ConfigurationError

#: Arguments that are not sent: names, and arguments that the worker evaluates.
LEFT_OUT = {"self", "name", "kwargs", "learning_rate", "exclude_layers", "exclude_embeddings"}
#: Classes that are no optimizer by themselves.
WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer", "OptimizerMap", "Optimizer"}


def classes(module):
    found = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in found.items() if kind.__name__ == name}


def signature(kind):
    return set(inspect.signature(kind.__init__).parameters)


def test_every_optimizer_and_each_of_its_arguments_is_on_the_list():
    found = {
        name: signature(kind) - LEFT_OUT
        for name, kind in classes(keras.optimizers).items()
        if name not in WRAPPERS
    }
    assert {name: set(allow_list.arguments(name)) for name in allow_list.OPTIMIZERS} == found


@pytest.mark.parametrize(
    ("module", "base", "known"),
    [
        (keras.optimizers.schedules, "LearningRateSchedule", allow_list.SCHEDULES),
        (keras.constraints, "Constraint", allow_list.CONSTRAINTS),
    ],
)
def test_every_schedule_and_constraint_is_on_the_list(module, base, known):
    found = {
        name: signature(kind) - {"self", "name", "args", "kwargs"}
        for name, kind in classes(module).items()
        if name != base
    }
    assert {name: set(arguments) for name, arguments in known.items()} == found


SGD = {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("Optimizer", SGD, ["Optimizer", "expected one of", "SGD"]),
        ("MultiOptimizer", SGD, ["MultiOptimizer"]),
        ("os.system", SGD, ["os.system"]),
        (["SGD"], SGD, ["['SGD']"]),
        ("SGD", {}, ["learning_rate=None"]),
        ("SGD", {"learning_rate": "0.1"}, ["learning_rate='0.1'"]),
        ("SGD", {"learning_rate": float("nan")}, ["nan"]),
        ("SGD", {"learning_rate": True}, ["True"]),
        ("SGD", SGD | {"module": "builtins"}, ["module", "momentum"]),
        ("SGD", SGD | {"registered_name": "x"}, ["registered_name"]),
        ("SGD", SGD | {"momentum": 1.5}, ["momentum=1.5", "0 to 1"]),
        ("SGD", SGD | {"nesterov": 1}, ["nesterov=1", "true or false"]),
        ("SGD", SGD | {"clipnorm": 1, "clipvalue": 1}, ["clipnorm, clipvalue", "one kind"]),
        ("SGD", SGD | {"weight_decay": {"class_name": "Lambda"}}, ["Lambda"]),
        ("Adam", SGD | {"ema_overwrite_frequency": 2.5}, ["whole number"]),
        ("Adam", SGD | {"epsilon": 1e400}, ["epsilon"]),
        ("Muon", SGD | {"exclude_layers": ["(a+)+$"]}, ["exclude_layers"]),
        ("Muon", SGD | {"ns_steps": 10**9}, ["ns_steps", "100"]),
        ("SGD", {"learning_rate": {"name": "Mine", "config": {}}}, ["Mine", "CosineDecay"]),
        ("SGD", {"learning_rate": {"class_name": "CosineDecay", "config": {}}}, ["name and"]),
        (
            "SGD",
            {"learning_rate": {"name": "CosineDecay", "config": {"decay_steps": 0}}},
            ["decay_steps=0"],
        ),
        (
            "SGD",
            {
                "learning_rate": {
                    "name": "PiecewiseConstantDecay",
                    "config": {"boundaries": [1, 2], "values": [0.1]},
                }
            },
            ["2 boundaries and 1 values"],
        ),
        (
            "SGD",
            {
                "learning_rate": {
                    "name": "PiecewiseConstantDecay",
                    "config": {"boundaries": [0] * 10**5, "values": [0.1]},
                }
            },
            ["up to 1000 numbers"],
        ),
        ("AdamW", SGD | {"weight_decay": None}, ["Keras cannot build AdamW"]),
        ("Adam", SGD | {"gradient_accumulation_steps": 1}, ["Keras cannot build Adam"]),
    ],
)
def test_other_optimizers_are_refused_by_name(name, config, words):
    with pytest.raises(ConfigurationError) as refused:
        build_optimizer(Described(name, config))
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("build", "name", "config", "words"),
    [
        (build_constraint, "Mine", {}, ["Mine", "MaxNorm"]),
        (build_constraint, "MaxNorm", {"axis": 10**9}, ["axis"]),
        (build_constraint, "MaxNorm", {"axis": [0] * 100}, ["axis"]),
        (build_constraint, "NonNeg", {"w": 1}, ["no argument", "none"]),
        (build_schedule, "LearningRateSchedule", {}, ["LearningRateSchedule"]),
        (build_schedule, "CosineDecay", {"decay_steps": 5}, ["cannot be built", "initial"]),
    ],
)
def test_other_constraints_and_schedules_are_refused_by_name(build, name, config, words):
    with pytest.raises(ConfigurationError) as refused:
        build(Described(name, config))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_constraint_of_several_axes_is_built():
    built = build_constraint(Described("MaxNorm", {"max_value": 2, "axis": [0, 1]}))
    assert built.axis == [0, 1]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NAMES = [*allow_list.OPTIMIZERS, "LossScaleOptimizer", "deserialize", "__class__"]
ARGUMENTS = sorted({name for each in allow_list.OPTIMIZERS for name in allow_list.arguments(each)})


@given(
    st.sampled_from(NAMES) | PLAIN,
    st.dictionaries(st.sampled_from([*ARGUMENTS, "learning_rate", "module"]) | st.text(), PLAIN),
)
def test_whatever_is_offered_is_built_or_refused(name, config):
    try:
        built = build_optimizer(Described(name, {"learning_rate": 0.1} | config))
    except ConfigurationError:
        return
    assert type(built) is getattr(keras.optimizers, name)

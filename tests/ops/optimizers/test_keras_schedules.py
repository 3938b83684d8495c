"""Keras' learning rate schedules in numpy have the values of Keras on TensorFlow."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list, keras_schedules
from thinwire.ops.optimizers.keras_schedules import build_schedule
from thinwire.ops.types import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
#: Names of schedules with usual arguments.
USUAL = [
    ("ExponentialDecay", {"decay_steps": 10, "decay_rate": 0.96}),
    ("ExponentialDecay", {"decay_steps": 7.5, "decay_rate": 0.5, "staircase": True}),
    ("InverseTimeDecay", {"decay_steps": 10, "decay_rate": 0.5}),
    ("InverseTimeDecay", {"decay_steps": 3, "decay_rate": 2.0, "staircase": True}),
    ("PolynomialDecay", {"decay_steps": 1000}),
    ("PolynomialDecay", {"decay_steps": 30, "end_learning_rate": 0.01, "power": 0.5}),
    ("PolynomialDecay", {"decay_steps": 30, "power": 2.0, "cycle": True}),
    ("CosineDecay", {"decay_steps": 1000}),
    ("CosineDecay", {"decay_steps": 50, "alpha": 0.1}),
    ("CosineDecay", {"decay_steps": 50, "warmup_target": 0.3, "warmup_steps": 20}),
    ("CosineDecayRestarts", {"first_decay_steps": 10}),
    ("CosineDecayRestarts", {"first_decay_steps": 7, "t_mul": 1.0, "m_mul": 0.9, "alpha": 0.05}),
    ("CosineDecayRestarts", {"first_decay_steps": 9, "t_mul": 3.0, "m_mul": 0.5}),
    ("CosineDecayRestarts", {"first_decay_steps": 9, "t_mul": 1.5}),
]


def of_keras(name, config):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the values are those of Keras on TensorFlow")
    return getattr(keras.optimizers.schedules, name)(**config)


def gap(one, other):
    """Return how many float32 numbers lie between two numbers; 0 for two NaN."""
    if math.isnan(one) or math.isnan(other):
        return 0 if math.isnan(one) and math.isnan(other) else math.inf
    ordered = [np.float32(value).view(np.int32).astype(np.int64) for value in (one, other)]
    signed = [number if number >= 0 else -(2**31) - number for number in ordered]
    return abs(signed[0] - signed[1])


def assert_equal(name, config, steps):
    """Check the rates at steps; a result that TensorFlow replaces by 0 is not compared."""
    ours, theirs = build_schedule(Described(name, config)), of_keras(name, config)
    for step in steps:
        rate, expected = float(ours(step)), float(theirs(step))
        if 0 < abs(rate) < 1e-30 or expected == 0:
            assert abs(rate - expected) < 1e-30, (name, config, step)
        else:
            assert gap(rate, expected) <= 1, (name, config, step, rate, expected)


@pytest.mark.parametrize(("name", "config"), USUAL)
def test_each_step_has_the_rate_of_keras(name, config):
    config = {"initial_learning_rate": 0.1, **config}
    boundaries = [round(v) for v in config.values() if isinstance(v, int | float) and v > 2]
    around = [step + offset for step in boundaries for offset in (-1, 0, 1)]
    sums = [sum(boundaries) + offset for offset in (-1, 0, 1)]
    far = [10**power + offset for power in range(3, 9) for offset in (0, 1)]
    assert_equal(name, config, [*range(130), *around, *sums, *far, 2**31 - 2])


@pytest.mark.parametrize("boundaries", [[3, 5], [3.7, 5.2], [4, 4], [0, 1_000_000], [5]])
def test_each_piece_has_the_rate_of_keras(boundaries):
    values = [0.5, 0.1, 0.02][: len(boundaries) + 1]
    config = {"boundaries": boundaries, "values": values}
    assert_equal("PiecewiseConstantDecay", config, [*range(9), 999_999, 1_000_000, 1_000_001])


_RATES = st.floats(-2, 2, width=32).filter(lambda value: value == 0 or abs(value) > 1e-6)
_STEPS = st.one_of(st.integers(1, 10_000), st.floats(0.5, 1e6, width=32))
_ARGUMENTS = {
    "initial_learning_rate": _RATES,
    "decay_steps": _STEPS,
    "first_decay_steps": _STEPS,
    "decay_rate": _RATES,
    "staircase": st.booleans(),
    "end_learning_rate": _RATES,
    "power": st.floats(-3, 3, width=16).filter(lambda value: value == 0 or abs(value) > 1e-3),
    "cycle": st.booleans(),
    "alpha": st.floats(0, 1),
    "warmup_target": st.none() | _RATES,
    "warmup_steps": st.integers(0, 5000),
    "t_mul": st.floats(0.5, 4, width=16),
    "m_mul": _RATES,
}


@st.composite
def described_schedules(draw):
    name = draw(st.sampled_from(sorted(set(allow_list.SCHEDULES) - {"PiecewiseConstantDecay"})))
    return name, {argument: draw(_ARGUMENTS[argument]) for argument in allow_list.SCHEDULES[name]}


@given(described_schedules(), st.integers(0, 2**31 - 2) | st.integers(0, 5000))
@example(("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 100}), 100)
@example(("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 100}), 99)
def test_any_arguments_give_the_rate_of_keras(described, step):
    assert_equal(*described, [step])


def test_the_classes_are_those_of_the_allow_list():
    assert set(keras_schedules.SCHEDULES) == set(allow_list.SCHEDULES)
    for name, schedule in keras_schedules.SCHEDULES.items():
        assert set(schedule.__dataclass_fields__) == set(allow_list.SCHEDULES[name])


def test_a_whole_number_as_initial_rate_is_a_rate():
    """Keras would compute in int32, and decay to 0."""
    config = {"initial_learning_rate": 1, "decay_steps": 10, "decay_rate": 0.5}
    assert build_schedule(Described("ExponentialDecay", config))(10) == 0.5
    pieces = {"boundaries": [3], "values": [1, 0.5]}
    assert build_schedule(Described("PiecewiseConstantDecay", pieces))(3) == 1


def test_a_missing_argument_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"ExponentialDecay cannot.*decay_rate"):
        build_schedule(
            Described("ExponentialDecay", {"initial_learning_rate": 1.0, "decay_steps": 2})
        )


def test_without_a_c_library_the_functions_of_numpy_are_rounded():
    cosine = keras_schedules._c_function("no such function", 1, np.cos)
    assert cosine(np.float32(0.5)) == np.float32(np.cos(np.float64(0.5)))
    assert isinstance(cosine(np.float32(0.5)), np.float32)


def test_a_schedule_needs_no_keras():
    code = (
        "import sys; from thinwire.ops.offer import Described\n"
        "from thinwire.ops.optimizers.keras_schedules import build_schedule\n"
        "build_schedule(Described('CosineDecay', {'initial_learning_rate': 0.1,"
        " 'decay_steps': 9}))(3)\n"
        "assert not {'keras', 'tensorflow', 'jax', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)

"""Quantized values stay finite and near the originals; both kernels give the same codes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tests.frameworks import PACKAGES, SIZES, kernels_of
from tests.ops.kernels import reference
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import VALUE_DTYPES, CodedValues, ConfigurationError

NUMPY_DTYPES = {"float32": "f4", "bfloat16": "u2", "float16": "f2", "int8": "i1"}
LARGEST = np.finfo(np.float32).max
any_values = arrays_of.arrays(
    np.float32,
    st.sampled_from(SIZES),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@settings(max_examples=60, deadline=None)
@given(values=any_values)
def test_coded_values_are_finite_and_of_their_dtype(bodies, dtype, values):
    coded = bodies.quantise(values, dtype)
    assert coded.dtype == dtype and coded.data.dtype == NUMPY_DTYPES[dtype]
    assert 0 < coded.scale < np.inf and np.float32(coded.scale) == coded.scale
    decoded = bodies.dequantise(coded)
    assert decoded.dtype == np.float32 and decoded.shape == values.shape
    assert np.isfinite(decoded).all()


@settings(max_examples=60, deadline=None)
@given(values=any_values)
def test_bfloat16_rounds_to_nearest_even(values):
    coded = load_kernels("numpy").quantise(values, "bfloat16")
    np.testing.assert_array_equal(coded.data, reference.bfloat16(values).view(np.uint16))


@settings(max_examples=60, deadline=None)
@given(values=any_values)
def test_int8_is_off_by_half_a_step_at_most(values):
    numpy_bodies = load_kernels("numpy")
    coded = numpy_bodies.quantise(values, "int8")
    error = np.abs(numpy_bodies.dequantise(coded).astype(np.float64) - values.astype(np.float64))
    largest = np.abs(values.astype(np.float64)).max(initial=0)
    assert (error <= coded.scale * 0.5001 + largest * 1e-6).all()


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_all_bodies_give_the_same_codes(bodies, dtype):
    values = np.random.default_rng(0).standard_normal(5000, np.float32)
    values[:4] = [LARGEST, -LARGEST, 65_520, 0]
    for block in (values, values[4:]):
        one, other = (each.quantise(block, dtype) for each in (load_kernels("numpy"), bodies))
        np.testing.assert_array_equal(one.data, other.data)
        assert one.scale == other.scale


def test_special_blocks(bodies):
    zeros = np.zeros(3, np.float32)
    assert bodies.quantise(zeros, "int8").scale == 1
    np.testing.assert_array_equal(bodies.quantise(zeros, "int8").data, 0)
    halves = np.array([127, 0.5, 1.5, -2.5], np.float32)  # scale 1: half to even
    np.testing.assert_array_equal(bodies.quantise(halves, "int8").data, [127, 0, 2, -2])
    cut = bodies.dequantise(bodies.quantise(np.array([1e6, -1e6], np.float32), "float16"))
    np.testing.assert_array_equal(cut, [65504, -65504])
    assert bodies.quantise(halves, "float32").data is halves


def test_errors_name_what_is_legal(bodies):
    with pytest.raises(ValueError, match="'int5'.*float16"):
        bodies.quantise(np.ones(1, np.float32), "int5")
    with pytest.raises(ValueError, match="'int5'"):
        bodies.dequantise(CodedValues("int5", np.ones(1)))
    with pytest.raises(ConfigurationError, match="--kernels='cuda'.*auto, tf, jax, torch, numpy"):
        load_kernels("cuda")


def test_auto_is_numpy_on_cpu_and_imports_no_tensorflow():
    program = (
        "import sys; from thinwire.ops.codecs import registry\n"
        "from thinwire.ops import kernels\n"
        "assert 'numpy' not in sys.modules\n"
        "assert kernels.load_kernels('auto').name == 'numpy' and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", PACKAGES)
def test_auto_is_the_framework_s_on_a_gpu(name):
    assert kernels_of(name).name == name
    assert load_kernels("auto", on_gpu=True, framework=name).name == name
    assert load_kernels(name, on_host=True).name == (name if name == "tf" else "numpy")


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "thinwire.ops.kernels.jax_ops", raising=False)
    with pytest.raises(ConfigurationError, match=r"--kernels=jax.*thinwire\[jax\]"):
        load_kernels("jax")

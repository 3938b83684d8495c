"""Variables as one vector, against NumPy: before and after the functions are compiled."""

import keras
import numpy as np
import pytest

from thinwire.models import flat_tensors
from thinwire.models.flat_variables import FlatVariables

RNG = np.random.default_rng(3)
SHAPES = ((2, 3), (), (4,), (1, 2, 2))
SIZE = 15


def made(dtype="float32"):
    """Return variables of several shapes, and their values as one vector."""
    flat = RNG.integers(-8, 8, SIZE).astype(np.float32)
    pieces = np.split(flat, np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1])
    variables = [
        keras.Variable(piece.reshape(shape), dtype=dtype)
        for piece, shape in zip(pieces, SHAPES, strict=True)
    ]
    return variables, flat


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_assigned_is_read_and_joined(dtype):
    variables, flat = made(dtype)
    view = FlatVariables(variables)
    np.testing.assert_array_equal(view.read(), flat)
    for step in range(12):  # the later calls are compiled
        given = flat + step
        view.assign(given)
        given[:] = np.nan
        np.testing.assert_array_equal(view.read(), flat + step)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(view.joined()), flat + step)
        assert [v.dtype for v in variables] == [dtype] * len(SHAPES)
        assert [tuple(v.value.shape) for v in variables] == list(SHAPES)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_parts_are_the_variables_parts_and_copies(as_tensor):
    variables, flat = made()
    given = keras.ops.convert_to_tensor(flat.copy()) if as_tensor else flat.copy()
    parts = FlatVariables(variables).parts(given)
    if not as_tensor:
        given[:] = np.nan
    assert [variable for variable, _ in parts] == variables
    for variable, values in parts:
        assert tuple(values.shape) == tuple(variable.shape)
    values = [keras.ops.convert_to_numpy(values).ravel() for _, values in parts]
    np.testing.assert_array_equal(np.concatenate(values), flat)


def test_no_variables_are_an_empty_vector():
    view = FlatVariables([])
    view.assign(np.zeros(0, np.float32))
    assert view.read().shape == (0,) and tuple(view.joined().shape) == (0,)
    assert view.parts(np.zeros(0, np.float32)) == []
    assert flat_tensors.join_arrays([]).dtype == np.float32


def test_joined_arrays_are_a_new_vector_of_float32():
    parts = [np.ones((2, 2), np.float16), np.float32(3.0), np.arange(2.0)]
    np.testing.assert_array_equal(flat_tensors.join_arrays(parts), [1, 1, 1, 1, 3, 0, 1])
    whole = np.ones(4, np.float32)
    assert not np.shares_memory(flat_tensors.join_arrays([whole]), whole)

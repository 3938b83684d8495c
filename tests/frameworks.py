"""Kernels of the installed frameworks, and the copies that they make to the host."""

import dataclasses
import functools
import importlib
import os

import numpy as np
import pytest

from thinwire.ops.kernels import load_kernels

#: Sizes of small arrays. They are few, because JAX compiles its kernels for each size.
SIZES = (0, 1, 2, 3, 5, 8, 13, 40)
#: Value of --kernels -> package.
PACKAGES = {"tf": "tensorflow", "jax": "jax", "torch": "torch"}
#: Kernels of JAX and torch that are numpy's for arrays of the host.
_PLACED = (
    *("top_k", "feedback_top_k", "carried_top_k", "feedback_carried", "chunk_top_k"),
    *("feedback_chunk_top_k", "accumulate", "scale", "norm", "quantise", "quantise_chunks"),
    *("contribution", "block_flags"),
)


def kernels_of(name):
    """Return the kernels of a framework; skip the test where it is not installed.

    `make backends` tests JAX and torch one after the other, by KERAS_BACKEND.
    """
    if os.environ.get("KERAS_BACKEND") in {"jax", "torch"} - {name}:
        pytest.skip(f"KERAS_BACKEND is not {PACKAGES[name]}")
    pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} is not installed")
    return load_kernels(name)


def placing(kernels):
    """Return kernels that copy arrays of the host to the device, and what they change back."""

    def placed(function, *arguments):
        floats = [isinstance(a, np.ndarray) and a.dtype == np.float32 for a in arguments]
        there = [
            kernels.joined([argument]) if is_float else argument
            for argument, is_float in zip(arguments, floats, strict=True)
        ]
        if isinstance(arguments[-1], str) and arguments[-1] == "float32":
            return function(*arguments)  # quantise returns the array itself
        found = function(*there)
        for argument, array, is_float in zip(arguments, there, floats, strict=True):
            if is_float:
                np.copyto(argument, np.asarray(array))
        return kernels.as_saved(found)

    functions = {name: functools.partial(placed, getattr(kernels, name)) for name in _PLACED}
    return dataclasses.replace(kernels, **functions)


def record_copies(monkeypatch, kernels):
    """Return a list to which each copy of a tensor to the host adds its bytes."""
    found = []

    def counted(array):
        found.append(np.asarray(array).nbytes)
        return array

    if kernels.name == "tf":
        import tensorflow as tf

        base = next(each for each in type(tf.constant(0)).__mro__ if "_numpy" in vars(each))
        fetch = base._numpy
        monkeypatch.setattr(base, "_numpy", lambda self: counted(fetch(self)))
    else:
        module = importlib.import_module(f"thinwire.ops.kernels.{kernels.name}_ops")
        copy = module.to_host
        monkeypatch.setattr(module, "to_host", lambda value: counted(copy(value)))
    return found


@pytest.fixture(params=PACKAGES)
def device(request):
    """The kernels of a framework; an operation that TensorFlow lacks on the device is an error."""
    kernels = kernels_of(request.param)
    if kernels.name == "tf":
        request.getfixturevalue("hard_placement")
    return kernels


@pytest.fixture
def hard_placement():
    """An op without a kernel for the given device is an error."""
    import tensorflow as tf

    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(before)

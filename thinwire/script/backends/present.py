"""Chooses the implementation for the backend that Keras uses in this process."""

from __future__ import annotations

import functools
import importlib

import keras

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.base import Backend

#: Keras' name of a backend -> module and class that implement it.
_BACKENDS = {
    "tensorflow": ("tensorflow", "TensorFlowBackend"),
    "jax": ("jax", "JaxBackend"),
    "torch": ("torch", "TorchBackend"),
}


@functools.cache
def backend() -> Backend:
    """Return the implementation for Keras' backend in this process.

    Raises:
        ConfigurationError: Keras uses a backend on which Thinwire does not train, such as numpy.
    """
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise ConfigurationError(
            f"Keras uses the backend {name!r}; expected one of {', '.join(_BACKENDS)}. Set the "
            "environment variable KERAS_BACKEND before the script imports keras."
        )
    module, kind = _BACKENDS[name]
    loaded = importlib.import_module(f"thinwire.script.backends.{module}")
    implementation: Backend = getattr(loaded, kind)()
    return implementation

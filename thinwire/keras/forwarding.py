"""Attributes that earlier versions' `distribute` returned, on the model itself for a while."""

from __future__ import annotations

import warnings
from typing import Any

import keras

_NAMES = ("shard", "last", "stopped", "stop_reason", "num_exchanges", "close")


class _Forwarded:
    """A class attribute of Keras models that looks into ``model.thinwire``.

    It gives way to whatever a model or its class calls by that name: it cannot be assigned to.
    """

    def __init__(self, name: str, warns: bool) -> None:
        self._name, self._warns = name, warns

    def __get__(self, model: Any, kind: type) -> Any:
        session = None if model is None else vars(model).get("thinwire")
        if session is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        if self._warns:
            warnings.warn(
                f"model.{self._name} will go; use model.thinwire.{self._name}",
                DeprecationWarning,
                stacklevel=2,
            )
        return getattr(session, self._name)


def forward_attributes() -> None:
    """Let every distributed model answer to the old names, and be a context manager."""
    for name in _NAMES:
        if not hasattr(keras.Model, name):
            setattr(keras.Model, name, _Forwarded(name, warns=True))
    for name in ("__enter__", "__exit__"):
        if not hasattr(keras.Model, name):
            setattr(keras.Model, name, _Forwarded(name, warns=False))

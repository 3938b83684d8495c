"""Saving a model where several workers may write one file: whole, or not at all."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import keras

_METHODS = ("save", "save_weights")


def save_whole(model: keras.Model) -> None:
    """Let a model's `save` and `save_weights` replace a file only by one that is complete.

    Every worker runs the whole script. Workers of one machine that wrote the same file together
    would spoil it; the last one to finish wins now. Callbacks save by these methods, too.
    """
    for name in _METHODS:
        setattr(model, name, _whole(getattr(model, name)))


def _whole(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def save(filepath: Any, overwrite: bool = True, *args: Any, **keywords: Any) -> Any:
        path = _local_path(filepath)
        is_new = overwrite or not os.path.exists(path)  # else Keras has a question
        if not path or not is_new or os.path.isdir(path) or keywords.get("zipped") is False:
            return alone(filepath, overwrite, *args, **keywords)
        target = os.path.dirname(os.path.abspath(path))
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as folder:
            result = alone(os.path.join(folder, os.path.basename(path)), True, *args, **keywords)
            for file in sorted(os.listdir(folder)):  # several, where weights are saved in shards
                os.replace(os.path.join(folder, file), os.path.join(target, file))
        return result

    return save


def _local_path(filepath: Any) -> str:
    """Return a path in an existing folder of this machine; empty: it is none."""
    if not isinstance(filepath, str | os.PathLike):
        return ""
    path = os.fspath(filepath)
    is_local = isinstance(path, str) and "://" not in path
    return str(path) if is_local and os.path.isdir(os.path.dirname(os.path.abspath(path))) else ""

"""Saves a distributed model: only one worker writes the file, with the weights of the PS."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from thinwire.worker.temporary import is_temporary

#: Function that loads the run's state into a model within a `with` block, which yields True if this
#: worker writes the file. Its argument is True if no other worker can write to the saved file. This
#: worker then writes the file even if another worker writes the run's files.
Saving = Callable[[bool], contextlib.AbstractContextManager[bool]]


def save_once(model: keras.Model, saving: Saving) -> None:
    """Patch `save`, `save_weights` and `export` of a model so that only one worker writes files.

    Every worker runs the whole script, so the scripts and callbacks of all workers call the model's
    saving methods. The patched methods `save` and `save_weights` replace the file atomically, so
    that no reader gets half a file.
    """
    for name in ("save", "save_weights"):
        setattr(model, name, _once(_whole(getattr(model, name)), saving))
    model.export = _once(model.export, saving)


def is_own_file(path: Any) -> bool:
    """Return True if a saved file belongs to this worker alone: an open file or temporary path."""
    if not isinstance(path, str | os.PathLike):
        return True
    name = os.fspath(path)
    return isinstance(name, str) and "://" not in name and is_temporary(name)


def _once(alone: Callable[..., Any], saving: Saving) -> Callable[..., Any]:
    @functools.wraps(alone)
    def save(filepath: Any, *args: Any, **keywords: Any) -> Any:
        with saving(is_own_file(filepath)) as writes:
            return alone(filepath, *args, **keywords) if writes else None

    return save


def _whole(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def save(filepath: Any, overwrite: bool = True, *args: Any, **keywords: Any) -> Any:
        path = _local_path(filepath)
        # If a file exists and `overwrite` is False, Keras prompts the user before it overwrites.
        is_new = overwrite or not os.path.exists(path)
        if not path or not is_new or os.path.isdir(path) or keywords.get("zipped") is False:
            return alone(filepath, overwrite, *args, **keywords)
        target = os.path.dirname(os.path.abspath(path))
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as folder:
            result = alone(os.path.join(folder, os.path.basename(path)), True, *args, **keywords)
            # Keras may save the weights of a large model in several files
            for file in sorted(os.listdir(folder)):
                os.replace(os.path.join(folder, file), os.path.join(target, file))
        return result

    return save


def _local_path(filepath: Any) -> str:
    """Return a path as a string if its folder exists locally; else an empty string."""
    if not isinstance(filepath, str | os.PathLike):
        return ""
    path = os.fspath(filepath)
    is_local = isinstance(path, str) and "://" not in path
    return str(path) if is_local and os.path.isdir(os.path.dirname(os.path.abspath(path))) else ""

"""Makes one worker write TensorFlow's own checkpoints, with the weights of the shards.

`tf.train.Checkpoint` and `tf.train.CheckpointManager` belong to no model, so their classes are
patched for the whole process. On workers that write no checkpoints, the patched classes return
paths and number checkpoints as usual, but change no file. All workers restore checkpoints from the
files that the writing worker saved.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from thinwire.script.keras.files import is_own_file
from thinwire.script.keras.session import ModelSession
from thinwire.worker.script import RECORD

#: True, in one thread, while TensorFlow's checkpoint functions must not change files.
_IS_SILENT = contextvars.ContextVar("is_silent", default=False)
#: TensorFlow functions by which a `CheckpointManager` lists its checkpoints in a file or removes
#: old checkpoints.
_OF_MANAGERS = ("update_checkpoint_state_internal", "_delete_file_if_exists")


def write_checkpoints_once(writes: Callable[[], bool]) -> None:
    """Let only one worker of the run write TensorFlow's own checkpoints.

    Args:
        writes: Function that returns True if this process writes those checkpoints that contain no
            model and no optimizer of a worker.
    """
    _guard_classes()
    _WRITES[:] = [writes]


_WRITES: list[Callable[[], bool]] = []


@functools.cache
def _guard_classes() -> None:
    """Patch the functions of TensorFlow that write checkpoints, once per process."""
    tf.train.Checkpoint._write = _once(tf.train.Checkpoint._write)
    module = sys.modules[tf.train.CheckpointManager.__module__]
    for name in _OF_MANAGERS:
        setattr(module, name, _unless_silent(getattr(module, name)))


def _once(alone: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `Checkpoint._write` that writes files on one worker only.

    All methods of `tf.train.Checkpoint` that save call `_write`.
    """

    @functools.wraps(alone)
    def write(checkpoint: Any, file_prefix: Any, options: Any = None) -> Any:
        is_own = is_own_file(file_prefix)
        with _saving(checkpoint, is_own) as writes:
            if writes:
                return alone(checkpoint, file_prefix, options)
            path = os.fspath(file_prefix)
            callbacks = None if options is None else options.experimental_write_callbacks
            for callback in callbacks or ():
                # If no checkpoint file is written, only the callback of a `CheckpointManager` is
                # called, because it counts the manager's checkpoints. A callback of the script is
                # not called, because it may read the file.
                if callback.__module__.startswith("tensorflow."):
                    contextvars.copy_context().run(_call_silently, callback, path)
            return path

    return write


@contextlib.contextmanager
def _saving(checkpoint: Any, is_own: bool) -> Iterator[bool]:
    """Load the shards' state into a checkpoint's objects; yield True if this worker writes them."""
    tracked = {id(tracked) for tracked in tf.train.TrackableView(checkpoint).descendants()}
    for session in reversed(RECORD.sessions):  # the newest session first
        if isinstance(session, ModelSession) and session.holds(tracked):
            with session.checkpointing(is_own) as is_writer:
                yield is_writer
            return
    yield is_own or _WRITES[0]()


def _call_silently(callback: Callable[[str], object], path: str) -> None:
    _IS_SILENT.set(True)
    callback(path)


def _unless_silent(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def call(*args: Any, **keywords: Any) -> Any:
        return None if _IS_SILENT.get() else alone(*args, **keywords)

    return call

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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from thinwire.script.keras.files import is_own_file

if TYPE_CHECKING:
    from thinwire.script.keras.session import ModelSession


#: True, in one thread, while TensorFlow's checkpoint functions must not change files.
_IS_SILENT = contextvars.ContextVar("is_silent", default=False)
#: TensorFlow functions by which a `CheckpointManager` lists its checkpoints in a file or removes
#: old checkpoints.
_OF_MANAGERS = ("update_checkpoint_state_internal", "_delete_file_if_exists")


def write_checkpoints_once(
    workers: Callable[[], Sequence[ModelSession]], writes: Callable[[], bool]
) -> None:
    """Let only one worker of the run write TensorFlow's own checkpoints.

    Args:
        workers: Function that returns the sessions with the servers of all models in this process
            that train as workers, the newest last.
        writes: Function that returns True if this process writes those checkpoints that contain no
            model and no optimizer of a worker.
    """
    _guard_classes()
    _WORKERS[:] = [(workers, writes)]


_WORKERS: list[tuple[Callable[[], Sequence[ModelSession]], Callable[[], bool]]] = []


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
    workers, writes = _WORKERS[0]
    tracked = {id(tracked) for tracked in tf.train.TrackableView(checkpoint).descendants()}
    worker = next((worker for worker in reversed(workers()) if worker.holds(tracked)), None)
    if worker is None:
        yield is_own or writes()
        return
    with worker.checkpointing(is_own) as is_writer:
        yield is_writer


def _call_silently(callback: Callable[[str], object], path: str) -> None:
    _IS_SILENT.set(True)
    callback(path)


def _unless_silent(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def call(*args: Any, **keywords: Any) -> Any:
        return None if _IS_SILENT.get() else alone(*args, **keywords)

    return call

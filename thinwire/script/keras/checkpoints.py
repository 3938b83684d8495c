"""TensorFlow's own checkpoints: one worker writes them, with what the PS holds.

`tf.train.Checkpoint` and `tf.train.CheckpointManager` belong to no model, so they are changed as
classes, for this process. On the other workers they count, number and return what they do alone,
and touch no file: what they restore is the writer's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from thinwire.script.keras.saving import SavingWorker, is_own_file


class CheckpointingWorker(Protocol):
    """The worker behind what a checkpoint holds."""

    def holds(self, tracked: Collection[int]) -> bool:
        """Return whether a model or an optimizer of it is among these, by identity."""

    def checkpointing(self) -> SavingWorker:
        """Bring the model up to date, as far as that is due; return what saves it."""


#: What functions of TensorFlow that change files look at, by thread.
_STATE = threading.local()
#: The functions by which a manager lists its checkpoints in a file, and removes old ones.
_OF_MANAGERS = ("update_checkpoint_state_internal", "_delete_file_if_exists")


def write_checkpoints_once(
    workers: Callable[[], Sequence[CheckpointingWorker]], writes: Callable[[], bool]
) -> None:
    """Let one worker write the checkpoints of all.

    Args:
        workers: Returns those of this process, the newest last.
        writes: Whether this process writes what belongs to none of them.
    """
    _guard_classes()
    _WORKERS[:] = [(workers, writes)]


_WORKERS: list[tuple[Callable[[], Sequence[CheckpointingWorker]], Callable[[], bool]]] = []


@functools.cache
def _guard_classes() -> None:
    """Replace what writes, once for the process."""
    tf.train.Checkpoint._write = _once(tf.train.Checkpoint._write)
    module = sys.modules[tf.train.CheckpointManager.__module__]
    for name in _OF_MANAGERS:
        setattr(module, name, _unless_silent(getattr(module, name)))


def _once(alone: Callable[..., Any]) -> Callable[..., Any]:
    """Return Checkpoint's method through which all of its writing goes, for one worker."""

    @functools.wraps(alone)
    def write(checkpoint: Any, file_prefix: Any, options: Any = None) -> Any:
        is_own = is_own_file(file_prefix)
        with _saving(checkpoint, is_own) as writes:
            if writes:
                return alone(checkpoint, file_prefix, options)
            path = os.fspath(file_prefix)
            given = None if options is None else options.experimental_write_callbacks
            with _silent():
                for callback in given or ():
                    if callback.__module__.startswith("tensorflow."):  # of a manager
                        callback(path)
            return path

    return write


@contextlib.contextmanager
def _saving(checkpoint: Any, is_own: bool) -> Iterator[bool]:
    """Have what a checkpoint holds as it is to be saved; yields whether this worker writes."""
    workers, writes = _WORKERS[0]
    tracked = {id(each) for each in tf.train.TrackableView(checkpoint).descendants()}
    found = next((each for each in reversed(workers()) if each.holds(tracked)), None)
    if found is None:
        yield is_own or writes()
        return
    with found.checkpointing().saving(is_own) as is_writer:
        yield is_writer


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    _STATE.is_silent = True
    try:
        yield
    finally:
        _STATE.is_silent = False


def _unless_silent(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def call(*args: Any, **keywords: Any) -> Any:
        return None if getattr(_STATE, "is_silent", False) else alone(*args, **keywords)

    return call

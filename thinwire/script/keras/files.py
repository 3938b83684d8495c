"""Makes Keras callbacks write files on one worker only, while they run on all workers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from thinwire.script.keras.saving import is_own_file
from thinwire.worker.held_files import was_kept


def listed(callbacks: Any) -> list[Any]:
    """Return the callbacks that the script passes to `fit` as a flat list.

    Args:
        callbacks: One callback, a nested structure of callbacks, a CallbackList or None.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return [] if callbacks is None else keras.tree.flatten(callbacks)


@contextlib.contextmanager
def writing_once(callbacks: Sequence[Any], writes: Callable[[], bool]) -> Iterator[None]:
    """Let Keras' callbacks write their files during one `fit` only on the worker that `writes`.

    On workers that do not write, a callback does everything as usual, but its files are discarded.
    A file in a temporary folder is written by every worker. ModelCheckpoint saves by methods of the
    model, which `thinwire.script.keras.saving` patches.

    Args:
        callbacks: Callbacks of the `fit`. Only CSVLogger, TensorBoard, BackupAndRestore,
            RemoteMonitor and their subclasses are patched, until the `fit` ends.
        writes: Function that returns True if this worker writes the files of the run.
    """
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            for name, value in _silenced(callback, writes, stack).items():
                stack.callback(_replace(callback, name, value))
        yield


def _silenced(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Return the attributes that a callback of a worker has in a `fit` instead of its own."""
    match callback:
        case keras.callbacks.CSVLogger():
            if not (writes() or is_own_file(callback.filename)):
                return {"filename": os.devnull}
            # If this process replaces the chief worker, the previous chief began the log file in
            # this `fit`. Without `append`, CSVLogger would truncate the log file.
            return {"append": True} if was_kept(callback.filename) else {}
        case keras.callbacks.TensorBoard() if not (writes() or is_own_file(callback.log_dir)):
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            return {"log_dir": stack.enter_context(folder)}
        # all workers read the backup, but only one saves and deletes it
        case keras.callbacks.BackupAndRestore() if not is_own_file(callback.backup_dir):
            save = callback._save_model
            saving = {"_save_model": lambda: save() if writes() else None}
            return saving if writes() else {**saving, "delete_checkpoint": False}
        case keras.callbacks.RemoteMonitor() if not writes():
            return {"on_epoch_end": lambda epoch, logs=None: None}
    return {}


def _replace(callback: Any, name: str, value: Any) -> Callable[[], object]:
    """Set an attribute of a callback; return a function that restores the attribute's old value."""
    attributes = vars(callback)
    had, before = name in attributes, attributes.get(name)
    setattr(callback, name, value)
    return lambda: setattr(callback, name, before) if had else delattr(callback, name)

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

_Restore = Callable[[], object]


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
            for kind, silence in _SILENCED:
                if isinstance(callback, kind):
                    for restore in silence(callback, writes, stack):
                        stack.callback(restore)
        yield


def _silence_log(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> Iterator[_Restore]:
    if not (writes() or is_own_file(callback.filename)):
        yield _replace(callback, "filename", os.devnull)
    elif was_kept(callback.filename):
        # This process replaces the chief worker, and the previous chief began the log file in this
        # `fit`. Without `append`, CSVLogger would truncate the log file.
        yield _replace(callback, "append", True)


def _silence_board(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> Iterator[_Restore]:
    if not (writes() or is_own_file(callback.log_dir)):
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        yield _replace(callback, "log_dir", folder)


def _silence_backup(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> Iterator[_Restore]:
    """Let BackupAndRestore read its backup on all workers, but save and delete it on one only."""
    if is_own_file(callback.backup_dir):
        return
    save = callback._save_model
    yield _replace(callback, "_save_model", lambda: save() if writes() else None)
    if not writes():
        yield _replace(callback, "delete_checkpoint", False)


def _silence_monitor(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> Iterator[_Restore]:
    if not writes():
        yield _replace(callback, "on_epoch_end", lambda epoch, logs=None: None)


def _replace(callback: Any, name: str, value: Any) -> _Restore:
    """Set an attribute of a callback; return a function that restores the attribute's old value."""
    attributes = vars(callback)
    had, before = name in attributes, attributes.get(name)
    setattr(callback, name, value)
    return lambda: setattr(callback, name, before) if had else delattr(callback, name)


_SILENCED: tuple[tuple[type, Callable[..., Iterator[_Restore]]], ...] = (
    (keras.callbacks.CSVLogger, _silence_log),
    (keras.callbacks.TensorBoard, _silence_board),
    (keras.callbacks.BackupAndRestore, _silence_backup),
    (keras.callbacks.RemoteMonitor, _silence_monitor),
)

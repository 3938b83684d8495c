"""Callbacks of Keras that write files of their own: one worker's do, the others' keep going."""

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
    """Return callbacks, which `fit` takes as one, as several, or as a CallbackList."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return [] if callbacks is None else keras.tree.flatten(callbacks)


@contextlib.contextmanager
def writing_once(callbacks: Sequence[Any], writes: Callable[[], bool]) -> Iterator[None]:
    """Let callbacks write their files, during one `fit`, only where `writes()`.

    They do everything else as always, subclasses too: what a callback of another worker writes goes
    nowhere. Files in temporary folders are each worker's own. ModelCheckpoint saves by the model's
    methods, see `thinwire.script.keras.saving`.

    Args:
        callbacks: Of the fit; others than those of Keras that write are left alone.
        writes: Whether this worker writes.
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
    del stack
    if not (writes() or is_own_file(callback.filename)):
        yield _replace(callback, "filename", os.devnull)
    elif was_kept(callback.filename):  # the chief before this process has begun it, in this `fit`
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
    """It reads its files on every worker; the one that writes also deletes them."""
    del stack
    if is_own_file(callback.backup_dir):
        return
    save = callback._save_model
    yield _replace(callback, "_save_model", lambda: save() if writes() else None)
    if not writes():
        yield _replace(callback, "delete_checkpoint", False)


def _silence_monitor(
    callback: Any, writes: Callable[[], bool], stack: contextlib.ExitStack
) -> Iterator[_Restore]:
    del stack
    if not writes():
        yield _replace(callback, "on_epoch_end", lambda epoch, logs=None: None)


def _replace(callback: Any, name: str, value: Any) -> _Restore:
    """Give a callback another attribute for a while."""
    own = vars(callback)
    had, before = name in own, own.get(name)
    setattr(callback, name, value)
    return lambda: setattr(callback, name, before) if had else delattr(callback, name)


_SILENCED: tuple[tuple[type, Callable[..., Iterator[_Restore]]], ...] = (
    (keras.callbacks.CSVLogger, _silence_log),
    (keras.callbacks.TensorBoard, _silence_board),
    (keras.callbacks.BackupAndRestore, _silence_backup),
    (keras.callbacks.RemoteMonitor, _silence_monitor),
)

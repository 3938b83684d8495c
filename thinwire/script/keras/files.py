"""Makes one worker write a script's files, while the scripts of all workers run in full.

Every worker runs the whole script, so the scripts and callbacks of all workers call the model's
saving methods and write logs. Only one worker writes the files, a saved model with the weights of
the PS.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from thinwire.worker.held_files import was_kept
from thinwire.worker.temporary import is_temporary

#: Function that loads the run's state into a model within a `with` block, which yields True if this
#: worker writes the file. Its argument is True if no other worker can write to the saved file. This
#: worker then writes the file even if another worker writes the run's files.
Saving = Callable[[bool], contextlib.AbstractContextManager[bool]]


def save_once(model: keras.Model, saving: Saving) -> None:
    """Patch `save`, `save_weights` and `export` of a model so that only one worker writes files.

    The patched methods `save` and `save_weights` replace the file atomically, so
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
    model, which `save_once` patches.

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

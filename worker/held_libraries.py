"""Protects a run's files from native libraries (TensorFlow, h5py, torch); shares Keras downloads.

The module `thinwire.worker.held_python` protects a run's files from Python's own functions.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, NoReturn

from thinwire.worker.held_files import HeldFiles, held_files, new_sink
from thinwire.worker.held_python import replace_everywhere


def hold_tensorflow() -> None:
    """Protect the run's files from `tf.io.gfile`; TensorFlow must be imported before."""
    from tensorflow import errors
    from tensorflow.python.lib.io import _pywrap_file_io

    for held in held_files():
        _hold_native(held, _pywrap_file_io, errors.AlreadyExistsError)


def hold_h5py(h5py: Any) -> None:
    """Protect the run's files from the imported module `h5py`."""
    for held in held_files():
        _hold_h5py(held, h5py)


def hold_torch(torch: Any) -> None:
    """Protect the run's files from `torch.save` of the imported module `torch`."""
    for held in held_files():
        _hold_torch(held, torch)


def share_downloads(file_utils: Any) -> None:
    """Share downloads among this host's processes; needs Keras' imported module `file_utils`."""
    for held in held_files():
        original = file_utils.get_file
        file_utils.get_file = held.downloads.share(original)
        # The module keras.utils is already imported, so it holds the original `get_file` by name.
        if "keras.utils" in sys.modules:
            replace_everywhere([(original, file_utils.get_file)])


def _raise(function: Any, path: str, error: OSError) -> NoReturn:
    raise error


def _hold_native(held: HeldFiles, native: Any, exists: type[Exception]) -> None:
    """Protect the run's files from the native module that implements all of `tf.io.gfile`."""
    delete, clear, rename = native.DeleteFile, native.DeleteRecursively, native.RenameFile
    create, copy, open_writable = native.CreateDir, native.CopyFile, native.WritableFile

    def delete_file(path: Any) -> Any:
        if held.keeps(path, follow=False):
            return held.hold(path, follow=False)
        return delete(path)

    def delete_recursively(path: Any) -> Any:
        if held.keeps_within(path):
            return held.clear(os.fsdecode(path), _raise)
        return clear(path)

    def rename_file(source: Any, target: Any, overwrite: bool) -> Any:
        if not held.move(os.fsdecode(source), os.fsdecode(target)):
            return rename(source, target, overwrite)
        return None

    def create_folder(path: Any) -> Any:
        return held.make_folder(os.fsdecode(path), lambda: create(path), exists)

    def copy_file(source: Any, target: Any, overwrite: bool) -> Any:
        if held.keeps(target):
            return held.hold(target)
        return copy(source, target, overwrite)

    def open_file(path: Any, mode: Any) -> Any:
        if held.diverts(path, os.fsdecode(mode)):
            path = os.fsencode(new_sink())
        else:
            held.note_opening(path)
        return open_writable(path, mode)

    native.DeleteFile, native.DeleteRecursively = delete_file, delete_recursively
    native.RenameFile, native.CreateDir = rename_file, create_folder
    native.CopyFile, native.WritableFile = copy_file, open_file


def _hold_torch(held: HeldFiles, torch: Any) -> None:
    save = torch.save

    @functools.wraps(save)
    def save_once(obj: Any, f: Any, *args: Any, **keywords: Any) -> Any:
        # torch opens a path by native code, and a file object was opened by Python's `open`
        if isinstance(f, str | os.PathLike):
            if held.diverts(f, "wb"):
                f = new_sink()
            else:
                held.note_opening(f)
        return save(obj, f, *args, **keywords)

    torch.save = torch.serialization.save = save_once


def _hold_h5py(held: HeldFiles, h5py: Any) -> None:
    begin = h5py.File.__init__

    @functools.wraps(begin)
    def begin_file(self: Any, name: Any, mode: str = "r", *args: Any, **keywords: Any) -> None:
        if isinstance(name, str | bytes | os.PathLike):
            if held.diverts(name, mode):
                name = new_sink()
            elif mode != "r":
                held.note_opening(name)
        begin(self, name, mode, *args, **keywords)

    h5py.File.__init__ = begin_file

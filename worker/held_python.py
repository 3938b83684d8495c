"""Protects a run's files from Python's own file functions, in the whole process.

The protection intercepts deletions by `os.remove`, `Path.unlink`, `shutil.rmtree` and `os.rename`
over a file, and truncations by `open(path, "w")` and `os.truncate`. An audit hook rejects all other
deletions and truncations of protected files by Python code with a PermissionError.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.worker.held_files import (
    HeldFiles,
    held_files,
    in_folder,
    is_empty,
    new_sink,
    whole_path,
)
from thinwire.worker.written_files import WrittenFiles

_Function = Callable[..., Any]


def hold_back(
    run_dir: pathlib.Path,
    node: str,
    began: float,
    is_chief: Callable[[], bool],
    is_first: bool,
) -> None:
    """Start to protect the run's files from this process.

    Args:
        run_dir: Path of the training run's directory (--run_dir) on this host.
        node: Name of this process, for example ``worker-2`` or ``evaluator``.
        began: Time at which the training run began, in seconds since 1970.
        is_chief: Function that returns True if this worker is the chief now, which writes the run's
            files.
        is_first: True if the present process is the first process of its worker in this run.
    """
    written, is_first_chief = WrittenFiles(run_dir, node, is_chief), is_first and is_chief()
    held = HeldFiles(run_dir, began, written, is_first_chief)
    if is_first:
        written.begin_run(is_first_chief)
    held_files().append(held)
    _hold_python(held)


def _hold_python(held: HeldFiles) -> None:
    """Replace Python's file functions and install the audit hook in this process."""
    replace_everywhere([(original, _InPlace(held, original)) for original in _REPLACEMENTS])
    # The hook uses no global of this module: Python still calls audit hooks while the interpreter
    # shuts down, after it has cleared the globals of modules.
    writing, decode, paths = os.O_WRONLY | os.O_RDWR, os.fsdecode, (str, bytes, os.PathLike)
    watched = ("os.mkdir", "os.remove", "os.rename", "os.truncate")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in watched:
            held.take_event(event, arguments)
        elif event == "open" and isinstance(arguments[0], paths):
            flags = arguments[2]
            if isinstance(flags, int) and flags & writing:
                held.take_open(decode(arguments[0]), flags)

    sys.addaudithook(hook)
    atexit.register(held.report)


class _InPlace:
    """Replacement of a built-in function which, like a built-in, binds to no instance."""

    def __init__(self, held: HeldFiles, original: Any) -> None:
        functools.update_wrapper(self, original)
        self._held, self._original, self._function = held, original, _REPLACEMENTS[original]
        for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
            if original in (able := getattr(os, name)):
                able.add(self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(self._held, self._original, *args, **keywords)


def replace_everywhere(places: Sequence[tuple[Any, _Function]]) -> None:
    """Replace each pair's first function by its second function in all imported modules.

    All imported modules are searched, because a module may have imported a replaced function by
    name. One pass over the modules replaces all pairs, because TensorFlow alone imports thousands
    of modules with half a million names.
    """
    # Compare functions by identity, because the objects in a module may be unhashable.
    replacements = {id(original): function for original, function in places}
    for name, module in list(sys.modules.items()):
        # The import system and the modules of `thinwire.worker` keep Python's original file
        # functions.
        if name.startswith(("importlib", "_frozen", "posix", "thinwire.worker.")):
            continue
        with contextlib.suppress(Exception):
            for key, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, key, replacements[id(value)])


# -- the replacements -----------------------------------------------------------------------------


def _open(
    held: HeldFiles, original: _Function, file: Any, mode: str = "r", *args: Any, **keywords: Any
) -> Any:
    if held.is_active and isinstance(mode, str) and held.diverts(file, mode):
        file = new_sink()
    return original(file, mode, *args, **keywords)


def _open_descriptor(
    held: HeldFiles, original: _Function, path: Any, flags: int, mode: int = 0o777, **folder: Any
) -> Any:
    if held.is_active and flags & (os.O_TRUNC | os.O_EXCL):
        place = in_folder(path, folder.get("dir_fd"))
        how = "x" if flags & os.O_EXCL else "w"
        # An empty file may be a lock file, which several processes open with O_TRUNC. All of
        # them must lock the same file, so opening it is not diverted to a temporary file.
        if (how == "x" or not is_empty(place)) and held.diverts(place, how):
            return original(new_sink(), flags | os.O_CREAT, mode)
    return original(path, flags, mode, **folder)


def _remove(held: HeldFiles, original: _Function, path: Any, *, dir_fd: int | None = None) -> Any:
    place = in_folder(path, dir_fd) if held.is_active else path
    if held.keeps(place, follow=False) and not os.path.isdir(place):
        return held.hold(place, follow=False)
    return original(path, dir_fd=dir_fd)


def _rename(held: HeldFiles, original: _Function, src: Any, dst: Any, **folders: Any) -> Any:
    source = in_folder(src, folders.get("src_dir_fd"))
    if held.is_active and held.move(source, in_folder(dst, folders.get("dst_dir_fd"))):
        return None
    return original(src, dst, **folders)


def _truncate(held: HeldFiles, original: _Function, path: Any, length: int) -> Any:
    if not isinstance(path, int) and held.keeps(path):
        return held.hold(path)
    return original(path, length)


def _mkdir(
    held: HeldFiles, original: _Function, path: Any, mode: int = 0o777, *, dir_fd: int | None = None
) -> Any:
    place = whole_path(os.fsdecode(in_folder(path, dir_fd)))
    if held.is_active and place in held.gone and os.path.isdir(place):
        held.gone.discard(place)
        return None
    return held.make_folder(place, lambda: original(path, mode, dir_fd=dir_fd), FileExistsError)


def _rmdir(held: HeldFiles, original: _Function, path: Any, *, dir_fd: int | None = None) -> Any:
    place = os.fsdecode(in_folder(path, dir_fd))
    whole = whole_path(place)
    if held.is_active and os.path.isdir(place) and not os.path.islink(place):
        entries = [os.path.join(place, name) for name in os.listdir(place)]
        are_gone = all(whole_path(entry, follow=False) in held.gone for entry in entries)
        if are_gone and (entries or held.keeps(place)):
            held.gone.add(whole)
            return None
    removed = original(path, dir_fd=dir_fd)
    held.folders.forget(whole)
    return removed


def _rmtree(held: HeldFiles, original: _Function, path: Any, *args: Any, **keywords: Any) -> Any:
    name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    is_folder = bool(name) and os.path.isdir(name) and not os.path.islink(name)
    if not held.is_active or not is_folder or keywords.get("dir_fd") is not None:
        return original(path, *args, **keywords)
    ignores = bool(args[0]) if args else bool(keywords.get("ignore_errors"))
    onerror = keywords.get("onerror", args[1] if len(args) > 1 else None)
    onexc = keywords.get("onexc")

    def on_error(function: _Function, place: str, error: OSError) -> None:
        if ignores:
            return
        if onexc is not None:
            onexc(function, place, error)
        elif onerror is not None:
            onerror(function, place, sys.exc_info())
        else:
            raise error

    held.clear(name, on_error)
    return None


#: Maps each replaced function to its replacement, which also takes the HeldFiles and the original.
_REPLACEMENTS: dict[_Function, _Function] = {
    builtins.open: _open,
    os.open: _open_descriptor,
    os.remove: _remove,
    os.unlink: _remove,
    os.rename: _rename,
    os.replace: _rename,
    os.truncate: _truncate,
    os.mkdir: _mkdir,
    os.rmdir: _rmdir,
    shutil.rmtree: _rmtree,
}

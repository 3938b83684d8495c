"""Protects the files that a run has written from deletion by processes that start later.

A script often clears its output folder in its first lines. Without Thinwire, a script clears its
output folder once, before training. In a run, every worker and the evaluator execute the script,
and a process that starts late would clear the folder during training. Therefore a process protects
all files written since the run began, from before the script's first line until it trains with the
other workers. Deleting or truncating a protected file has no effect, the script continues, and one
log line names the file. A file of the run is not protected if this worker has written it and the
chief has not. The first process of the first chief (the worker that writes the run's files)
protects no files, unless other workers already train.

The protection intercepts deletions by `os.remove`, `Path.unlink`, `shutil.rmtree`, `os.rename` over
a file and their equivalents in `tf.io.gfile`. The protection intercepts truncations by `open(path,
"w")`, `os.truncate` and `h5py.File(path, "w")`. An audit hook rejects all other deletions and
truncations of protected files by Python code with a PermissionError. Deletions of protected files
by native code or by a child process are not intercepted.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import functools
import math
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from thinwire.runtime.run.script_settings import SETTINGS_FOLDER, TRAINING
from thinwire.worker.downloads import Downloads
from thinwire.worker.made_folders import MadeFolders
from thinwire.worker.temporary import is_temporary
from thinwire.worker.written_files import WrittenFiles, watch_opens

#: Folders of the run directory in which Thinwire's own processes write; files in these folders are
#: not protected.
_OF_NODES = ("settings", "logs", "tb", "measure", "checkpoints", "locks")
_NAMED = 3  # largest number of protected files that one log line names
_NAMES_OF_REMOVE = ("remove", "unlink")
_NAMES_OF_RENAME = ("rename", "replace")
_OnError = Callable[[Callable[..., Any], str, OSError], None]


class HeldFiles:
    """Intercepts deletions and truncations by this process, and protects files of the run.

    Args:
        run_dir: Path of the training run's directory (--run_dir) on this host.
        began: Time at which the training run began, in seconds since 1970.
        written: Lists of the files that this process and the chief worker have written.
        is_first_chief: True if this process is the first process of the first chief, the worker
            that writes the run's files.

    Attributes:
        downloads: List of the files that the processes of this host have downloaded in this run.
    """

    def __init__(
        self, run_dir: pathlib.Path, began: float, written: WrittenFiles, is_first_chief: bool
    ) -> None:
        self._began, self._written, self._is_first_chief = began, written, is_first_chief
        self._training = run_dir / SETTINGS_FOLDER / TRAINING
        self.downloads = Downloads(run_dir / SETTINGS_FOLDER, began)
        whole = os.path.realpath(run_dir)
        self._of_nodes = tuple(os.path.join(whole, name) + os.sep for name in _OF_NODES)
        self._is_active, self._lifted_at = True, math.inf
        self._gone: set[str] = set()  # protected paths that the script has "deleted" without effect
        self._folders = MadeFolders(began)
        self._unnamed: list[str] = []  # protected files that no log line has named yet
        self._is_collecting = True  # True until the script calls `thinwire.distribute`
        self._originals: dict[str, Callable[..., Any]] = {}
        self._sinks: list[str] = []

    # -- protected files ------------------------------------------------------------------------

    def note_opening(self, path: Any) -> None:
        """Record that native code opens a file for writing, unless the file is protected."""
        name = os.fsdecode(path)
        if "://" not in name and not self.keeps(name):
            self._written.note(_whole(name), self._trains)

    def begin_run(self) -> None:
        """Remove an earlier run's lists of written files from the run directory."""
        self._written.begin_run(self._is_first_chief)

    def keeps(self, path: Any, follow: bool = True) -> bool:
        """Return True if another process wrote a path in this run, so that the path is protected.

        Args:
            path: Path of a file or folder, as the script gives the path.
            follow: True to check the target if `path` is a symbolic link, False to check the link
                itself.
        """
        return self._is_active and self._is_others(path, follow)

    def was_kept(self, path: Any) -> bool:
        """Return True if a file was protected until this process trained with the other workers."""
        return self._is_others(path, follow=True)

    def _is_others(self, path: Any, follow: bool) -> bool:
        if self._leads or not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        try:
            status = os.stat(name) if follow else os.lstat(name)
        except (OSError, ValueError):
            return False
        is_folder = stat.S_ISDIR(status.st_mode)
        if not (is_folder or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return False
        # Use st_ctime in addition to st_mtime, because a copied file may keep the st_mtime of its
        # original.
        changed_at = max(status.st_mtime, status.st_ctime)
        if not self._began <= changed_at <= self._lifted_at:
            return False
        whole = _whole(name, follow)
        if "__pycache__" in whole or whole.startswith(self._of_nodes) or is_temporary(whole):
            return False
        return not (self._folders.is_own(whole) if is_folder else self._written.is_own(whole))

    @property
    def _leads(self) -> bool:
        """True if this is the first process of the first chief and no other worker trains yet."""
        return self._is_first_chief and not self._has_training_begun

    @property
    def _has_training_begun(self) -> bool:
        try:
            return self._training.stat().st_mtime >= self._began
        except OSError:
            return False

    @property
    def _trains(self) -> bool:
        """True if this process trains with other workers, or starts the run as its first chief."""
        return not self._is_active or self._leads

    def _take_open(self, path: str, flags: int) -> None:
        """Record a file that Python opens for writing; reject truncation of a protected file.

        The audit hook calls the method `_take_open` whenever Python opens a file. Most truncations
        of protected files have already been diverted to temporary files before the hook is called.
        """
        whole = _whole(path)
        if whole.startswith(self._of_nodes):
            return
        is_there, truncates = os.path.lexists(whole), bool(flags & os.O_TRUNC)
        is_lock = truncates and is_there and _is_empty(whole)
        if truncates and not is_lock and self.keeps(path):
            raise self._refusal(path)
        if self._trains or not is_there or (truncates and not is_lock):
            self._written.note(whole, self._trains)

    def _take_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Reject changes of protected files that bypassed the replaced functions (audit hook)."""
        if event == "os.mkdir":
            if not os.path.lexists(arguments[0]):
                self._folders.add_own(_whole(os.fsdecode(arguments[0])))
            return
        targets = {"os.remove": arguments[:1], "os.truncate": arguments[:1]}
        folders = {"os.remove": arguments[-1:], "os.rename": arguments[-2:]}.get(event, (-1, -1))
        paths = targets.get(event, arguments[:2])
        for path, folder in zip(paths, folders, strict=False):
            if isinstance(path, int):
                continue
            name = _in_folder(path, None if folder == -1 else folder)
            if self.keeps(name, follow=event == "os.truncate") and not os.path.isdir(name):
                raise self._refusal(name)
        if event == "os.rename":
            self._written.note(_whole(os.fsdecode(_in_folder(arguments[1], None))), self._trains)

    def _refusal(self, path: Any) -> PermissionError:
        text = (
            "this process would delete or truncate a file that another process has written since "
            "the run began; delete or truncate files only under `if thinwire.is_chief():`"
        )
        return PermissionError(errno.EACCES, text, os.fsdecode(path))

    # -- the log line ---------------------------------------------------------------------------

    def hold(self, path: Any, follow: bool = True) -> None:
        """Record that the script has "deleted" a protected file (without effect); log its name.

        Args:
            path: Path of the file that the script deletes, as the script gives the path.
            follow: True to record the target if `path` is a symbolic link, False to record the link
                itself.
        """
        self._hold(path, follow)
        self._name()

    def _hold(self, path: Any, follow: bool = True) -> None:
        name = os.fsdecode(path)
        self._gone.add(_whole(name, follow))
        if name not in self._unnamed:
            self._unnamed.append(name)

    def report(self) -> None:
        """Log the protected files that the script has "deleted"; log each later one immediately."""
        self._is_collecting = False
        self._name()

    def _name(self) -> None:
        if self._is_collecting or not self._unnamed:
            return
        names, num_more = self._unnamed[:_NAMED], len(self._unnamed) - _NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        self._unnamed = []
        # At the start of a run, all processes clear the same files, which is expected. During
        # training, only a late process clears files, which is logged as a warning.
        level = logging.WARNING if self._has_training_begun else logging.INFO
        logging.log(
            level,
            "held back the deletion or truncation of files that another process has written since "
            "the run began: %s%s",
            ", ".join(names),
            more,
        )

    def lift(self) -> None:
        """End the protection of the run's files: this process now trains with the other workers."""
        if self._is_active:
            self.report()
            self._is_active, self._lifted_at = False, time.time()
            with contextlib.suppress(OSError):
                self._training.touch(mode=0o600)

    # -- replacements of Python's functions -----------------------------------------------------

    def install(self) -> None:
        """Replace Python's file functions and install the audit hooks in this process."""
        replaced: dict[str, tuple[Any, Callable[..., Any]]] = {
            "open": (builtins, self._open),
            "os.open": (os, self._open_descriptor),
            "os.rmdir": (os, self._rmdir),
            "os.mkdir": (os, self._mkdir),
            "os.truncate": (os, self._truncate),
            "shutil.rmtree": (shutil, self._rmtree),
        }
        replaced |= {f"os.{name}": (os, self._remover(name)) for name in _NAMES_OF_REMOVE}
        replaced |= {f"os.{name}": (os, self._renamer(name)) for name in _NAMES_OF_RENAME}
        places: list[tuple[Any, Callable[..., Any]]] = []
        for name, (module, function) in replaced.items():
            original = getattr(module, name.rpartition(".")[2])
            self._originals[name] = original
            places.append((original, _InPlace(original, function)))
        replace_everywhere(places)
        watched = ("os.mkdir", "os.remove", "os.rename", "os.truncate")
        take = self._take_event

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in watched:
                take(event, arguments)

        sys.addaudithook(hook)
        watch_opens(self._take_open)
        atexit.register(self.report)

    def _remover(self, name: str) -> Callable[..., Any]:
        def remove(path: Any, *, dir_fd: int | None = None) -> Any:
            if not self._is_active:
                return self._originals[f"os.{name}"](path, dir_fd=dir_fd)
            place = _in_folder(path, dir_fd)
            if self.keeps(place, follow=False) and not os.path.isdir(place):
                return self.hold(place, follow=False)
            return self._originals[f"os.{name}"](path, dir_fd=dir_fd)

        return remove

    def _renamer(self, name: str) -> Callable[..., Any]:
        def rename(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> Any:
            original = self._originals[f"os.{name}"]
            if not self._is_active:
                return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            source, target = _in_folder(src, src_dir_fd), _in_folder(dst, dst_dir_fd)
            if self.move(source, target):
                return None
            return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        return rename

    def move(self, source: Any, target: Any) -> bool:
        """Carry out the move of a file if its source or its target is protected.

        If the target of a move is a protected file, the target stays unchanged. A protected file at
        the source of a move is copied to the target instead.

        Returns:
            True if the move involved protected files; False if nothing was done.
        """
        is_kept = self.keeps(target, follow=False) and not os.path.isdir(target)
        keeps_source = self.keeps(source, follow=False) or self.keeps_within(source)
        if not (is_kept or keeps_source) or not os.path.lexists(source):
            return False
        if is_kept:
            self._hold(target, follow=False)
            if not keeps_source and not os.path.isdir(source):
                self._originals["os.remove"](source)
        elif os.path.isdir(source):
            for path in (os.fsdecode(source), *_entries_below(os.fsdecode(source))):
                if os.path.isdir(path):
                    self._gone.add(_whole(path))
                elif self.keeps(path, follow=False):
                    self._hold(path, follow=False)
            shutil.copytree(source, target, symlinks=True)
        else:
            self._hold(source, follow=False)
            shutil.copy2(source, target, follow_symlinks=False)
        self._name()
        return True

    def _truncate(self, path: Any, length: int) -> Any:
        if not isinstance(path, int) and self.keeps(path):
            return self.hold(path)
        return self._originals["os.truncate"](path, length)

    def _open(self, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        if self._is_active and isinstance(mode, str) and self.diverts(file, mode):
            file = self.sink()
        return self._originals["open"](file, mode, *args, **keywords)

    def diverts(self, file: Any, mode: str) -> bool:
        """Return True if writes to a protected file must go to a temporary file; log the file.

        A mode of `open` with "x" or "w-" creates a new file. An open that creates a file is
        diverted to a temporary file only if the script has "deleted" the protected file before. If
        the script has not "deleted" the file, an open that creates it fails as in Python.
        """
        creates = "x" in mode or "-" in mode
        if not ("w" in mode or creates) or isinstance(file, int) or not self.keeps(file):
            return False
        if creates and _whole(os.fsdecode(file)) not in self._gone:
            return False
        self.hold(file)
        return True

    def sink(self) -> str:
        """Return the path of a new temporary file, which receives writes to protected files."""
        descriptor, path = tempfile.mkstemp(prefix="thinwire-held-")
        os.close(descriptor)
        os.unlink(path)
        if not self._sinks:
            atexit.register(self._remove_sinks)
        self._sinks.append(path)
        return path

    def _remove_sinks(self) -> None:
        for path in self._sinks:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _open_descriptor(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        original = self._originals["os.open"]
        if self._is_active and flags & (os.O_TRUNC | os.O_EXCL):
            place = _in_folder(path, dir_fd)
            how = "x" if flags & os.O_EXCL else "w"
            # An empty file may be a lock file, which several processes open with O_TRUNC. All of
            # them must lock the same file, so opening it is not diverted to a temporary file.
            is_divertible = how == "x" or (flags & os.O_TRUNC and not _is_empty(place))
            if is_divertible and self.diverts(place, how):
                return int(original(self.sink(), flags | os.O_CREAT, mode))
        return int(original(path, flags, mode, dir_fd=dir_fd))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        place = _whole(os.fsdecode(_in_folder(path, dir_fd)))
        if self._is_active and place in self._gone and os.path.isdir(place):
            self._gone.discard(place)
            return None
        return self.make_folder(
            place, lambda: self._originals["os.mkdir"](path, mode, dir_fd=dir_fd), FileExistsError
        )

    def make_folder(self, path: str, make: Callable[[], Any], exists: type[Exception]) -> Any:
        """Make a folder, and accept a folder that another worker has made in this run.

        Args:
            path: Path of the folder to make, as the script gives the path.
            make: Function that makes a folder, for example `os.mkdir`.
            exists: Type of the error that `make` raises if the folder already exists.
        """
        place = _whole(path)
        is_made = place in self._folders
        try:
            return make()
        except exists:
            if is_made or not self._folders.share(place):
                raise
            return None

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> Any:
        place = os.fsdecode(_in_folder(path, dir_fd))
        if self._is_active and os.path.isdir(place) and not os.path.islink(place):
            entries = [os.path.join(place, name) for name in os.listdir(place)]
            if all(self._is_gone(entry) for entry in entries) and (entries or self.keeps(place)):
                self._gone.add(_whole(place))
                return None
        whole = _whole(place)
        removed = self._originals["os.rmdir"](path, dir_fd=dir_fd)
        self._folders.forget(whole)
        return removed

    def _is_gone(self, path: str) -> bool:
        """Return True if the script has "deleted" a protected file or folder without effect."""
        return _whole(path, follow=False) in self._gone

    def _rmtree(self, path: Any, *args: Any, **keywords: Any) -> Any:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        is_folder = bool(name) and os.path.isdir(name) and not os.path.islink(name)
        if not self._is_active or not is_folder or keywords.get("dir_fd") is not None:
            return self._originals["shutil.rmtree"](path, *args, **keywords)
        ignores = bool(args[0]) if args else bool(keywords.get("ignore_errors"))
        onerror = keywords.get("onerror", args[1] if len(args) > 1 else None)
        onexc = keywords.get("onexc")

        def on_error(function: Callable[..., Any], place: str, error: OSError) -> None:
            if ignores:
                return
            if onexc is not None:
                onexc(function, place, error)
            elif onerror is not None:
                onerror(function, place, sys.exc_info())
            else:
                raise error

        self.clear(name, on_error)
        return None

    def clear(self, folder: str, on_error: _OnError) -> None:
        """Delete a folder with all contents except protected files.

        Several processes may clear a folder at the same time, so a file that has vanished meanwhile
        is not an error.

        Args:
            folder: Path of an existing folder that is to be deleted.
            on_error: Function that is called with (function, path, error) if an entry of the folder
                cannot be deleted.
        """
        self._clear(folder, on_error)
        self._name()

    def _clear(self, folder: str, on_error: _OnError) -> bool:
        """Delete a folder's unprotected entries; return True if a protected entry remains."""

        def attempt(function: Callable[..., Any], place: str) -> Any:
            try:
                return function(place)
            except FileNotFoundError:
                return None
            except OSError as error:
                return on_error(function, place, error)

        is_kept = self.keeps(folder)
        for entry in list(attempt(os.scandir, folder) or ()):
            if entry.is_dir(follow_symlinks=False):
                is_kept = self._clear(entry.path, on_error) or is_kept
            elif self.keeps(entry.path, follow=False):
                self._hold(entry.path, follow=False)
                is_kept = True
            else:
                attempt(self._originals["os.unlink"], entry.path)
        if is_kept:
            self._gone.add(_whole(folder))
        else:
            attempt(self._originals["os.rmdir"], folder)
            self._folders.forget(_whole(folder))
        return is_kept

    def keeps_within(self, folder: Any) -> bool:
        """Return True if a folder contains a protected file or folder, at any depth."""
        if os.path.islink(folder) or not os.path.isdir(folder):
            return False
        return any(self.keeps(path, follow=False) for path in _entries_below(os.fsdecode(folder)))


class _InPlace:
    """Replacement of a built-in function which, like a built-in, binds to no instance."""

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._function = function
        for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
            if original in (able := getattr(os, name)):
                able.add(self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(*args, **keywords)


def _whole(path: str, follow: bool = True) -> str:
    """Return a path without symbolic links; resolve a link as the last part only if `follow`."""
    if follow:
        return os.path.realpath(path)
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _in_folder(path: Any, descriptor: int | None) -> Any:
    """Return a path relative to an open folder's descriptor as a path that needs no descriptor."""
    if descriptor is None or os.path.isabs(path):
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))
    except OSError:
        return path


def _is_empty(path: Any) -> bool:
    try:
        return os.stat(path).st_size == 0
    except OSError:
        return False


def _entries_below(folder: str) -> Iterator[str]:
    for top, folders, names in os.walk(folder):
        yield from (os.path.join(top, name) for name in (*names, *folders))


def replace_everywhere(places: Sequence[tuple[Any, Callable[..., Any]]]) -> None:
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


#: The HeldFiles of this process; empty if `thinwire run` has not started this process.
_HELD: list[HeldFiles] = []


def hold_back(
    run_dir: pathlib.Path,
    node: str,
    began: float,
    is_chief: Callable[[], bool],
    is_first: bool,
) -> HeldFiles:
    """Start to protect the run's files from this process; return the HeldFiles object.

    Args:
        run_dir: Path of the training run's directory (--run_dir) on this host.
        node: Name of this process, for example ``worker-2`` or ``evaluator``.
        began: Time at which the training run began, in seconds since 1970.
        is_chief: Function that returns True if this worker is the chief now, which writes the run's
            files.
        is_first: True if the present process is the first process of its worker in this run.
    """
    written = WrittenFiles(run_dir, node, is_chief)
    held = HeldFiles(run_dir, began, written, is_first and is_chief())
    if is_first:
        held.begin_run()
    held.install()
    _HELD.append(held)
    return held


def report_held() -> None:
    """Log the protected files that the script has "deleted" before calling `distribute`."""
    for held in _HELD:
        held.report()


def lift_hold() -> None:
    """End the protection of the run's files, as this process now trains with other workers."""
    for held in _HELD:
        held.lift()


def was_kept(path: Any) -> bool:
    """Return True if a file was protected until this process trained with the other workers."""
    return any(held.was_kept(path) for held in _HELD)


def held_files() -> list[HeldFiles]:
    """Return this process's HeldFiles; an empty one if `thinwire run` did not start the process."""
    return _HELD

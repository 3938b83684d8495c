"""Protects the files that a run has written from deletion by processes that start later.

A script often clears its output folder in its first lines. Without Thinwire, a script clears its
output folder once, before training. In a run, every worker and the evaluator execute the script,
and a process that starts late would clear the folder during training. Therefore a process protects
all files written since the run began, from before the script's first line until it trains with the
other workers. Deleting or truncating a protected file has no effect, the script continues, and one
log line names the file. A file of the run is not protected if this worker has written it and the
chief has not. The first process of the first chief (the worker that writes the run's files)
protects no files, unless other workers already train.

The module `held_python` protects the files from Python's own functions, and the module
`held_libraries` protects them from TensorFlow and h5py. Deletions of protected files by other
native code or by a child process are not intercepted.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from thinwire.runtime.run.script_settings import SETTINGS_FOLDER, TRAINING
from thinwire.worker.downloads import Downloads
from thinwire.worker.made_folders import MadeFolders
from thinwire.worker.temporary import is_temporary
from thinwire.worker.written_files import WrittenFiles

#: Folders of the run directory in which Thinwire's own processes write; files in these folders are
#: not protected.
_OF_NODES = ("settings", "logs", "tb", "measure", "checkpoints", "locks")
_NAMED = 3  # largest number of protected files that one log line names
_remove, _rmdir = os.remove, os.rmdir  # Python's own functions, which `held_python` replaces
OnError = Callable[[Callable[..., Any], str, OSError], None]


class HeldFiles:
    """The files of the run that this process must not delete or truncate, and their log line.

    Args:
        run_dir: Path of the training run's directory (--run_dir) on this host.
        began: Time at which the training run began, in seconds since 1970.
        written: Lists of the files that this process and the chief worker have written.
        is_first_chief: True if this process is the first process of the first chief, the worker
            that writes the run's files.

    Attributes:
        is_active: True until this process trains with the other workers.
        gone: Protected paths that the script has "deleted" without effect.
        folders: Folders that count as made by the script.
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
        self.is_active, self._lifted_at = True, math.inf
        self.gone: set[str] = set()
        self.folders = MadeFolders(began)
        self._unnamed: list[str] = []  # protected files that no log line has named yet
        self._is_collecting = True  # True until the script calls `thinwire.distribute`

    # -- protected files ------------------------------------------------------------------------

    def note_opening(self, path: Any) -> None:
        """Record that native code opens a file for writing, unless the file is protected."""
        name = os.fsdecode(path)
        if "://" not in name and not self.keeps(name):
            self._written.note(whole_path(name), self._trains)

    def keeps(self, path: Any, follow: bool = True) -> bool:
        """Return True if another process wrote a path in this run, so that the path is protected.

        Args:
            path: Path of a file or folder, as the script gives the path.
            follow: True to check the target if `path` is a symbolic link, False to check the link
                itself.
        """
        return self.is_active and self.was_kept(path, follow)

    def was_kept(self, path: Any, follow: bool = True) -> bool:
        """Return True if a path was protected until this process trained with the other workers.

        The method `keeps` describes the arguments.
        """
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
        whole = whole_path(name, follow)
        if "__pycache__" in whole or whole.startswith(self._of_nodes) or is_temporary(whole):
            return False
        return not (whole in self.folders.own if is_folder else self._written.is_own(whole))

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
        return not self.is_active or self._leads

    def take_open(self, path: str, flags: int) -> None:
        """Record a file that Python opens for writing; reject truncation of a protected file.

        The audit hook calls the method `take_open` whenever Python opens a file. Most truncations
        of protected files have already been diverted to temporary files before the hook is called.
        """
        whole = whole_path(path)
        if whole.startswith(self._of_nodes):
            return
        is_there, truncates = os.path.lexists(whole), bool(flags & os.O_TRUNC)
        is_lock = truncates and is_there and is_empty(whole)
        if truncates and not is_lock and self.keeps(path):
            raise self._refusal(path)
        if self._trains or not is_there or (truncates and not is_lock):
            self._written.note(whole, self._trains)

    def take_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Reject changes of protected files that bypassed the replaced functions (audit hook)."""
        if event == "os.mkdir":
            if not os.path.lexists(arguments[0]):
                self.folders.own.add(whole_path(os.fsdecode(arguments[0])))
            return
        targets = {"os.remove": arguments[:1], "os.truncate": arguments[:1]}
        folders = {"os.remove": arguments[-1:], "os.rename": arguments[-2:]}.get(event, (-1, -1))
        paths = targets.get(event, arguments[:2])
        for path, folder in zip(paths, folders, strict=False):
            if isinstance(path, int):
                continue
            name = in_folder(path, None if folder == -1 else folder)
            if self.keeps(name, follow=event == "os.truncate") and not os.path.isdir(name):
                raise self._refusal(name)
        if event == "os.rename":
            self._written.note(whole_path(os.fsdecode(in_folder(arguments[1], None))), self._trains)

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
        self.gone.add(whole_path(name, follow))
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
        if self.is_active:
            self.report()
            self.is_active, self._lifted_at = False, time.time()
            with contextlib.suppress(OSError):
                self._training.touch(mode=0o600)

    # -- deletions and writes that the replaced functions divert ----------------------------------

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
                _remove(source)
        elif os.path.isdir(source):
            for path in (os.fsdecode(source), *_entries_below(os.fsdecode(source))):
                if os.path.isdir(path):
                    self.gone.add(whole_path(path))
                elif self.keeps(path, follow=False):
                    self._hold(path, follow=False)
            shutil.copytree(source, target, symlinks=True)
        else:
            self._hold(source, follow=False)
            shutil.copy2(source, target, follow_symlinks=False)
        self._name()
        return True

    def diverts(self, file: Any, mode: str) -> bool:
        """Return True if writes to a protected file must go to a temporary file; log the file.

        A mode of `open` with "x" or "w-" creates a new file. An open that creates a file is
        diverted to a temporary file only if the script has "deleted" the protected file before. If
        the script has not "deleted" the file, an open that creates it fails as in Python.
        """
        creates = "x" in mode or "-" in mode
        if not ("w" in mode or creates) or isinstance(file, int) or not self.keeps(file):
            return False
        if creates and whole_path(os.fsdecode(file)) not in self.gone:
            return False
        self.hold(file)
        return True

    def make_folder(self, path: str, make: Callable[[], Any], exists: type[Exception]) -> Any:
        """Make a folder, and accept a folder that another worker has made in this run.

        Args:
            path: Path of the folder to make, as the script gives the path.
            make: Function that makes a folder, for example `os.mkdir`.
            exists: Type of the error that `make` raises if the folder already exists.
        """
        place = whole_path(path)
        is_made = place in self.folders
        try:
            return make()
        except exists:
            if is_made or not self.folders.share(place):
                raise
            return None

    def clear(self, folder: str, on_error: OnError) -> None:
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

    def _clear(self, folder: str, on_error: OnError) -> bool:
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
                attempt(_remove, entry.path)
        if is_kept:
            self.gone.add(whole_path(folder))
        else:
            attempt(_rmdir, folder)
            self.folders.forget(whole_path(folder))
        return is_kept

    def keeps_within(self, folder: Any) -> bool:
        """Return True if a folder contains a protected file or folder, at any depth."""
        if not self.is_active or os.path.islink(folder) or not os.path.isdir(folder):
            return False
        return any(self.keeps(path, follow=False) for path in _entries_below(os.fsdecode(folder)))


def whole_path(path: str, follow: bool = True) -> str:
    """Return a path without symbolic links; resolve a link as the last part only if `follow`."""
    if follow:
        return os.path.realpath(path)
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def in_folder(path: Any, descriptor: int | None) -> Any:
    """Return a path relative to an open folder's descriptor as a path that needs no descriptor."""
    if descriptor is None or os.path.isabs(path):
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))
    except OSError:
        return path


def is_empty(path: Any) -> bool:
    """Return True if a file exists and is empty."""
    try:
        return os.stat(path).st_size == 0
    except OSError:
        return False


def _entries_below(folder: str) -> Iterator[str]:
    for top, folders, names in os.walk(folder):
        yield from (os.path.join(top, name) for name in (*names, *folders))


#: Temporary files that receive writes to protected files.
_SINKS: list[str] = []


def new_sink() -> str:
    """Return the path of a new temporary file, which receives writes to protected files."""
    descriptor, path = tempfile.mkstemp(prefix="thinwire-held-")
    os.close(descriptor)
    os.unlink(path)
    if not _SINKS:
        atexit.register(_remove_sinks)
    _SINKS.append(path)
    return path


def _remove_sinks() -> None:
    for path in _SINKS:
        with contextlib.suppress(OSError):
            os.unlink(path)


#: The HeldFiles of this process; empty if `thinwire run` has not started this process.
_HELD: list[HeldFiles] = []


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

"""Which files the processes of a run have opened for writing, by process and for the chief.

A script runs in several processes, and one that is started in mid-run must not delete what the
chief has written, but may replace files of its own. Each process notes the files that it opens for
writing; a list in the run directory lets a later process of the same worker know them. What native
code writes, as TensorFlow does, is not noted.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from thinwire.runtime.run.script_settings import CHIEF, SETTINGS_FOLDER, WRITTEN
from thinwire.worker.temporary import is_temporary

#: More paths than these are not noted: such a process writes a new file in each step.
_MOST_PATHS = 20_000


class WrittenFiles:
    """Lists of written files, in the run directory.

    Args:
        run_dir: Of the run, on this host.
        node: This process, such as ``worker-2``.
        is_chief: Returns whether this worker is the one that writes the run's files now.
    """

    def __init__(self, run_dir: pathlib.Path, node: str, is_chief: Callable[[], bool]) -> None:
        self._folder, self._node, self._is_chief = run_dir / SETTINGS_FOLDER, node, is_chief
        self._noted: dict[str, set[str]] = {CHIEF: set(), node: set()}
        self._before = self._read(node)  # by earlier processes of this worker

    def begin_run(self, is_chief: bool) -> None:
        """Remove what an earlier run in this directory has left: this list, or the chief's too."""
        for name in (self._node, CHIEF) if is_chief else (self._node,):
            with contextlib.suppress(OSError):
                (self._folder / f"{name}{WRITTEN}").unlink(missing_ok=True)
        self._before = set()

    def note(self, path: str, trains: bool) -> None:
        """Note that this process writes a file, once.

        Args:
            path: Whole, without symbolic links.
            trains: Whether this process trains with the others, or is the first that will, so that
                it may be the chief.
        """
        name = CHIEF if trains and self._is_chief() else self._node
        noted = self._noted[name]
        if path in noted or len(noted) >= _MOST_PATHS or "\n" in path or is_temporary(path):
            return
        noted.add(path)
        with contextlib.suppress(OSError):  # without it a restarted process knows less
            self._append(name, path)

    def is_own(self, path: str) -> bool:
        """Return whether this worker has written a file, and the chief has not."""
        is_noted = path in self._noted[self._node] or path in self._before
        return is_noted and path not in self._read(CHIEF)

    def _append(self, name: str, path: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self._folder / f"{name}{WRITTEN}", flags, 0o600)
        try:
            os.write(descriptor, os.fsencode(path + "\n"))
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> set[str]:
        try:
            content = (self._folder / f"{name}{WRITTEN}").read_bytes()
        except OSError:
            return set()
        return set(os.fsdecode(content).split("\n")[:-1])


def watch_opens(take: Callable[[str, int], None]) -> None:
    """Call `take` with (path, flags of the operating system) before a file is opened for writing.

    It sees what Python opens, for the rest of this process' life.
    """
    writing, decode = os.O_WRONLY | os.O_RDWR, os.fsdecode

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                take(decode(path), arguments[2])

    sys.addaudithook(hook)

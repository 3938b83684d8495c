"""Records the files that a run's processes open for writing, per process and for the chief.

Several processes of a run (the workers and the evaluator) run the script. A process that starts
during the run must not delete the files of the chief (the worker that writes the run's files), but
may replace files that its own worker has written. Each process records the files that it opens for
writing in a list in the run directory, where a later process of the same worker reads them. Files
that native code such as TensorFlow writes are not recorded.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable

from thinwire.runtime.run.script_settings import CHIEF, SETTINGS_FOLDER, WRITTEN
from thinwire.worker.temporary import is_temporary

#: Largest number of paths in one list of written files. The limit bounds the memory if a script
#: writes a new file in each step.
_MOST_PATHS = 20_000


class WrittenFiles:
    """Lists of the files that this process and the chief have written, in the run directory.

    Args:
        run_dir: Path of the training run's directory (--run_dir) on this host.
        node: Name of this process, for example ``worker-2``.
        is_chief: Function that returns True if this worker is the chief now, which writes the run's
            files.
    """

    def __init__(self, run_dir: pathlib.Path, node: str, is_chief: Callable[[], bool]) -> None:
        self._folder, self._node, self._is_chief = run_dir / SETTINGS_FOLDER, node, is_chief
        self._noted: dict[str, set[str]] = {CHIEF: set(), node: set()}
        # paths of files that earlier processes of this worker have written
        self._before = self._read(node)

    def begin_run(self, is_chief: bool) -> None:
        """Remove an earlier run's list of this process; the chief removes the chief's list too."""
        for name in (self._node, CHIEF) if is_chief else (self._node,):
            with contextlib.suppress(OSError):
                (self._folder / f"{name}{WRITTEN}").unlink(missing_ok=True)
        self._before = set()

    def note(self, path: str, trains: bool) -> None:
        """Record that this process writes a file; a second call for the same path does nothing.

        Args:
            path: Absolute path of the written file, without symbolic links.
            trains: True if this process trains with other workers, or is the first process of the
                run that will train. Only such a process can write files as the chief.
        """
        name = CHIEF if trains and self._is_chief() else self._node
        noted = self._noted[name]
        if path in noted or len(noted) >= _MOST_PATHS or "\n" in path or is_temporary(path):
            return
        noted.add(path)
        # Ignore the error, because a restarted process without the list only protects more files.
        with contextlib.suppress(OSError):
            self._append(name, path)

    def is_own(self, path: str) -> bool:
        """Return True if this worker has written a file and the chief has not."""
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

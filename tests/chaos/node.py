"""``main.py`` as tests start it: records its history, with an optional planted bug or bad disk.

The settings are in the environment: CHAOS_HISTORY, the file to append records to; CHAOS_SHARD,
the shard's number; CHAOS_PLANT, a bug; CHAOS_TROUBLE, a JSON file with the present faults of the
node's disk and wall clock (see `Trouble`).
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.chaos import planted
from tests.chaos.history import Record, line_of
from tests.chaos.recorder import Recorder
from thinwire.cli.commands import run_role
from thinwire.ps.persistence.journal import Journal
from thinwire.runtime.persistence.checkpoint import Checkpoints

#: Keys of a node's trouble file, and their meanings.
TROUBLE = {
    "slow_seconds": "of each append to the journal and each snapshot",
    "fails": "whether snapshots are refused (EIO)",
    "clock_seconds": "by which the wall clock is ahead",
}


class Trouble:
    """Present faults of a node's disk and wall clock, from a file that may change at any time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_at, self._now = 0.0, {}

    def __getitem__(self, name: str) -> Any:
        """Return what holds now, by a name of TROUBLE; 0 if nothing does."""
        if time.monotonic() - self._read_at > 0.05:
            self._read_at = time.monotonic()
            try:
                with open(self._path) as file:
                    self._now = json.load(file)
            except (OSError, ValueError):
                self._now = {}
        return self._now.get(name, 0)

    def install(self) -> None:
        """Apply the faults to this process."""
        now = time.time

        def jumped() -> float:
            # gRPC passes this time to C code, whose clock does not jump: it would wait for days.
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            return now() + (0.0 if caller.startswith("grpc.") else self["clock_seconds"])

        time.time = jumped
        Journal.append = self._slowed(Journal.append)  # type: ignore[method-assign]
        Checkpoints.save = self._slowed(Checkpoints.save)  # type: ignore[method-assign]

    def _slowed(self, inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def outer(owner: Any, *arguments: Any, **named: Any) -> Any:
            if seconds := self["slow_seconds"]:
                time.sleep(seconds)
            if self["fails"] and isinstance(owner, Checkpoints):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return inner(owner, *arguments, **named)

        return outer


def record_to(path: str) -> Callable[[Record], None]:
    """Return a function that appends whole records to a file, even if the process is killed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    lock = threading.Lock()

    def write(record: Record) -> None:
        data = line_of(record).encode()
        with lock:
            os.write(descriptor, data)

    return write


def main() -> None:
    """Prepare this process as its environment requests, and run the node of its flags."""
    given = os.environ
    if given.get("CHAOS_PLANT"):
        planted.PLANTS[given["CHAOS_PLANT"]].install()
    shard = int(given.get("CHAOS_SHARD", "-1"))
    Recorder(record_to(given["CHAOS_HISTORY"]), shard=shard).install()
    Trouble(given["CHAOS_TROUBLE"]).install()
    run_role()


if __name__ == "__main__":
    main()

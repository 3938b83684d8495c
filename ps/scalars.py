"""A shard's own TensorBoard scalars, written by a thread of its own."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable

from absl import logging

from ops.scalars import ScalarFile
from ps.core import PsCore

_INTERVAL_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A shard's counters at one moment."""

    at: float  # monotonic seconds
    version: int
    pushes: int
    staleness: int  # sum over these pushes


class PsScalars:
    """Writes what a shard counts every two seconds; a bad disk ends it, not the run."""

    def __init__(
        self, directory: pathlib.Path, core: PsCore, bytes_down: Callable[[], dict[int, int]]
    ) -> None:
        """Look at `core` and `bytes_down`; both must bear being read beside the writer thread."""
        self._file = ScalarFile(directory)
        self._core, self._bytes_down = core, bytes_down
        self._before = self._read(time.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scalars", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Write for the last time."""
        self._closing.set()
        self._thread.join()
        self._file.close()

    def values(self, now: float) -> dict[str, float | None]:
        """Return the scalars by tag; rates and means are those since the last call."""
        before = self._before
        reading = self._before = self._read(now)
        pushes = reading.pushes - before.pushes
        elapsed = now - before.at
        return {
            "train/learning_rate": self._core.model.learning_rate,
            "train/updates_per_second": (reading.version - before.version) / elapsed
            if elapsed > 0
            else None,
            "sync/staleness": (reading.staleness - before.staleness) / pushes if pushes else None,
            "net/bytes_down": sum(self._bytes_down().values()),
        }

    def _read(self, now: float) -> _Reading:
        core = self._core
        delays = dict(core.accounts.staleness)  # in one piece, whatever the writer does meanwhile
        weighted = sum(delay * pushes for delay, pushes in delays.items())
        return _Reading(now, core.version, sum(delays.values()), weighted)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_INTERVAL_SECONDS) and self._core.stop_reason is None:
                self._file.write(self.values(time.monotonic()), self._core.version)
            self._file.write(self.values(time.monotonic()), self._core.version)
        except OSError as error:
            logging.warning("no more TensorBoard scalars of this shard: %s", error)

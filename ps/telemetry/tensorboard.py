"""TensorBoard scalars of one shard, written by a background thread."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from thinwire.ops.privacy.accountant import BLOCK
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts, num_lost
from thinwire.runtime.telemetry.tensorboard import ScalarFile

_INTERVAL_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Values of a parameter server shard's counters at one time."""

    at: float  # time at which the counters were read, in seconds of the monotonic clock
    version: int
    pushes: int
    staleness: int  # sum of the staleness of all counted pushes, in updates
    # datagram counters summed over all workers; None if the method sends no datagrams
    datagrams: ReassemblyCounters | None


class PsScalars:
    """Writes a shard's counters as TensorBoard scalars every two seconds.

    A disk error ends the writing of TensorBoard scalars, but not the run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        core: Callable[[], PsCore],
        bytes_down: Callable[[], dict[int, int]],
        received: Callable[[], DatagramCounts | None] = lambda: None,
        privacy: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Store the functions that the TensorBoard scalars are read from; `core` returns the
        shard's current state machine.

        The thread that writes TensorBoard scalars reads the shard's counters while the shard's
        writer thread runs.
        """
        self._file = ScalarFile(directory)
        self._core, self._bytes_down, self._received = core, bytes_down, received
        self._privacy = privacy
        self._before = self._read(time.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scalars", daemon=True)

    def start(self) -> None:
        """Start the background thread that writes the TensorBoard scalars."""
        self._thread.start()

    def close(self) -> None:
        """Write the TensorBoard scalars one last time, and stop the background thread."""
        self._closing.set()
        self._thread.join()
        self._file.close()

    def values(self, now: float) -> dict[str, float | None]:
        """Return TensorBoard tag -> current value of each scalar of the shard.

        Rates and means among the scalars cover the time since the last call of `values`.
        """
        before = self._before
        reading = self._before = self._read(now)
        pushes = reading.pushes - before.pushes
        elapsed = now - before.at
        return {
            "train/learning_rate": self._core().model.learning_rate,
            "train/updates_per_second": (reading.version - before.version) / elapsed
            if elapsed > 0
            else None,
            "sync/staleness": (reading.staleness - before.staleness) / pushes if pushes else None,
            "net/bytes_down": sum(self._bytes_down().values()),
            **_of_datagrams(before.datagrams, reading.datagrams),
            **_of_privacy(self._privacy()),
        }

    def _read(self, now: float) -> _Reading:
        core = self._core()
        # copy the counts of delays, because the writer thread changes the counts
        delays = dict(core.counters.staleness)
        weighted = sum(delay * pushes for delay, pushes in delays.items())
        received = self._received()
        counters = received.total() if received is not None else None
        return _Reading(now, core.version, sum(delays.values()), weighted, counters)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_INTERVAL_SECONDS) and self._core().stop_reason is None:
                self._file.write(self.values(time.monotonic()), self._core().version)
            self._file.write(self.values(time.monotonic()), self._core().version)
        except OSError as error:
            logging.warning("cannot write TensorBoard scalars, writing no more: %s", error)


def _of_datagrams(
    before: ReassemblyCounters | None, now: ReassemblyCounters | None
) -> dict[str, float | None]:
    """Return mean datagram counts per push since the reading `before`, and the lost datagrams."""
    if before is None or now is None:
        return {}
    new = now.minus(before)
    return {
        "dgt/fresh_ratio": new.sum_fresh / new.num_closed if new.num_closed else None,
        "dgt/fill_ratio": new.sum_fill / new.num_closed if new.num_closed else None,
        "dgt/lateness": new.sum_of_ages / new.num_late_used if new.num_late_used else None,
        "dgt/lost": num_lost(now),
    }


def _of_privacy(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the privacy accountant's epsilon; {} if the training method has no privacy bound."""
    return {"privacy/epsilon": block["epsilon"]} if (block := found.get(BLOCK)) else {}

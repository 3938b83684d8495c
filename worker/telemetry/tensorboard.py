"""A worker's own TensorBoard scalars, written outside the training thread."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from absl import logging

from thinwire.ops.routing.counters import SentCounts
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.runtime.telemetry.tensorboard import ScalarFile

_INTERVAL_SECONDS = 2.0


class WorkerScalars:
    """Writes a worker's counters at most every two seconds; a failing disk only ends that."""

    def __init__(
        self, directory: pathlib.Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create no file before the first scalar."""
        self._file: ScalarFile | None = ScalarFile(directory)
        self._clock = clock
        self._written_at, self._steps = clock(), 0
        self._datagrams = SentCounts()  # when last written

    def record(
        self, counted: WorkerMetrics, loss: float | None, num_steps: int, version: int
    ) -> None:
        """Write if the last time was long enough ago (heartbeat thread).

        Args:
            counted: Totals of this worker.
            loss: Of its newest mini-batch.
            num_steps: Mini-batches of this process.
            version: Of shard 0's model that this worker has.
        """
        elapsed = self._clock() - self._written_at
        if self._file is None or elapsed < _INTERVAL_SECONDS:
            return
        values = {
            "train/loss": loss,
            "train/steps_per_second": (num_steps - self._steps) / elapsed,
            "time/compute_seconds": counted.compute_seconds,
            "time/encode_seconds": counted.encode_seconds,
            "time/wait_seconds": counted.wait_seconds,
            "net/bytes_up": counted.bytes_up,
            **self._of_datagrams(counted.datagrams),
        }
        self._written_at, self._steps = self._clock(), num_steps
        try:
            self._file.write(values, version)
        except OSError as error:
            self._file = None
            logging.warning("no more TensorBoard scalars of this worker: %s", error)

    def _of_datagrams(self, counts: SentCounts | None) -> dict[str, float | None]:
        """Return the mean k of the exchanges since the last write, and all bytes by channel."""
        if counts is None:
            return {}
        new, self._datagrams = counts.minus(self._datagrams), counts
        values: dict[str, float | None] = {"dgt/k": new.sum_k / new.pushes if new.pushes else None}
        for channel, num_bytes in enumerate(counts.num_bytes):
            values[f"dgt/bytes_channel_{channel}"] = num_bytes
        return values

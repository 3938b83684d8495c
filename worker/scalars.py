"""A worker's own TensorBoard scalars, written beside the training thread."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from absl import logging

from ops.datagram_counts import SentCounts
from ops.metrics import WorkerMetrics
from ops.scalars import ScalarFile

_INTERVAL_SECONDS = 2.0


class WorkerScalars:
    """Writes what a worker counts, at most every two seconds; a bad disk ends it, not the run."""

    def __init__(
        self, directory: pathlib.Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Touch no file before the first scalar."""
        self._file: ScalarFile | None = ScalarFile(directory)
        self._clock = clock
        self._written_at, self._steps = clock(), 0
        self._datagrams = SentCounts()  # when last written

    def note(
        self, counted: WorkerMetrics, loss: float | None, num_steps: int, version: int
    ) -> None:
        """Write if it is time (heartbeat thread).

        Args:
            counted: Totals of this worker.
            loss: Of its newest mini-batch.
            num_steps: Mini-batches of this life.
            version: Of shard 0's model as this worker has it.
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
        """Return the mean k of the exchanges since the last time, and all bytes by channel."""
        if counts is None:
            return {}
        new, self._datagrams = counts.minus(self._datagrams), counts
        values: dict[str, float | None] = {"dgt/k": new.sum_k / new.pushes if new.pushes else None}
        for channel, num_bytes in enumerate(counts.num_bytes):
            values[f"dgt/bytes_channel_{channel}"] = num_bytes
        return values

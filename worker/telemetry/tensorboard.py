"""Writes TensorBoard scalars of one worker, in the heartbeat thread."""

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
    """Writes a worker's counters to TensorBoard every two seconds or later, until a disk error."""

    def __init__(
        self, directory: pathlib.Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare the TensorBoard file; the first written scalar creates the file."""
        self._file: ScalarFile | None = ScalarFile(directory)
        self._clock = clock
        self._written_at, self._steps = clock(), 0
        self._datagrams = SentCounts()  # datagram counts at the last write to TensorBoard

    def record(
        self, counted: WorkerMetrics, loss: float | None, num_steps: int, version: int
    ) -> None:
        """Write the counters if the last write was two seconds ago or more (heartbeat thread).

        Args:
            counted: Total counts and times of this worker.
            loss: Loss of the newest mini-batch; None if unknown.
            num_steps: Number of mini-batches that this worker has trained on since its process
                started.
            version: Version of shard 0's weights that this worker holds.
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
            logging.warning(
                "cannot write this worker's TensorBoard scalars; it writes no more: %s", error
            )

    def _of_datagrams(self, counts: SentCounts | None) -> dict[str, float | None]:
        """Return DGT's mean fraction k in pushes since the last write, and bytes by channel."""
        if counts is None:
            return {}
        new, self._datagrams = counts.minus(self._datagrams), counts
        values: dict[str, float | None] = {"dgt/k": new.sum_k / new.pushes if new.pushes else None}
        for channel, num_bytes in enumerate(counts.num_bytes):
            values[f"dgt/bytes_channel_{channel}"] = num_bytes
        return values

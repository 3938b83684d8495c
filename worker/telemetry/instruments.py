"""What one worker tells those who watch it from outside.

A worker's own TensorBoard scalars, written beside the training thread.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.telemetry.instruments import Instrument, counter, gauge
from thinwire.ops.telemetry.run_status import WorkerMetrics
from thinwire.ops.telemetry.tensorboard import ScalarFile

if TYPE_CHECKING:
    from thinwire.worker.trainer import WorkerSession


def meters_of(part: WorkerSession) -> list[Instrument]:
    """Return the meters of this moment and of this process (any thread)."""
    exchange, core, spent = part.exchange, part.core, part.stopwatch.seconds
    seconds = spent | {"send": exchange.send_seconds}
    seconds["wait"] = max(0.0, spent["wait"] - exchange.send_seconds)
    datagrams = exchange.datagrams
    return [
        counter("steps", "Local steps (mini-batches).", part.num_steps),
        counter("exchanges", "Pushes that were answered.", core.step - part.joined_at_step),
        counter("seconds", "Where the worker's time went.", seconds, "phase"),
        gauge("step_seconds", "What the newest local step took.", part.step_seconds),
        gauge(
            "loss", "Of the newest mini-batch.", float("nan") if part.loss is None else part.loss
        ),
        gauge("learning_rate", "Scheduled learning rate.", core.learning_rate),
        gauge("model_version", "Of shard 0's weights that this worker has.", core.versions[0]),
        counter(
            "non_finite_batches", "Mini-batches left out for NaN or infinity.", part.num_non_finite
        ),
        counter(
            "bytes_sent",
            "Training bytes on the wire, framing included.",
            {"up": exchange.bytes_up},
            "direction",
        ),
        counter(
            "bytes_received",
            "Bytes from shards and peers, framing included.",
            {"down": exchange.bytes_down},
            "direction",
        ),
        gauge(
            "shards_connected",
            "Shards to which the stream stands.",
            sum(shard.connected for shard in exchange.shards),
        ),
        counter(
            "refused_peers",
            "Other workers' streams refused or cut off.",
            exchange.refused_peers,
            "reason",
        ),
        *(
            []
            if datagrams is None
            else [
                counter(
                    "datagrams_sent",
                    "Datagrams handed over to be carried.",
                    {str(number): count for number, count in enumerate(datagrams.datagrams)},
                    "channel",
                ),
                counter("datagrams_unsent", "Datagrams that were not.", datagrams.unsent, "reason"),
            ]
        ),
    ]


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

"""Measures a worker's rounds: time per phase (compute, encode, wait), and bytes on the wire.

The training thread only adds up measured times and bytes. The heartbeat thread makes JSON documents
of the measured times and bytes.
"""

from __future__ import annotations

import collections
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol

from thinwire.ops.pacing.base import Pacer
from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.round_trace import MeasuredBy, Round
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.core.messages import PushRequest, ShardReply

#: Largest number of measured rounds stored while shard 0 is unreachable. If there are more, the
#: oldest rounds are dropped.
_MOST_ROWS = 50_000
# number of newest documents of rounds that are sent again on a new connection
_BATCHES_TO_REPEAT = 4


class ByteCounters(Protocol):
    """Counters of the bytes that a worker has sent and received."""

    @property
    def bytes_up(self) -> int:
        """Total number of bytes that the worker has sent."""

    @property
    def bytes_down(self) -> int:
        """Total number of bytes that the worker has received."""


class RoundMeasure:
    """Measures one worker's rounds; times are sums over the local steps of a round.

    Args:
        pacer: Pacer (rule when workers push) of the training method, which determines the measured
            phases of a round.
        counters: Counters of sent and received bytes, which are read once per round.
        clock: Function that returns monotonic time in seconds.
    """

    def __init__(
        self, pacer: Pacer, counters: ByteCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._phases = round_trace.phases_of(pacer)
        self._counters, self._clock = counters, clock
        self._time = dict.fromkeys(self._phases, 0.0)
        self._rows: collections.deque[Round] = collections.deque(maxlen=_MOST_ROWS)
        self._sent: collections.deque[str] = collections.deque(maxlen=_BATCHES_TO_REPEAT)
        self._receiver: object = None
        self._steps: list[dict[str, float]] = []  # times of each local step, for `StepMeasure`
        self.begin(0.0)

    def begin(self, seconds_before: float) -> None:
        """Start the training clock at `seconds_before`, the time of earlier incarnations."""
        self._started_at = self._clock() - seconds_before
        self._bytes = (self._counters.bytes_up, self._counters.bytes_down)

    def begin_step(self) -> None:
        """Mark the start of a local step, or of the query to the state server before the step."""

    def record(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase of this training round; ignore a phase unknown to the pacer."""
        if phase in self._time:
            self._time[phase] += seconds

    def end_round(
        self, request: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Record the measures of the round that has ended, and start the next round.

        If shard 0 has rejected a round's push as not finite, the round is not recorded.

        Args:
            request: Pushes to all shards with which the training round ended.
            replies: Replies of all shards to the pushes that ended the training round.
            epoch: Number of passes that the worker has made over its training examples.
            exchange: Time from the push to the last shard's reply, in seconds.
        """
        first = replies[0]
        if first is None:
            return
        held = max(reply.held_seconds for reply in replies if reply is not None)
        held = min(max(held, 0.0), exchange)
        head, before = request.head, self._bytes
        self._bytes = (self._counters.bytes_up, self._counters.bytes_down)
        self._rows.append(
            Round(
                num_iters=head.step,
                num_samples=head.samples,
                total_time=self._clock() - self._started_at,
                n_local=head.local_steps,
                epoch=epoch,
                version=first.version,
                staleness=first.staleness,
                loss=head.loss if math.isfinite(head.loss or 0.0) else None,
                bytes_sent=max(0, self._bytes[0] - before[0]),
                bytes_received=max(0, self._bytes[1] - before[1]),
                barrier_wait=held,
                transfer=exchange - held,
                time=self._time,
                steps=self._take_steps(),
            )
        )
        self._time = dict.fromkeys(self._phases, 0.0)

    def record_exchange(self, seconds: float) -> None:
        """Add seconds to the phase of the exchange, the last phase of the pacer's rounds."""
        self.record(self._phases[-1], seconds)

    def batches(self, origin: MeasuredBy, receiver: object) -> list[str]:
        """Return the JSON documents of rounds to send to shard 0 now (heartbeat thread only).

        After a change of the receiver, the newest documents may have been lost, so the method
        `batches` returns them a second time. The receiver of the documents ignores duplicates,
        because every record has a number.

        Args:
            origin: Origin of the records of training rounds: host, device, worker id and
                incarnation (process) of the worker.
            receiver: Object that stands for the present connection to shard 0; two connections have
                two objects.
        """
        repeated = list(self._sent) if receiver is not self._receiver else []
        self._receiver = receiver
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        new = round_trace.pack(origin, rows)
        self._sent.extend(new)
        return [*repeated, *new]

    def _take_steps(self) -> list[dict[str, float]] | None:
        return None


class StepMeasure(RoundMeasure):
    """Measures rounds and each of their local steps; the exchange follows the last local step."""

    def begin_step(self) -> None:
        """Start the measurement of one local step of the worker."""
        self._steps.append({})

    def record(self, phase: str, seconds: float) -> None:
        """Add seconds to a measured phase of the present round and of the present local step."""
        super().record(phase, seconds)
        if self._steps and phase in self._time:
            entry = self._steps[-1]
            entry[phase] = entry.get(phase, 0.0) + seconds

    def _take_steps(self) -> list[dict[str, float]] | None:
        taken, self._steps = self._steps, []
        return taken


class NullMeasure(RoundMeasure):
    """Replacement of RoundMeasure that measures nothing, for --measure off."""

    def record(self, phase: str, seconds: float) -> None:
        """Do nothing."""

    def end_round(
        self, request: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Do nothing."""


#: Maps a value of the flag --measure to the class that measures rounds at this level.
MEASURES: dict[str, type[RoundMeasure]] = {
    "off": NullMeasure,
    "rounds": RoundMeasure,
    "steps": StepMeasure,
}


def origin_of(id_worker: int, device: str, on_gpu: bool, incarnation: int) -> MeasuredBy:
    """Return the origin of a worker's records: its host, device, id and incarnation.

    Args:
        id_worker: Id of the worker, from 1.
        device: Value of the flag --device.
        on_gpu: True if the device that computes gradients is a GPU.
        incarnation: Incarnation (id of one process) of the worker.
    """
    number = device.partition(":")[2] or "0"
    name = f"gpu{number}" if on_gpu else "cpu"
    host = socket.gethostname() or "unknown"
    return MeasuredBy(host, name, id_worker - 1, f"{incarnation & 0xFFFFFFFF:08x}")


def seconds_trained(before: WorkerMetrics) -> float:
    """Return the training time of a worker's earlier incarnations, in seconds."""
    return math.fsum(
        (before.compute_seconds, before.encode_seconds, before.send_seconds, before.wait_seconds)
    )

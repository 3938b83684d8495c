"""Measures a worker's rounds: the time of each phase, and the bytes.

The training thread only adds numbers; another thread makes the documents.
"""

from __future__ import annotations

import collections
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol

from thinwire.ops.pacing import Pacer
from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.round_trace import MeasuredBy, RoundRecord
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.core.messages import PushRequest, ShardReply

#: Rounds kept while no shard is connected; older ones are dropped.
_MOST_ROWS = 50_000
_BATCHES_TO_REPEAT = 4


class ByteCounters(Protocol):
    """Counters of a worker's bytes on the wire."""

    @property
    def bytes_up(self) -> int:
        """Sent so far."""

    @property
    def bytes_down(self) -> int:
        """Received so far."""


class RoundMeasure:
    """One worker's rounds, summed over their local steps.

    Args:
        pacer: Determines the phases of a round.
        counters: Read once per round.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, pacer: Pacer, counters: ByteCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._phases = round_trace.phases_of(pacer)
        self._counters, self._clock = counters, clock
        self._time = dict.fromkeys(self._phases, 0.0)
        self._rows: collections.deque[RoundRecord] = collections.deque(maxlen=_MOST_ROWS)
        self._sent: collections.deque[str] = collections.deque(maxlen=_BATCHES_TO_REPEAT)
        self._receiver: object = None
        self.begin(0.0)

    def begin(self, seconds_before: float) -> None:
        """Start the clock; earlier incarnations trained for `seconds_before`."""
        self._started_at = self._clock() - seconds_before
        self._bytes = (self._counters.bytes_up, self._counters.bytes_down)

    def begin_step(self) -> None:
        """Note that the next local step, or the query whether to take one, begins."""

    def record(self, phase: str, seconds: float) -> None:
        """Add to a phase of this round; phases that this worker does not have are ignored."""
        if phase in self._time:
            self._time[phase] += seconds

    def end_round(
        self, request: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Make a record of the round and begin the next.

        Args:
            request: The push.
            replies: To it, of every shard; shard 0 has accepted it.
            epoch: Of the worker's examples.
            exchange: Seconds from push to last reply.
        """
        first = replies[0]
        if first is None:
            return
        held = max(reply.held_seconds for reply in replies if reply is not None)
        held = min(max(held, 0.0), exchange)
        before = self._bytes
        self._bytes = (self._counters.bytes_up, self._counters.bytes_down)
        self._rows.append(
            RoundRecord(
                num_iters=request.step,
                num_samples=request.samples,
                total_time=self._clock() - self._started_at,
                n_local=request.local_steps,
                epoch=epoch,
                version=first.version,
                staleness=first.staleness,
                loss=request.loss if math.isfinite(request.loss or 0.0) else None,
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
        """Add to the phase of the exchange, whose name depends on the composition."""
        self.record(self._phases[-1], seconds)

    def batches(self, origin: MeasuredBy, receiver: object) -> list[str]:
        """Return the documents to send now (one thread, not the training one).

        Args:
            origin: The worker.
            receiver: If it is not the one of the call before, the newest batches may have been
                lost and are sent again: records are identified by their number.
        """
        again = list(self._sent) if receiver is not self._receiver else []
        self._receiver = receiver
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        new = round_trace.pack(origin, rows)
        self._sent.extend(new)
        return [*again, *new]

    def _take_steps(self) -> list[dict[str, float]] | None:
        return None


class StepMeasure(RoundMeasure):
    """Measures every local step as well; the last entry is the step that led to the exchange."""

    def __init__(
        self, pacer: Pacer, counters: ByteCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps: list[dict[str, float]] = []
        super().__init__(pacer, counters, clock)

    def begin_step(self) -> None:
        """Open an entry."""
        self._steps.append({})

    def record(self, phase: str, seconds: float) -> None:
        """Add to a phase of this round and of this step."""
        super().record(phase, seconds)
        if self._steps and phase in self._time:
            entry = self._steps[-1]
            entry[phase] = entry.get(phase, 0.0) + seconds

    def _take_steps(self) -> list[dict[str, float]] | None:
        taken, self._steps = self._steps, []
        return taken


class NullMeasure(RoundMeasure):
    """Measures nothing."""

    def record(self, phase: str, seconds: float) -> None:
        """Do nothing."""

    def end_round(
        self, request: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Do nothing."""


#: Value of --measure -> implementation.
MEASURES: dict[str, type[RoundMeasure]] = {
    "off": NullMeasure,
    "rounds": RoundMeasure,
    "steps": StepMeasure,
}


def origin_of(id_worker: int, device: str, on_gpu: bool, incarnation: int) -> MeasuredBy:
    """Return the origin of a worker's records.

    Args:
        id_worker: From 1.
        device: Flag --device.
        on_gpu: Whether that is a GPU.
        incarnation: Of the worker.
    """
    number = device.partition(":")[2] or "0"
    name = f"gpu{number}" if on_gpu else "cpu"
    host = socket.gethostname() or "unknown"
    return MeasuredBy(host, name, id_worker - 1, f"{incarnation & 0xFFFFFFFF:08x}")


def seconds_trained(before: WorkerMetrics) -> float:
    """Return the seconds that earlier incarnations of a worker trained for."""
    return math.fsum(
        (before.compute_seconds, before.encode_seconds, before.send_seconds, before.wait_seconds)
    )

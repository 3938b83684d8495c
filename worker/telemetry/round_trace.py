"""Takes a worker's rounds apart: where each one's time and bytes went.

The training thread only adds numbers up; another thread makes documents of them.
"""

from __future__ import annotations

import collections
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol

from thinwire.ops.pacing.pacers import Pacer
from thinwire.ops.telemetry import round_trace
from thinwire.ops.telemetry.round_trace import MeasuredBy, RoundRecord
from thinwire.ops.telemetry.run_status import WorkerMetrics
from thinwire.worker.core.messages import PushRequest, ShardReply

#: Rounds kept while no shard listens; older ones are dropped.
_MOST_ROWS = 50_000
_BATCHES_TO_REPEAT = 4


class ByteCounters(Protocol):
    """What counts a worker's bytes on the wire."""

    @property
    def bytes_up(self) -> int:
        """Sent so far."""

    @property
    def bytes_down(self) -> int:
        """Received so far."""


class RoundMeasure:
    """One worker's rounds, summed over their local steps.

    Args:
        pacer: Says which phases there are.
        counters: Looked at once a round.
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
        self._listener: object = None
        self.begin(0.0)

    def begin(self, seconds_before: float) -> None:
        """Start the clock; the worker had trained for `seconds_before` in earlier lives."""
        self._started_at = self._clock() - seconds_before
        self._bytes = (self._counters.bytes_up, self._counters.bytes_down)

    def begin_step(self) -> None:
        """Hear that the next local step, or the question whether to take one, begins."""

    def note(self, phase: str, seconds: float) -> None:
        """Add to a phase of this round; one that this worker's rounds do not have is nothing."""
        if phase in self._time:
            self._time[phase] += seconds

    def end_round(
        self, outgoing: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Make a row of what was noted.

        Args:
            outgoing: The push.
            replies: To it, of every shard; shard 0 has taken it.
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
                num_iters=outgoing.step,
                num_samples=outgoing.samples,
                total_time=self._clock() - self._started_at,
                n_local=outgoing.local_steps,
                epoch=epoch,
                version=first.version,
                staleness=first.staleness,
                loss=outgoing.loss if math.isfinite(outgoing.loss) else None,
                bytes_sent=max(0, self._bytes[0] - before[0]),
                bytes_received=max(0, self._bytes[1] - before[1]),
                barrier_wait=held,
                transfer=exchange - held,
                time=self._time,
                steps=self._take_steps(),
            )
        )
        self._time = dict.fromkeys(self._phases, 0.0)

    def note_exchange(self, seconds: float) -> None:
        """Add to the exchange, whatever this composition calls it."""
        self.note(self._phases[-1], seconds)

    def batches(self, life: MeasuredBy, listener: object) -> list[str]:
        """Return what is to be sent now (one thread, not the training one).

        Args:
            life: Who this is.
            listener: Who will hear it; to another one than before, the newest batches, which may
                have been lost, are said again: rows are known by their number.
        """
        again = list(self._sent) if listener is not self._listener else []
        self._listener = listener
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        new = round_trace.pack(life, rows)
        self._sent.extend(new)
        return [*again, *new]

    def _take_steps(self) -> list[dict[str, float]] | None:
        return None


class StepMeasure(RoundMeasure):
    """Keeps every local step apart as well; the last entry is the one that led to the exchange."""

    def __init__(
        self, pacer: Pacer, counters: ByteCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps: list[dict[str, float]] = []
        super().__init__(pacer, counters, clock)

    def begin_step(self) -> None:
        """Open an entry."""
        self._steps.append({})

    def note(self, phase: str, seconds: float) -> None:
        """Add to a phase of this round and of this step."""
        super().note(phase, seconds)
        if self._steps and phase in self._time:
            entry = self._steps[-1]
            entry[phase] = entry.get(phase, 0.0) + seconds

    def _take_steps(self) -> list[dict[str, float]] | None:
        taken, self._steps = self._steps, []
        return taken


class NullMeasure(RoundMeasure):
    """Notes nothing."""

    def note(self, phase: str, seconds: float) -> None:
        """Do nothing."""

    def end_round(
        self, outgoing: PushRequest, replies: list[ShardReply | None], epoch: int, exchange: float
    ) -> None:
        """Do nothing."""


#: Flag --measure -> what measures.
REGISTRY: dict[str, type[RoundMeasure]] = {
    "off": NullMeasure,
    "rounds": RoundMeasure,
    "steps": StepMeasure,
}


def origin_of(id_worker: int, device: str, on_gpu: bool, incarnation: int) -> MeasuredBy:
    """Return who measures.

    Args:
        id_worker: From 1.
        device: Flag --device.
        on_gpu: Whether it comes to a GPU.
        incarnation: This life of the worker.
    """
    number = device.partition(":")[2] or "0"
    name = f"gpu{number}" if on_gpu else "cpu"
    host = socket.gethostname() or "unknown"
    return MeasuredBy(host, name, id_worker - 1, f"{incarnation & 0xFFFFFFFF:08x}")


def seconds_trained(before: WorkerMetrics) -> float:
    """Return the seconds that earlier lives of a worker trained for."""
    return math.fsum(
        (before.compute_seconds, before.encode_seconds, before.send_seconds, before.wait_seconds)
    )

"""Shard 0's half of a pacer that queries it: who trains how fast, and who is to push now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.ops.pacing import Pacer, PaceReport, QueryingPacer
from thinwire.ops.types import State
from thinwire.ps.core import events


class PacingService:
    """ESync's "state server": the pacer's records; empty and silent for pacers that never query.

    The records are soft: after a restart they are rebuilt from the next reports.
    """

    def __init__(self, pacer: Pacer) -> None:
        """Start without records."""
        self._pacer = pacer if isinstance(pacer, QueryingPacer) else None
        self._records: State = {} if self._pacer is None else self._pacer.init()
        self._last: tuple[int, State] = (0, {})  # records and summary before somebody left

    def report(
        self, query: events.Query, members: Sequence[int], over: bool, now: float
    ) -> events.Answer | None:
        """Record a report; return the answer, unless it only begins a round.

        Args:
            query: The worker's.
            members: Live workers of its group.
            over: The run has ended; everybody is to push, and gets that in reply.
            now: By this shard's clock.
        """
        ready = over
        if self._pacer is not None:
            finished_at = now - query.age_seconds
            report = PaceReport(
                query.worker,
                query.local_steps,
                query.step_seconds,
                finished_at,
                query.query_seconds,
            )
            self._records = self._pacer.record(report, self._records)
            answer, self._records = self._pacer.answer(query.worker, members, now, self._records)
            ready = ready or answer
        if query.local_steps == 0:
            return None
        return events.Answer(query.worker, query.step, query.local_steps, ready)

    def pushed(self, worker: int) -> None:
        """Note that a worker waits for its round to be over."""
        if self._pacer is not None:
            self._records = self._pacer.pushed(worker, self._records)

    def released(self, workers: Sequence[int]) -> None:
        """Note that these workers' round is over."""
        if self._pacer is not None:
            self._records = self._pacer.released(workers, self._records)

    def left(self, worker: int) -> None:
        """Forget a worker that has left."""
        if self._pacer is None:
            return
        size = len(self._records["records"])
        if size >= self._last[0]:  # at the end of a run everybody leaves
            self._last = size, self._pacer.summary(self._records)
        self._records = self._pacer.left(worker, self._records)

    def summary(self) -> dict[str, Any]:
        """Return the pacer's block of the run's summary, by its name; nothing without records."""
        if self._pacer is None:
            return {}
        known = self._pacer.summary(self._records) if self._records["records"] else self._last[1]
        return {self._pacer.summary_name: known}

    def state_dict(self, soft: bool) -> State:
        """Return the records, which do not outlive a restart."""
        return {"records": self._records, "last": self._last} if soft else {}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            self._records, self._last = state["records"], state["last"]

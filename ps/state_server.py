"""Shard 0's half of a pacer that asks: who trains how fast, and who is to push now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ops.esync import Report
from ops.types import State
from ps import events


class StateServer:
    """The pacer's records; empty and silent for pacers that never ask.

    The records are soft: after a restart they are rebuilt from the next reports.
    """

    def __init__(self, pacer: Any) -> None:
        """Start without records."""
        self._pacer = pacer
        self._state: State | None = pacer.init() if pacer.asks else None
        self._last: tuple[int, State] = (0, {})  # records and summary before somebody left

    def ask(
        self, query: events.Query, members: Sequence[int], over: bool, now: float
    ) -> list[events.Action]:
        """Note a report; answer unless it only begins a round.

        Args:
            query: What the worker says.
            members: Live workers of its group.
            over: The run has ended; everybody is to push and hear of it.
            now: By this shard's clock.
        """
        ready = over
        if self._state is not None:
            finished_at = now - query.age_seconds
            report = Report(query.worker, query.local_steps, query.step_seconds, finished_at,
                            query.query_seconds)  # fmt: skip
            self._state = self._pacer.note(report, self._state)
            answer, self._state = self._pacer.answer(query.worker, members, now, self._state)
            ready = ready or answer
        if query.local_steps == 0:
            return []
        return [events.Answer(query.worker, query.step, query.local_steps, ready)]

    def pushed(self, worker: int) -> None:
        """Hear that a worker waits for its round to be over."""
        if self._state is not None:
            self._state = self._pacer.pushed(worker, self._state)

    def released(self, workers: Sequence[int]) -> None:
        """Hear that these workers' round is over."""
        if self._state is not None:
            self._state = self._pacer.released(workers, self._state)

    def left(self, worker: int) -> None:
        """Hear that a worker has gone."""
        if self._state is None:
            return
        size = len(self._state["records"])
        if size >= self._last[0]:  # at the end of a run everybody leaves
            self._last = size, self._pacer.summary(self._state)
        self._state = self._pacer.left(worker, self._state)

    def summary(self) -> dict[str, Any]:
        """Return the pacer's block of the run's summary, by its name; nothing without records."""
        if self._state is None:
            return {}
        known = self._pacer.summary(self._state) if self._state["records"] else self._last[1]
        return {self._pacer.summary_name: known}

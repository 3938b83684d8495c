"""Shard 0's half of a pacer that asks: who trains how fast, and who is to push now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.pacing.esync import Report
from thinwire.ops.types import State
from thinwire.ps.core import admission, events, refusals

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def query(core: PsCore, event: events.Query, now: float) -> list[events.Action]:
    """Hear how fast a member trains; say whether it is to push, if it asks that."""
    core.membership.heard(event.worker, now)
    if (member := admission.member_of(core, event)) is None:
        epoch = core.membership.epoch
        return [refusals.not_member(event.worker, event.incarnation, event.step, epoch)]
    if event.step <= member.last_step:  # of a round that is over: it must not touch the records
        return [events.Answer(event.worker, event.step, event.local_steps, ready=True)]
    group = core.sync.members_of(event.worker)
    live = [each for each in group if core.sync.is_live(each, core.sync_state)]
    over = core.stop_reason is not None or core.deadlines.drain is not None
    return core.state_server.ask(event, live, over, now)


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
            report = Report(
                query.worker,
                query.local_steps,
                query.step_seconds,
                finished_at,
                query.query_seconds,
            )
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

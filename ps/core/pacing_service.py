"""State server of a pacer that workers query (ESync): shard 0 decides which worker pushes now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.ops.pacing.base import Pacer, PaceReport, QueryingPacer
from thinwire.ops.types import State
from thinwire.ps.core import events


class PacingService:
    """Holds the workers' speeds for a pacer (such as ESync) that decides when workers push.

    A restart of shard 0 may lose the records of the workers' speeds. The workers' next reports
    rebuild the records of the workers' speeds after a restart of shard 0.
    """

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer if isinstance(pacer, QueryingPacer) else None
        self._records: State = {} if self._pacer is None else self._pacer.init()
        # Largest number of workers' speed records so far, and the pacer's summary of these records.
        self._last: tuple[int, State] = (0, {})

    def report(
        self, query: events.Query, members: Sequence[int], over: bool, now: float
    ) -> events.Answer | None:
        """Record a worker's query whether to push now or take another local step; return the
        answer.

        Args:
            query: Query of the worker: whether to push now or take another local step.
            members: Ids of the live workers in the worker's group.
            over: True if the run is ending, so that the answer to every worker is to push now.
            now: Current time of this shard's clock, in seconds.

        Returns:
            The answer to the worker; None if the query only reports that the worker begins a round.
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
        """Record that a worker has pushed and waits for the end of its round."""
        if self._pacer is not None:
            self._records = self._pacer.pushed(worker, self._records)

    def released(self, workers: Sequence[int]) -> None:
        """Record that the round of the given workers is complete and merged."""
        if self._pacer is not None:
            self._records = self._pacer.released(workers, self._records)

    def left(self, worker: int) -> None:
        """Remove the speed records of a worker that has left the run."""
        if self._pacer is None:
            return
        size = len(self._records["records"])
        # All workers leave at the end of a run, before the run's summary is written. The pacer's
        # summary is therefore stored when there are the most speed records.
        if size >= self._last[0]:
            self._last = size, self._pacer.summary(self._records)
        self._records = self._pacer.left(worker, self._records)

    def summary(self) -> dict[str, Any]:
        """Return {pacer's name: its counters} for the run's summary; {} without queries of
        workers.
        """
        if self._pacer is None:
            return {}
        known = self._pacer.summary(self._records) if self._records["records"] else self._last[1]
        return {self._pacer.summary_name: known}

    def state_dict(self, soft: bool) -> State:
        """Return the records of workers' speeds if `soft` is True; a checkpoint contains no
        speeds.
        """
        return {"records": self._records, "last": self._last} if soft else {}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the records of workers' speeds that `state_dict` returned."""
        if soft:
            self._records, self._last = state["records"], state["last"]

"""A worker's half of a pacer that queries the state server before each further local step.

`PacingState` makes the queries and decides by their answers; `PacingClient` waits for the answers
on a thread, `thinwire.simulator.client.SimulatedPacingClient` on a virtual clock.
"""

from __future__ import annotations

import time

from thinwire.ops.pacing import Pacer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.shard_client import ShardClient

#: How long, as a part of a step, to wait for the answer to a query that need not be waited for: it
#: lets the slowest worker learn that it is to push before it begins a step that delays the others.
PATIENCE = 0.05


class PacingState:
    """What earlier rounds have taught, and the decisions that follow from it."""

    def __init__(self) -> None:
        self._query_seconds = 0.0
        self._steps_of_last_round = 1

    def query(
        self,
        incarnation: int,
        step: int,
        local_steps: int,
        step_seconds: float,
        age_seconds: float = 0.0,
    ) -> pb.Query:
        """Return a query.

        Args:
            incarnation: Of the worker.
            step: Of the exchange that would follow.
            local_steps: Done in this round; 0: it has just begun, and nothing is answered.
            step_seconds: Duration of the last one.
            age_seconds: Since it ended.
        """
        return pb.Query(
            incarnation=incarnation,
            step=step,
            local_steps=local_steps,
            step_seconds=step_seconds,
            age_seconds=age_seconds,
            query_seconds=self._query_seconds,
        )

    def decide(
        self, local_steps: int, answer: pb.Answer | None, seconds: float, is_away: bool = False
    ) -> bool:
        """Return whether to push now.

        While the state server is away the worker trains on for as many steps as its last round had,
        and then pushes, which waits for the shard to come back.

        Args:
            local_steps: Done in this round.
            answer: To the query, or to an earlier one of this round; None: there is none.
            seconds: How long it took.
            is_away: Whether the state server cannot be reached.
        """
        if answer is None:
            ready = is_away and local_steps >= self._steps_of_last_round
        else:
            ready = answer.ready
            if answer.local_steps == local_steps:
                self._query_seconds = seconds
        if ready:
            self._steps_of_last_round = local_steps
        return ready


class PacingClient:
    """Queries shard 0 whether to push; for pacers that never query the answer is always "no"."""

    def __init__(self, pacer: Pacer, first_shard: ShardClient) -> None:
        self._queries, self._blocks = pacer.queries, pacer.waits_for_answer
        self._shard = first_shard
        self._state = PacingState()

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Report that the exchange before `step` is over and how long a local step took last."""
        if self._queries:
            incarnation = self._shard.welcome.incarnation
            self._shard.notify(self._state.query(incarnation, step, 0, step_seconds))

    def ready(self, step: int, local_steps: int, step_seconds: float, finished_at: float) -> bool:
        """Return whether to push now.

        Args:
            step: Of the exchange that would follow.
            local_steps: Done in this round; without any there is nothing to push.
            step_seconds: Duration of the last one.
            finished_at: When it ended, by time.monotonic().
        """
        if not self._queries or local_steps == 0:
            return False
        start = time.monotonic()
        incarnation, age = self._shard.welcome.incarnation, start - finished_at
        query = self._state.query(incarnation, step, local_steps, step_seconds, age)
        answer = self._shard.query(query, None if self._blocks else PATIENCE * step_seconds)
        seconds, is_away = time.monotonic() - start, not self._shard.is_member
        return self._state.decide(local_steps, answer, seconds, is_away)

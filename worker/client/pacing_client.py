"""A worker's half of a pacer that asks the state server before each further local step."""

from __future__ import annotations

import time

from thinwire.ops.pacing.pacers import Pacer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.shard_client import ShardClient

#: A query that need not be waited for is given so much of a step: whoever is the slowest hears
#: "push" before it begins a step that nobody waits for gladly.
PATIENCE = 0.05


class PacingClient:
    """Asks shard 0 whether to push; says at once "no" for pacers that never ask.

    While the state server is away (its stream is lost) the worker trains on, for as many steps as
    its last round had, and then pushes, which waits for the shard to come back.
    """

    def __init__(self, pacer: Pacer, first_shard: ShardClient) -> None:
        """Ask nothing yet."""
        self._asks = pacer.asks
        self._blocks = pacer.waits_for_answer
        self._shard = first_shard
        self._query_seconds = 0.0
        self._steps_of_last_round = 1

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Say that the exchange before `step` is over and how long a local step took last."""
        if self._asks:
            self._shard.tell(self._query(step, 0, step_seconds, 0.0))

    def ready(self, step: int, local_steps: int, step_seconds: float, finished_at: float) -> bool:
        """Return whether to push now.

        Args:
            step: Of the exchange that would follow.
            local_steps: Done in this round; without any there is nothing to push.
            step_seconds: Duration of the last one.
            finished_at: When it ended, by time.monotonic().
        """
        if not self._asks or local_steps == 0:
            return False
        start = time.monotonic()
        query = self._query(step, local_steps, step_seconds, start - finished_at)
        patience = None if self._blocks else PATIENCE * step_seconds
        answer = self._shard.query(query, patience)
        if answer is not None:
            if answer.local_steps == local_steps:
                self._query_seconds = time.monotonic() - start
            ready = answer.ready
        else:
            ready = not self._shard.connected and local_steps >= self._steps_of_last_round
        if ready:
            self._steps_of_last_round = local_steps
        return ready

    def _query(self, step: int, local_steps: int, seconds: float, age_seconds: float) -> pb.Query:
        return pb.Query(
            incarnation=self._shard.welcome.incarnation,
            step=step,
            local_steps=local_steps,
            step_seconds=seconds,
            age_seconds=age_seconds,
            query_seconds=self._query_seconds,
        )

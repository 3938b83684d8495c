"""Worker's side of a pacer (a rule when to push), which queries shard 0 before local steps.

The class `PacingState` builds the queries to the state server and decides from its answers. The
class `PacingClient` waits for the answers in the training thread;
`thinwire.simulator.pacing.SimulatedPacingClient` waits on a virtual clock.
"""

from __future__ import annotations

import time

from thinwire.ops.pacing.base import Pacer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.shard_client import ShardClient

#: Longest wait for the state server's answer, as a fraction of a local step's duration, if the
#: pacer can continue without an answer. During a short wait, the slowest worker may still receive
#: the answer "push" before it starts one more step, which would delay all workers.
PATIENCE = 0.05


class PacingState:
    """Decides when a worker pushes, by the state server's answers or its last step count."""

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
        """Return a query by which the state server decides whether this worker must push now.

        Args:
            incarnation: Incarnation (id of one process) of the worker.
            step: Number of the exchange that ends this round of local steps.
            local_steps: Number of local steps that this worker has taken since its last exchange. A
                query with 0 reports the start of the round, and the state server does not answer
                it.
            step_seconds: Duration of the worker's last local step, in seconds.
            age_seconds: Time since the worker's last local step ended, in seconds.
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
        """Return True if the worker must push its changes of weights now.

        While the state server is unreachable, the worker takes as many local steps as in its last
        round and then pushes. While the state server is unreachable, a push waits until the shard
        is reachable again.

        Args:
            local_steps: Number of local steps that this worker has taken since its last exchange.
            answer: The state server's answer to the newest query or to an earlier query of the same
                round; None without an answer.
            seconds: Time from the newest query to the state server's answer, in seconds.
            is_away: True if the state server (in shard 0) cannot be reached.
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
    """Queries shard 0 if this worker must push; `ready` is False for a pacer without queries."""

    def __init__(self, pacer: Pacer, first_shard: ShardClient) -> None:
        self._queries, self._blocks = pacer.queries, pacer.waits_for_answer
        self._shard = first_shard
        self._state = PacingState()

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Report to shard 0 the start of a training round and the last local step's duration."""
        if self._queries:
            incarnation = self._shard.welcome.incarnation
            self._shard.notify(self._state.query(incarnation, step, 0, step_seconds))

    def ready(self, step: int, local_steps: int, step_seconds: float, finished_at: float) -> bool:
        """Return True if the worker must push its changes of weights now.

        Args:
            step: Number of the exchange that ends this round of local steps.
            local_steps: Number of local steps that this worker has taken since its last exchange;
                with 0 there is nothing to push.
            step_seconds: Duration of the worker's last local step, in seconds.
            finished_at: Time at which the last local step ended, by time.monotonic(), in seconds.
        """
        if not self._queries or local_steps == 0:
            return False
        start = time.monotonic()
        incarnation, age = self._shard.welcome.incarnation, start - finished_at
        query = self._state.query(incarnation, step, local_steps, step_seconds, age)
        answer = self._shard.query(query, None if self._blocks else PATIENCE * step_seconds)
        seconds, is_away = time.monotonic() - start, not self._shard.is_member
        return self._state.decide(local_steps, answer, seconds, is_away)

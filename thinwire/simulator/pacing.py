"""A simulated worker's queries to the state server, which schedules local steps (ESync).

`SimulatedPacingClient` corresponds to `thinwire.worker.client.pacing_client.PacingClient` of a real
worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from thinwire.ops.pacing.base import Pacer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.simulator.clock import Clock
from thinwire.simulator.exchange import SimulatedExchange
from thinwire.worker.client.pacing_client import PATIENCE, PacingState


class SimulatedPacingClient:
    """A simulated worker's queries to the state server.

    If the pacer never queries the state server, `decide` always decides to train another
    mini-batch.
    """

    def __init__(self, pacer: Pacer, exchange: SimulatedExchange, clock: Clock) -> None:
        self._queries, self._blocks = pacer.queries, pacer.waits_for_answer
        self._exchange, self._clock = exchange, clock
        self._state = PacingState()
        # Function that receives the decision on the open query; None without an open query.
        self._decide: Callable[[bool], None] | None = None
        self._open = (0, 0)  # training step and number of local steps in the last query
        self._queried_at = 0.0

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Report a training round's start and the last local step's seconds to the state server."""
        if self._queries:
            self._query(step, 0, step_seconds)

    def decide(
        self, step: int, local_steps: int, step_seconds: float, decide: Callable[[bool], None]
    ) -> None:
        """Decide whether to push now; call `decide` with the decision, now or later.

        Args:
            step: Training step (number of exchanges with the PS) of the push that would follow.
            local_steps: Number of local steps that the worker has done in this training round.
                After 0 local steps, the decision is not to push.
            step_seconds: Duration of the last local step, which has just ended, in seconds.
            decide: Function that is called with True to push now, or with False to train another
                mini-batch first.
        """
        if not self._queries or local_steps == 0:
            decide(False)
            return
        self._open, self._decide = (step, local_steps), decide
        self._queried_at = self._clock.now
        self._query(step, local_steps, step_seconds)
        if self._decide is not None and not self._blocks:
            give_up = functools.partial(self._give_up, (step, local_steps))
            self._clock.at(self._clock.now + PATIENCE * step_seconds, give_up)

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Decide by the state server's answer whether to push; None: the server is unreachable."""
        self._settle(answer, is_away=answer is None)

    def _give_up(self, query: tuple[int, int]) -> None:
        if query == self._open and self._decide is not None:
            self._exchange.cancel_query()
            self._settle(None, is_away=False)

    def _settle(self, answer: pb.Answer | None, is_away: bool) -> None:
        decide, self._decide = self._decide, None
        if decide is not None:
            seconds = self._clock.now - self._queried_at
            decide(self._state.decide(self._open[1], answer, seconds, is_away))

    def _query(self, step: int, local_steps: int, step_seconds: float) -> None:
        incarnation = self._exchange.incarnation
        self._exchange.query(self._state.query(incarnation, step, local_steps, step_seconds))

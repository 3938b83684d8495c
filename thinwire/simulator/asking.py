"""A simulated worker's half of a pacer that asks the state server before a further local step."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.ops.pacing.pacers import Pacer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.simulator.clock import Clock
from thinwire.simulator.streams import Streams
from thinwire.worker.client.pacing_client import PATIENCE


class SimulatedPacingClient:
    """What `worker.client.pacing_client.PacingClient` is to a real worker, without waiting.

    Says at once "train on" for pacers that never ask.
    """

    def __init__(self, pacer: Pacer, streams: Streams, clock: Clock) -> None:
        """Ask nothing yet."""
        self._asks, self._blocks = pacer.asks, pacer.waits_for_answer
        self._streams, self._clock = streams, clock
        self._query_seconds = 0.0
        self._decide: Callable[[bool], None] | None = None  # waits for the answer
        self._question = (0, 0)  # step, local steps
        self._asked_at = 0.0
        self._told_to_push = 0  # step that a late answer was about
        self._steps_of_last_round = 1

    def begin_round(self, step: int, step_seconds: float) -> None:
        """Say that the exchange before `step` is over and how long a local step took last."""
        if self._asks:
            self._streams.query(self._query(step, 0, step_seconds))

    def ask(
        self, step: int, local_steps: int, step_seconds: float, decide: Callable[[bool], None]
    ) -> None:
        """Find out whether to push now; `decide` is called with the answer, now or later.

        Args:
            step: Of the exchange that would follow.
            local_steps: Done in this round; without any there is nothing to push.
            step_seconds: Duration of the last one, which has just ended.
            decide: Pushes on True, trains on on False.
        """
        if not self._asks or local_steps == 0:
            decide(False)
            return
        self._streams.query(self._query(step, local_steps, step_seconds))
        if self._told_to_push == step:
            self._steps_of_last_round = local_steps
            decide(True)
            return
        self._question, self._decide = (step, local_steps), decide
        self._asked_at = self._clock.now
        if not self._blocks:
            patience = PATIENCE * step_seconds
            self._clock.at(self._clock.now + patience, lambda: self._give_up((step, local_steps)))

    def hear(self, answer: events.Answer | None) -> None:
        """Take in an answer; None says that there is none: the state server is away.

        Without one the round goes on for as many steps as the last one had.
        """
        if answer is None:
            self._settle(self._question[1] >= self._steps_of_last_round)
            return
        about_now = (answer.step, answer.local_steps) == self._question
        if self._decide is not None and answer.step == self._question[0]:
            if about_now:
                self._query_seconds = self._clock.now - self._asked_at
            if about_now or answer.ready:
                self._settle(answer.ready)
        elif answer.ready:
            self._told_to_push = answer.step

    def _give_up(self, question: tuple[int, int]) -> None:
        if question == self._question:
            self._settle(False)

    def _settle(self, ready: bool) -> None:
        decide, self._decide = self._decide, None
        if decide is not None:
            if ready:
                self._steps_of_last_round = self._question[1]
            decide(ready)

    def _query(self, step: int, local_steps: int, step_seconds: float) -> pb.Query:
        return pb.Query(
            incarnation=self._streams.incarnation,
            step=step,
            local_steps=local_steps,
            step_seconds=step_seconds,
            query_seconds=self._query_seconds,
        )

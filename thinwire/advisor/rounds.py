"""How many local steps make a round, so that its exchange is a small part of it."""

from __future__ import annotations

import dataclasses
import math

from thinwire.runtime.telemetry.predictions import Prediction

#: Local steps of the rounds that are played; those of longer ones follow from these.
PLAYED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """The parts of a round in which all workers wait for the slowest.

    Attributes:
        exchange_seconds: All but the local steps.
        step_seconds: A local step of the slowest worker, its optimizer's work included.
    """

    exchange_seconds: float
    step_seconds: float

    @classmethod
    def of(cls, played: Prediction, step_seconds: float, stepping_seconds: float) -> RoundCosts:
        """Return the costs of rounds of `PLAYED_STEPS`.

        Args:
            played: Their rates, with the optimizer's work in the exchange.
            step_seconds: A mini-batch of the slowest worker.
            stepping_seconds: The local optimizer's work of a step.
        """
        step = step_seconds + stepping_seconds
        return cls(max(0.0, 1 / played.updates_per_second - PLAYED_STEPS * step), step)

    def steps_for(self, rate: float, least: int, most: int) -> int:
        """Return the fewest local steps that are `rate` of a round's time.

        Args:
            rate: Wanted share of the steps, up to 1.
            least: Fewest steps.
            most: Most steps, if so few are not that much of it.

        >>> RoundCosts(4.0, 0.1).steps_for(0.8, 2, 500)
        160
        """
        exchange = rate * self.exchange_seconds
        steps = (1 - rate) * self.step_seconds
        wanted = math.ceil(exchange / steps - 1e-9) if steps * most > exchange else most
        return min(max(least, wanted), most)

    def stretched(self, played: Prediction, steps: int) -> Prediction:
        """Return the rates of rounds of so many steps; their bytes are those of the played ones."""
        rounds = 1 / (self.exchange_seconds + steps * self.step_seconds)
        more = steps / PLAYED_STEPS * rounds / played.updates_per_second
        return dataclasses.replace(
            played,
            updates_per_second=rounds,
            samples_per_second=played.samples_per_second * more,
        )

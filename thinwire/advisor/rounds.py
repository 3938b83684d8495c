"""Choice of the number of local steps in a round, so that the exchange is a small part of it."""

from __future__ import annotations

import dataclasses
import math

from thinwire.runtime.telemetry.predictions import Prediction

#: Local steps of a simulated round; the rates of longer rounds are computed from its rates.
PLAYED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """The parts of a round in which all workers wait for the slowest worker.

    Attributes:
        exchange_seconds: Time of a round without the local steps, in seconds.
        step_seconds: Time of one local step of the slowest worker with the optimizer's work, in
            seconds.
    """

    exchange_seconds: float
    step_seconds: float

    @classmethod
    def of(cls, played: Prediction, step_seconds: float, stepping_seconds: float) -> RoundCosts:
        """Return the costs of simulated rounds of `PLAYED_STEPS` local steps.

        Args:
            played: Rates of the simulated rounds, with the optimizer's work in the exchange.
            step_seconds: Time of a mini-batch of the slowest worker, in seconds.
            stepping_seconds: Time of the local optimizer per step, in seconds.
        """
        step = step_seconds + stepping_seconds
        return cls(max(0.0, 1 / played.updates_per_second - PLAYED_STEPS * step), step)

    def steps_for(self, rate: float, least: int, most: int) -> int:
        """Return the smallest number of local steps that take at least the share `rate` of a round.

        Args:
            rate: Wanted share of the local steps in the time of a round, up to 1.
            least: Smallest number of steps to return.
            most: Largest number of steps to return, even if their share is below `rate`.

        >>> RoundCosts(4.0, 0.1).steps_for(0.8, 2, 500)
        160
        """
        exchange = rate * self.exchange_seconds
        steps = (1 - rate) * self.step_seconds
        sufficient = math.ceil(exchange / steps - 1e-9) if steps * most > exchange else most
        return min(max(least, sufficient), most)

    def stretched(self, played: Prediction, steps: int) -> Prediction:
        """Return the rates of rounds with `steps` local steps; bytes per message stay the same."""
        rounds = 1 / (self.exchange_seconds + steps * self.step_seconds)
        growth = steps / PLAYED_STEPS * rounds / played.updates_per_second
        return dataclasses.replace(
            played,
            updates_per_second=rounds,
            samples_per_second=played.samples_per_second * growth,
        )

"""Chooses a number of local steps per round, so that exchanges take a small part of the time."""

from __future__ import annotations

import dataclasses
import math

from thinwire.runtime.telemetry.predictions import Prediction

#: Number of local steps in a simulated round; the rates of longer rounds are computed from this
#: round's rates.
PLAYED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Exchange time and step time of a training round that ends with the slowest worker's push.

    Attributes:
        exchange_seconds: Time of a training round without its local steps, in seconds.
        step_seconds: Time of one local step (gradient and optimizer) of the slowest worker, in
            seconds.
    """

    exchange_seconds: float
    step_seconds: float

    @classmethod
    def of(cls, played: Prediction, step_seconds: float, stepping_seconds: float) -> RoundCosts:
        """Return exchange and step time of simulated training rounds of `PLAYED_STEPS` local steps.

        Args:
            played: Prediction (updates per second) for training rounds of `PLAYED_STEPS` local
                steps. The simulated exchange time includes the local optimizer's work.
            step_seconds: Time that the slowest worker needs for the gradient of a mini-batch, in
                seconds.
            stepping_seconds: Time that the local optimizer needs per step, in seconds.
        """
        step = step_seconds + stepping_seconds
        return cls(max(0.0, 1 / played.updates_per_second - PLAYED_STEPS * step), step)

    def steps_for(self, rate: float, least: int, most: int) -> int:
        """Return the smallest number of local steps that take the share `rate` of a round's time.

        Args:
            rate: Smallest share, up to 1, of a round's time that the local steps must take.
            least: Smallest number of local steps to return.
            most: Largest number of local steps to return, even if they take less than the share
                `rate`.

        >>> RoundCosts(4.0, 0.1).steps_for(0.8, 2, 500)
        160
        """
        exchange = rate * self.exchange_seconds
        steps = (1 - rate) * self.step_seconds
        sufficient = math.ceil(exchange / steps - 1e-9) if steps * most > exchange else most
        return min(max(least, sufficient), most)

    def stretched(self, played: Prediction, steps: int) -> Prediction:
        """Convert the predicted rates `played` to training rounds of `steps` local steps each."""
        rounds = 1 / (self.exchange_seconds + steps * self.step_seconds)
        growth = steps / PLAYED_STEPS * rounds / played.updates_per_second
        return dataclasses.replace(
            played,
            updates_per_second=rounds,
            samples_per_second=played.samples_per_second * growth,
        )

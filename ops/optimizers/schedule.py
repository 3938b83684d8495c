"""Learning rate schedules, which depend on the consumed fraction of the training run's budget.

The learning rate schedules of --lr_schedule are available in all training methods. Learning rate
schedules count training examples, not updates, so that runs with different synchronization are
comparable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from thinwire.ops.types import ConfigurationError

#: Name of a curve in the flag --lr_schedule -> function that computes the factor (1..0) on the
#: learning rate from the consumed fraction (0..1) of the budget after warm-up.
CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
}
#: Largest number of updates in a run, and largest value of --iter_max.
MOST_UPDATES = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate schedule with drops: the rate is multiplied by a factor at each drop.

    Attributes:
        learning_rate: Learning rate at the start of the training run.
        drops: Pairs (fraction of the run's budget at the drop, factor on the learning rate),
            fractions ascending.

    >>> Schedule(0.5, ((0.5, 0.25),)).rate(0.6)
    0.125
    """

    learning_rate: float
    drops: tuple[tuple[float, float], ...] = ()

    def rate(self, fraction: float) -> float:
        """Return the learning rate when `fraction` (0..1) of the run's budget is consumed."""
        rate = self.learning_rate
        for start, factor in self.drops:
            if fraction >= start:
                rate *= factor
        return rate

    @property
    def goes_on_in_rounds(self) -> bool:
        """True if the learning rate also changes between the local steps of one round."""
        return False

    @property
    def text(self) -> str:
        """Learning rate schedule as text for the run's fingerprint, without the initial rate."""
        return str(self.drops)


@dataclasses.dataclass(frozen=True)
class RateCurve(Schedule):
    """Learning rate schedule with linear warm-up from 0, and a curve down to the final rate.

    Attributes:
        shape: Name of the learning rate curve, a key of `CURVES`.
        warmup: Fraction of the run's budget for linear warm-up, from 0 to below 1.
        floor: Final learning rate as a fraction of `learning_rate`, from 0 to below 1.

    >>> RateCurve(0.5, shape="linear", warmup=0.5).rate(0.25)
    0.25

    Source: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts; the warm-up is
    from Goyal et al., arXiv 1706.02677.
    """

    shape: str = "cosine"
    warmup: float = 0.0
    floor: float = 0.0

    def rate(self, fraction: float) -> float:
        """Return the learning rate when `fraction` (0..1) of the run's budget is consumed."""
        if fraction < self.warmup:
            return self.learning_rate * fraction / self.warmup
        remaining = CURVES[self.shape]((fraction - self.warmup) / (1 - self.warmup))
        return self.learning_rate * (self.floor + (1 - self.floor) * remaining)

    @property
    def goes_on_in_rounds(self) -> bool:
        """True: the learning rate changes with each consumed example, even during a round."""
        return True

    @property
    def text(self) -> str:
        """Learning rate schedule as text for the run's fingerprint, without the initial rate."""
        return f"{self.shape}:warmup={self.warmup:g},floor={self.floor:g}"


@dataclasses.dataclass(frozen=True)
class Budget:
    """The limits of a training run, in applied updates and in training examples.

    Attributes:
        iter_max: Largest number of updates applied to the weights; None means no limit.
        examples: Number of training examples after which the run ends; None means no limit.
    """

    iter_max: int | None
    examples: int | None = None

    def fraction(self, updates: float, samples: int) -> float:
        """Return the larger of the consumed fractions (0..1) of the limits on updates and examples.

        If a run has no limit on updates or examples, the consumed fraction of its budget is 0. If a
        run has only the limit `iter_max` on updates, its budget in examples is iter_max times the
        mean number of examples per update so far, so the consumed fractions of examples and of
        updates are equal.
        """
        by_updates = updates / self.iter_max if self.iter_max else 0.0
        by_examples = samples / self.examples if self.examples else 0.0
        return min(1.0, max(by_updates, by_examples))

    def can_reach(self, updates: int) -> bool:
        """Return True if the budget lets the training run apply `updates` updates."""
        return updates <= (self.iter_max or MOST_UPDATES)

    def end(self, updates: int, samples: int) -> str | None:
        """Return why the run must end, "iter_max" (updates) or "epochs" (examples), or None."""
        if self.iter_max is not None and updates >= self.iter_max:
            return "iter_max"
        if self.examples and samples >= self.examples:
            return "epochs"
        return None


@dataclasses.dataclass(frozen=True)
class RateInRound:
    """The learning rate of a worker's local steps within a training round.

    At each local step the worker estimates, from its own progress, which part of the run's budget
    is consumed.

    Attributes:
        schedule: Learning rate schedule of the run.
        budget: Budget of the training run, in updates and training examples.
        nb_workers: Number of workers that do local steps in parallel.
        longest_round: Number of local steps in a training round; 0 if the number is unknown.
    """

    schedule: Schedule
    budget: Budget
    nb_workers: int
    longest_round: int

    def rate(self, version: int, samples_of_run: int, steps: int, samples: int) -> float:
        """Return the learning rate of the worker's next local step.

        Args:
            version: Number of updates that the run had applied when the round of local steps began.
            samples_of_run: Number of examples that all workers had consumed when the round of local
                steps began.
            steps: Number of local steps that the worker has done since the round began.
            samples: Number of examples that the worker has consumed since the round of local steps
                began.
        """
        updates = version + (steps / self.longest_round if self.longest_round else 0)
        consumed = samples_of_run + self.nb_workers * samples
        return self.schedule.rate(self.budget.fraction(updates, consumed))


@functools.lru_cache
def parse_schedule(learning_rate: float, text: str, flag: str = "lr_schedule") -> Schedule:
    """Return the schedule of the learning rate or of the outer rate that a flag's text describes.

    Args:
        learning_rate: Learning rate (or outer rate) at the start of the run.
        text: Value of the schedule flag: drops, for example ``"0.6:0.2,0.8:0.2"``; or a key of
            `CURVES` with parameters, for example ``"cosine:warmup=0.02"``.
        flag: Name of the flag that sets the schedule, for error messages.

    Raises:
        ConfigurationError: The text of the learning rate schedule is malformed, or a value is out
            of range.
    """
    shape, _, parameters = text.partition(":")
    if shape.strip() not in CURVES:
        return Schedule(learning_rate, parse_drops(text, flag))
    values = {"warmup": 0.0, "floor": 0.0}
    try:
        for pair in filter(str.strip, parameters.split(",")):
            name, value = pair.split("=")
            values[name.strip()] = float(value)
        is_legal = len(values) == 2 and all(0 <= value < 1 for value in values.values())
    except ValueError:
        is_legal = False
    if not is_legal:
        raise ConfigurationError(
            f"--{flag}={text!r}: expected {shape}:warmup=A,floor=B with fractions A and B from 0 "
            "to below 1. A or B may be left out, as in cosine:warmup=0.02."
        )
    return RateCurve(learning_rate, (), shape.strip(), values["warmup"], values["floor"])


def parse_drops(text: str, flag: str = "lr_schedule") -> tuple[tuple[float, float], ...]:
    """Parse drops like ``"0.6:0.2,0.8:0.2"`` into pairs (fraction of the budget, rate factor).

    Args:
        text: Value of the learning rate schedule's flag: drops, for example ``"0.6:0.2,0.8:0.2"``.
        flag: Name of the flag that sets the schedule, for error messages.

    Raises:
        ConfigurationError: The text is not a list of pairs, the fractions do not ascend within (0,
            1), or a factor on the rate is not above 0 and finite.
    """
    try:
        drops = tuple(
            (float(fraction), float(factor))
            for fraction, factor in (pair.split(":") for pair in text.split(",") if pair.strip())
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--{flag}={text!r}: expected 'fraction:factor,...' as in '0.6:0.2,0.8:0.2', "
            f"or {' or '.join(CURVES)}, as in cosine:warmup=0.02."
        ) from error
    fractions = [fraction for fraction, _ in drops]
    legal = all(0 < fraction < 1 for fraction in fractions) and fractions == sorted(set(fractions))
    if not legal or not all(0 < factor < float("inf") for _, factor in drops):
        raise ConfigurationError(
            f"--{flag}={text!r}: expected ascending fractions of the run's budget between 0 and "
            "1, and finite factors above 0."
        )
    return drops

"""The learning rate as a function of the share of the budget that is consumed.

One schedule for all methods, by examples and not by updates, so that runs with different
synchronisation stay comparable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from thinwire.ops.types import ConfigurationError

#: Value of --lr_schedule -> the part of the rate that is left at a share of what follows warm-up.
CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
}
#: Largest number of updates that any run may have, and --iter_max name.
MOST_UPDATES = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`learning_rate` times every factor whose fraction has been reached.

    >>> Schedule(0.1, ((0.5, 0.1),)).rate(0.6)
    0.01
    """

    learning_rate: float
    drops: tuple[tuple[float, float], ...] = ()  # (fraction of the budget, factor), ascending

    def rate(self, fraction: float) -> float:
        """Return the rate when `fraction` (0..1) of the budget is consumed."""
        rate = self.learning_rate
        for start, factor in self.drops:
            if fraction >= start:
                rate *= factor
        return rate

    @property
    def goes_on_in_rounds(self) -> bool:
        """Whether the rate changes between two exchanges of many local steps, too."""
        return False

    @property
    def text(self) -> str:
        """What a fingerprint has of it besides the rate."""
        return str(self.drops)


@dataclasses.dataclass(frozen=True)
class RateCurve(Schedule):
    """Warm-up from 0, and then a curve down to `floor` times the rate.

    Attributes:
        shape: A key of `CURVES`.
        warmup: Share of the budget.
        floor: What is left of the rate at the end, as a fraction.

    >>> RateCurve(0.1, shape="linear", warmup=0.2).rate(0.1)
    0.05

    Source: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, once; warm-up of Goyal et al.,
    arXiv 1706.02677.
    """

    shape: str = "cosine"
    warmup: float = 0.0
    floor: float = 0.0

    def rate(self, fraction: float) -> float:
        """Return the rate when `fraction` (0..1) of the budget is consumed."""
        if fraction < self.warmup:
            return self.learning_rate * fraction / self.warmup
        left = CURVES[self.shape]((fraction - self.warmup) / (1 - self.warmup))
        return self.learning_rate * (self.floor + (1 - self.floor) * left)

    @property
    def goes_on_in_rounds(self) -> bool:
        """True."""
        return True

    @property
    def text(self) -> str:
        """What a fingerprint has of it besides the rate."""
        return f"{self.shape}:warmup={self.warmup:g},floor={self.floor:g}"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What ends a run: applied updates, and optionally examples."""

    iter_max: int | None  # None: no limit
    examples: int | None = None

    def fraction(self, updates: float, samples: int) -> float:
        """Return the consumed share, by whichever limit is nearer.

        Without limits it stays 0. With `iter_max` alone the budget in examples is iter_max times
        the mean examples of an update so far, so the share of examples is the share of updates.
        """
        by_updates = updates / self.iter_max if self.iter_max else 0.0
        by_examples = samples / self.examples if self.examples else 0.0
        return min(1.0, max(by_updates, by_examples))

    def can_reach(self, updates: int) -> bool:
        """Return whether a run of this budget may apply so many updates."""
        return updates <= (self.iter_max or MOST_UPDATES)

    def end(self, updates: int, samples: int) -> str | None:
        """Return the stop reason once the budget is spent."""
        if self.iter_max is not None and updates >= self.iter_max:
            return "iter_max"
        if self.examples and samples >= self.examples:
            return "epochs"
        return None


@dataclasses.dataclass(frozen=True)
class RateInRound:
    """The rate of a worker's local steps, by what the run will have consumed by then.

    Attributes:
        schedule: Of the run.
        budget: Likewise.
        nb_workers: That step beside each other.
        longest_round: Local steps of a round; 0: not known.
    """

    schedule: Schedule
    budget: Budget
    nb_workers: int
    longest_round: int

    def rate(self, version: int, samples_of_run: int, steps: int, samples: int) -> float:
        """Return the rate of the next local step.

        Args:
            version: Updates that the round began at.
            samples_of_run: Examples that the run had consumed then.
            steps: Of this worker since.
            samples: Its examples since.
        """
        updates = version + (steps / self.longest_round if self.longest_round else 0)
        consumed = samples_of_run + self.nb_workers * samples
        return self.schedule.rate(self.budget.fraction(updates, consumed))


@functools.lru_cache
def parse_schedule(learning_rate: float, text: str, flag: str = "lr_schedule") -> Schedule:
    """Return what --learning_rate and --lr_schedule name, or the flags of the outer rate.

    Args:
        learning_rate: Before anything changes it.
        text: ``"0.6:0.2,0.8:0.2"``, or a key of `CURVES` such as ``"cosine:warmup=0.02"``.
        flag: That the text is of.

    Raises:
        ConfigurationError: It is neither, or a value is out of range.
    """
    shape, _, rest = text.partition(":")
    if shape.strip() not in CURVES:
        return Schedule(learning_rate, parse_drops(text, flag))
    values = {"warmup": 0.0, "floor": 0.0}
    try:
        for pair in filter(str.strip, rest.split(",")):
            name, value = pair.split("=")
            values[name.strip()] = float(value)
        is_legal = len(values) == 2 and all(0 <= value < 1 for value in values.values())
    except ValueError:
        is_legal = False
    if not is_legal:
        raise ConfigurationError(
            f"--{flag}={text!r}: expected {shape}:warmup=A,floor=B with fractions from 0 to "
            "below 1, each of which may be left out; such as cosine:warmup=0.02."
        )
    return RateCurve(learning_rate, (), shape.strip(), values["warmup"], values["floor"])


def parse_drops(text: str, flag: str = "lr_schedule") -> tuple[tuple[float, float], ...]:
    """Read ``"0.6:0.2,0.8:0.2"``, the value of a flag.

    Raises:
        ConfigurationError: Not pairs, fractions not ascending within (0, 1), or a factor <= 0.
    """
    try:
        drops = tuple(
            (float(fraction), float(factor))
            for fraction, factor in (pair.split(":") for pair in text.split(",") if pair.strip())
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--{flag}={text!r}: expected 'fraction:factor,...' such as '0.6:0.2,0.8:0.2', "
            f"or {' or '.join(CURVES)}, such as cosine:warmup=0.02."
        ) from error
    fractions = [fraction for fraction, _ in drops]
    legal = all(0 < fraction < 1 for fraction in fractions) and fractions == sorted(set(fractions))
    if not legal or not all(0 < factor < float("inf") for _, factor in drops):
        raise ConfigurationError(
            f"--{flag}={text!r}: fractions must ascend between 0 and 1, factors be above 0 "
            "and finite."
        )
    return drops

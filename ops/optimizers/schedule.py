"""The learning rate as a function of the share of the budget that is consumed.

One schedule for all methods, by examples and not by updates, so that runs with different
synchronisation stay comparable.
"""

from __future__ import annotations

import dataclasses

from thinwire.ops.types import ConfigurationError

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


@dataclasses.dataclass(frozen=True)
class Budget:
    """What ends a run: applied updates, and optionally examples."""

    iter_max: int | None  # None: no limit
    examples: int | None = None

    def fraction(self, updates: int, samples: int) -> float:
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


def parse_drops(text: str) -> tuple[tuple[float, float], ...]:
    """Read ``"0.6:0.2,0.8:0.2"``.

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
            f"--lr_schedule={text!r}: expected 'fraction:factor,...' such as '0.6:0.2,0.8:0.2'."
        ) from error
    fractions = [fraction for fraction, _ in drops]
    legal = all(0 < fraction < 1 for fraction in fractions) and fractions == sorted(set(fractions))
    if not legal or not all(0 < factor < float("inf") for _, factor in drops):
        raise ConfigurationError(
            f"--lr_schedule={text!r}: fractions must ascend between 0 and 1, factors be above 0 "
            "and finite."
        )
    return drops

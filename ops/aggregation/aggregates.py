"""Aggregates that merge workers' updates: the mean, the median and the trimmed mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

from thinwire.ops.options import FlagRule, number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import Update

#: Fewest workers of a group in which the honest workers outvote one faulty worker.
LEAST_MEMBERS = 3


class Aggregate(Policy, Protocol):
    """Merges the workers' updates of a round on a shard server into one update.

    A weighting policy has already scaled each worker's update separately.
    """

    @property
    def name(self) -> str:
        """Value of the flag --aggregate that selects this aggregate."""

    @property
    def is_robust(self) -> bool:
        """True if the aggregate lets the updates of honest workers outvote a faulty update."""
        return True

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Merge one or more updates of a shard server with `size` weights into one update."""


@dataclasses.dataclass(frozen=True)
class Mean(Aggregate):
    """Aggregate that is the mean of the workers' updates: every worker has the same weight."""

    name: ClassVar[str] = "mean"
    is_robust: ClassVar[bool] = False

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the mean of one or more updates of a shard with `size` weights."""
        from thinwire.ops.aggregation import merge

        return merge.mean_update(updates, size)


@dataclasses.dataclass(frozen=True)
class Median(Aggregate):
    """Aggregate that is, for each weight, the median of the workers' updates.

    If the number of updates is even, the median is the mean of the two middle values.

    The median resists arbitrary updates from fewer than half of the workers whose updates are
    merged.

    Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018, definition 1.
    """

    name: ClassVar[str] = "median"

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the median of one or more updates of a shard with `size` weights."""
        from thinwire.ops.aggregation import merge

        return merge.middle_update(updates, size, (len(updates) - 1) // 2)


@dataclasses.dataclass(frozen=True)
class TrimmedMean(Aggregate):
    """Aggregate that is, per weight, the mean of updates without the smallest and largest ones.

    Attributes:
        trim_fraction: Fraction f, above 0 and below 0.5, of a weight's m update values that the
            trimmed mean leaves out at either end of their order: floor(f m) smallest and as many
            largest values, at least one of each if m >= 3.

    Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018, definition 2.
    """

    trim_fraction: float = setting(
        number(
            "trim_fraction",
            0.25,
            "Fraction of the workers' values of an entry that --aggregate=trimmed_mean leaves out "
            "at each end, at least one value.",
            "fraction of the group",
            rule=FlagRule(lambda value: 0 < value < 0.5, "must be above 0 and below 0.5"),
        )
    )
    name: ClassVar[str] = "trimmed_mean"

    def num_trimmed(self, count: int) -> int:
        """Return how many of `count` ordered values the trimmed mean leaves out at either end."""
        if count < LEAST_MEMBERS:
            return 0
        # The summand 1e-9 offsets rounding: 0.29 * 100 is 28.999999999999996 in float64, and must
        # trim 29 values.
        return max(1, int(self.trim_fraction * count + 1e-9))

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the trimmed mean of one or more updates of a shard with `size` weights."""
        from thinwire.ops.aggregation import merge

        return merge.middle_update(updates, size, self.num_trimmed(len(updates)))


#: Value of the flag --aggregate -> class of the aggregate, which merges workers' updates.
AGGREGATES: dict[str, type[Aggregate]] = {
    Mean.name: Mean,
    Median.name: Median,
    TrimmedMean.name: TrimmedMean,
}

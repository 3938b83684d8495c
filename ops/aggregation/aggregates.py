"""The aggregates: the mean, and two that no outlier can move."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.types import ConfigurationError, Update

#: Fewest members of a group in which one faulty worker is outvoted.
LEAST_MEMBERS = 3


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean: every worker counts the same."""

    name: ClassVar[str] = "mean"
    is_robust: ClassVar[bool] = False

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the mean of one or more updates; `size` is the shard's number of entries."""
        from thinwire.ops.aggregation import merge

        return merge.mean_update(updates, size)


@dataclasses.dataclass(frozen=True)
class Median:
    """The median of each entry; of an even number the mean of the middle two.

    Holds against fewer than half of a group's members, whatever they send.

    Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018, definition 1.
    """

    name: ClassVar[str] = "median"
    is_robust: ClassVar[bool] = True

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the median of one or more updates; `size` is the shard's number of entries."""
        from thinwire.ops.aggregation import merge

        return merge.middle_update(updates, size, (len(updates) - 1) // 2)


@dataclasses.dataclass(frozen=True)
class TrimmedMean:
    """The mean of each entry without its smallest and its largest values.

    Attributes:
        trim_fraction: f, above 0 and below 0.5. Of m values floor(f m) are left out on either
            side, at least one where three or more are there.

    Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018, definition 2.
    """

    trim_fraction: float = 0.25
    name: ClassVar[str] = "trimmed_mean"
    is_robust: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse to trim nothing, or everything."""
        if not 0 < self.trim_fraction < 0.5:
            raise ConfigurationError(
                f"--trim_fraction={self.trim_fraction}: expected a fraction above 0 and below 0.5 "
                "(0 is --aggregate=mean, 0.5 is --aggregate=median)."
            )

    def num_trimmed(self, count: int) -> int:
        """Return how many of `count` values are left out on either side."""
        if count < LEAST_MEMBERS:
            return 0
        return max(1, int(self.trim_fraction * count + 1e-9))

    def merge(self, updates: Sequence[Update], size: int) -> Update:
        """Return the trimmed mean of one or more updates; `size` is the shard's entries."""
        from thinwire.ops.aggregation import merge

        return merge.middle_update(updates, size, self.num_trimmed(len(updates)))

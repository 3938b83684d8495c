"""What the updates of one release are merged into: their mean, or something no outlier can move.

A policy beside the weighting: the weighting scales each update, this makes one of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.registry import coding_of
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.types import ConfigurationError, Update

if TYPE_CHECKING:
    from thinwire.ops.methods.method import Method

#: Fewest members of a group in which one faulty worker is outvoted.
LEAST_MEMBERS = 3


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean: workers weigh alike."""

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


Aggregate = Mean | Median | TrimmedMean

#: --aggregate value -> policy.
AGGREGATES: dict[str, type[Mean] | type[Median] | type[TrimmedMean]] = {
    each.name: each for each in (Mean, Median, TrimmedMean)
}


def check(method: Method) -> list[str]:
    """Return warnings about a robust rule that makes no difference.

    Raises:
        ConfigurationError: Groups too small to outvote anybody, or updates that are mostly zeros.
    """
    if not method.aggregate.is_robust:
        return []
    here = f"--aggregate={method.aggregate.name}"
    if method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"{here} needs every update by itself, and --collective={method.collective} hands on "
            "sums of them; take --collective=ps, or leave --aggregate out."
        )
    if coding_of(method.codec).sends_fraction:
        raise ConfigurationError(
            f"{here} with --codec={method.seams['codec']}: what few workers send of an entry is "
            "outvoted by the zeros of the others, so nothing would be learnt. Take --codec=dense "
            "or powersgd, or guard with --max_update_norm or --update_norm_factor instead."
        )
    sizes = [len(group) for group in method.sync.groups]
    if method.sync.auto is None and max(sizes) == 1:
        return [f"{here} with groups of one: every update is released alone."]
    if method.sync.auto is not None or min(sizes) < LEAST_MEMBERS:
        raise ConfigurationError(
            f"{here} needs groups of {LEAST_MEMBERS} or more members, known from the start, so "
            f"that one faulty worker is outvoted; the smallest of --sync={method.seams['sync']} "
            f"{'is not known' if method.sync.auto else f'has {min(sizes)}'}. Change --groups or "
            "--nb_workers, or leave --aggregate out."
        )
    return []

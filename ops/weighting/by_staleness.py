"""Weighting policies without state: full weight, or weight by staleness or number of examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.policy import Policy
from thinwire.ops.types import State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext, staleness


class StatelessWeighting(Policy):
    """Base class of weighting policies that have no state."""

    needs_copies: ClassVar[bool] = False

    def init(self, size: int, version: int = 0) -> State:
        """Return an empty state, because the weighting policy needs no state."""
        return {}


@dataclasses.dataclass(frozen=True)
class Unweighted(StatelessWeighting):
    """Weighting policy that gives every update, even a stale one, its full weight."""

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals (received updates) unchanged, at full weight."""
        return list(arrivals), state


@dataclasses.dataclass(frozen=True)
class Inverse(StatelessWeighting):
    """Scale updates by 1/Y; staleness Y = max(1, current version - version computed at + 1).

    Source: Jiang et al. (CCGrid 2019), Grouping-SGD's weight factor WF.
    Differences: v is the version at which the update was computed, in every mode.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals (received updates), each update divided by its staleness Y."""
        return [
            scaled(arrival, 1.0 / staleness(context.version, arrival.computed_at), context)
            for arrival in arrivals
        ], state


@dataclasses.dataclass(frozen=True)
class BySamples(StatelessWeighting):
    """Weighting policy that scales each update by its fraction of all updates' training examples.

    In a round, a shard server merges m updates of workers, which are computed from N training
    examples in total. In a round of m updates from N examples, an update from n examples is
    multiplied by ``n * m / N``, so the mean of the updates is the mean over all examples. If all
    updates of a round are computed from equally many training examples, BySamples does not change
    them.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the updates, each multiplied by its fraction of the training examples."""
        counts = [arrival.head.samples for arrival in arrivals]
        total = sum(counts)
        if not total or min(counts) == max(counts):
            return list(arrivals), state
        return [
            scaled(arrival, count * len(counts) / total, context)
            for arrival, count in zip(arrivals, counts, strict=True)
        ], state


def scaled(arrival: Arrival, weight: float, context: ReleaseContext) -> Arrival:
    """Return the arrival (received update) with its values multiplied by `weight`."""
    if weight == 1.0:
        return arrival
    values = context.kernels.scale(arrival.update.values, weight)
    return dataclasses.replace(arrival, update=Update(arrival.update.indices, values))

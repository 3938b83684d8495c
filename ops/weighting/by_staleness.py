"""Weightings without state: full weight, or a weight that falls with an update's staleness."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.types import State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext, staleness


class StatelessWeighting:
    """Base class of weightings that have no state."""

    needs_copies: ClassVar[bool] = False

    def init(self, size: int, version: int = 0) -> State:
        """Return the empty state; `size` is the shard's number of weights."""
        return {}


@dataclasses.dataclass(frozen=True)
class Unweighted(StatelessWeighting):
    """Gives every update its full weight, even if the update is stale."""

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals with unchanged updates."""
        return list(arrivals), state


@dataclasses.dataclass(frozen=True)
class Inverse(StatelessWeighting):
    """Scale an update by 1/Y, Y = max(1, T - v + 1): the update is from version v, the shard at T.

    Source: Jiang et al. (CCGrid 2019), Grouping-SGD's weight factor WF.
    Differences: v is the version at which the update was computed, in every mode.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals, with each update divided by its staleness Y."""
        return [
            scaled(arrival, 1.0 / staleness(context.version, arrival.computed_at), context)
            for arrival in arrivals
        ], state


def scaled(arrival: Arrival, weight: float, context: ReleaseContext) -> Arrival:
    """Return the arrival with its update multiplied by `weight`."""
    if weight == 1.0:
        return arrival
    values = context.kernels.scale(arrival.update.values, weight)
    return dataclasses.replace(arrival, update=Update(arrival.update.indices, values))

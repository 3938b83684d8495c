"""Weightings without state: an update counts in full, or by its own staleness."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.types import State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext, staleness


class StatelessWeighting:
    """A weighting without state."""

    needs_copies: ClassVar[bool] = False

    def init(self, size: int, version: int = 0) -> State:
        """Return the empty state; `size` is the shard's number of entries."""
        del size, version
        return {}


@dataclasses.dataclass(frozen=True)
class Unweighted(StatelessWeighting):
    """Every update counts in full."""

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals as they are."""
        del context
        return list(arrivals), state


@dataclasses.dataclass(frozen=True)
class Inverse(StatelessWeighting):
    """Scale an update by 1/Y, Y = max(1, T - v + 1), v the version it was computed at.

    Source: Jiang et al. (CCGrid 2019), Grouping-SGD's weight factor WF.
    Differences: counted from the version the update was computed at, in every mode.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals, each divided by its own staleness Y."""
        return [
            scaled(arrival, 1.0 / staleness(context.version, arrival.computed_at), context)
            for arrival in arrivals
        ], state


def scaled(arrival: Arrival, weight: float, context: ReleaseContext) -> Arrival:
    """Return an arrival with its update multiplied."""
    if weight == 1.0:
        return arrival
    values = context.kernels.scale(arrival.update.values, weight)
    return dataclasses.replace(arrival, update=Update(arrival.update.indices, values))

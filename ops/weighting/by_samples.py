"""A weighting by the examples behind an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ops.weighting.by_staleness import StatelessWeighting, scaled


@dataclasses.dataclass(frozen=True)
class BySamples(StatelessWeighting):
    """Scale each update of a release by its share of the examples.

    An update of n examples, one of m in a release of N examples together, is multiplied by
    ``n * m / N``, so that the mean of the updates is the mean over all examples. Where all have
    as many nothing is multiplied.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals, each multiplied by its share."""
        counts = [arrival.samples for arrival in arrivals]
        total = sum(counts)
        if not total or min(counts) == max(counts):
            return list(arrivals), state
        return [
            scaled(arrival, arrival.samples * len(counts) / total, context) for arrival in arrivals
        ], state

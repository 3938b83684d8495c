"""Weighting policy that scales updates by their numbers of training examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ops.weighting.by_staleness import StatelessWeighting, scaled


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

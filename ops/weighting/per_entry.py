"""AdaComp's damping: an update entry counts less, the more newer updates changed its weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.options import choice, integer
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import Int32, State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext

#: Largest number of forgotten updates that is counted. The sum of this number and the hits within
#: the window must fit an int32.
_MOST_FORGOTTEN = 1 << 30


@dataclasses.dataclass(frozen=True)
class PerEntry(Policy):
    """Divides each update entry by the number of updates that changed its weight since the pull.

    AdaComp's learning rate is ``rate(i) = eta / max(1, sigma_i)``, where sigma_i is the number of
    updates s with ``v <= s < T`` that have a value for weight i, v is the version of the weights at
    which the worker computed its update, and T is the shard server's version. An update that was
    computed at the current version of the weights is not damped.

    Attributes:
        window: Largest number of applied updates that the shard server remembers. Older updates are
            forgotten even if a worker still computes at an older version.
        beyond_window: Treatment of an update that was computed before the oldest remembered update.
            ``count``: sigma (the number of newer updates of a weight) is the number of remembered
            updates of the weight plus the number of all forgotten updates, an upper bound.
            ``reject``: the update is dropped.

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/methods/adacomp.md.
    """

    window: int = setting(
        integer(
            "staleness_window",
            1024,
            "Largest number of past updates that --weighting=per_entry remembers to count changes.",
            "updates",
            low=1,
        )
    )
    beyond_window: str = setting(
        choice(
            "beyond_window",
            "count",
            "Treatment by --weighting=per_entry of an update that is older than "
            "--staleness_window: count every forgotten update as a change of each weight, or "
            "reject the old update.",
            ("count", "reject"),
        )
    )
    needs_copies: ClassVar[bool] = False

    def init(self, size: int, version: int = 0) -> State:
        """Return a state with an empty history of updates; `size` is the number of weights."""
        from thinwire.ops.weighting import hit_counts

        return {
            "first": version,  # version of the weights before the first update in "history"
            "history": [],  # [k] int32 ascending positions of each update; None for all positions
            "scratch": hit_counts.begin(size, self.window),
        }

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the received updates damped, and record which weights the updates change."""
        damped = [
            self._damped(arrival, context, state)
            for arrival in arrivals
            if self.beyond_window == "count" or arrival.computed_at >= state["first"]
        ]
        if damped:
            from thinwire.ops.weighting import hit_counts

            touched = _touched(damped)
            state["history"].append(touched)
            hit_counts.record(touched, context.version, state["first"], state["scratch"])
        self._forget(context, state)
        return damped, state

    def _damped(self, arrival: Arrival, context: ReleaseContext, state: State) -> Arrival:
        seen_from = max(arrival.computed_at, state["first"])
        forgotten = min(seen_from - arrival.computed_at, _MOST_FORGOTTEN)
        if seen_from >= context.version and not forgotten:
            return arrival
        from thinwire.ops.weighting import hit_counts

        update, first, history = arrival.update, state["first"], state["history"]
        sigma = hit_counts.since(
            seen_from, first, history, update.indices, context.kernels, state["scratch"]
        )
        weights = context.kernels.damp(sigma + forgotten if forgotten else sigma)
        return dataclasses.replace(arrival, update=Update(update.indices, update.values * weights))

    def _forget(self, context: ReleaseContext, state: State) -> None:
        newest = state["first"] + len(state["history"])
        keep_from = max(min(context.oldest_base, newest), newest - self.window, state["first"])
        del state["history"][: keep_from - state["first"]]
        state["first"] = keep_from


def _touched(arrivals: Sequence[Arrival]) -> Int32 | None:
    """Return the union of the updates' positions as int32; None if an update is dense."""
    import numpy as np

    from thinwire.ops.kernels.numpy_ops import union

    sets = [arrival.update.indices for arrival in arrivals if arrival.update.indices is not None]
    return union(sets).astype(np.int32) if len(sets) == len(arrivals) else None

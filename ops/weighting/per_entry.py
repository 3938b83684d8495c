"""AdaComp's damping: the weight of an entry falls with the number of updates that hit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.types import ConfigurationError, State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Largest number of forgotten releases that is counted. The sum with the hits within the window
#: must fit an int32.
_MOST_FORGOTTEN = 1 << 30


@dataclasses.dataclass(frozen=True)
class PerEntry:
    """Divides each entry by the number of updates that hit it since the worker's pull.

    ``rate(i) = eta / max(1, sigma_i)``. sigma_i is the number of releases s with ``v <= s < T``
    whose index set contains i; v is the version at which the update was computed, T the shard's
    version. A fresh update has an empty window and is not damped.

    Attributes:
        window: Largest number of remembered releases. Older releases are forgotten even if a
            worker still computes at an older version.
        beyond_window: Treatment of an update that is older than the window. ``count``: the hits in
            the window plus the number of forgotten releases are used, an upper bound of sigma.
            ``reject``: the update is dropped.

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/methods/adacomp.md.
    """

    window: int = 1024
    beyond_window: str = "count"
    needs_copies: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Reject an empty window, or an unknown value of `beyond_window`."""
        if self.window < 1:
            raise ConfigurationError(
                f"--staleness_window={self.window}: expected 1 or more remembered updates."
            )
        if self.beyond_window not in ("count", "reject"):
            raise ConfigurationError(
                f"--beyond_window={self.beyond_window!r}: expected 'count' or 'reject'."
            )

    def init(self, size: int, version: int = 0) -> State:
        """Return an empty history; `size` is the shard's number of entries."""
        from thinwire.ops.weighting import hit_counts

        return {
            "first": version,  # version of history[0]
            "history": [],  # ascending int32 [k] positions per release, or None for all
            "scratch": hit_counts.begin(size, self.window),
        }

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals damped per entry, and record which entries the release hits."""
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


def _touched(arrivals: Sequence[Arrival]) -> NDArray[np.int32] | None:
    """Return the union of the arrivals' positions as int32; None if an arrival is dense."""
    import numpy as np

    from thinwire.ops.kernels.numpy_ops import union

    sets = [arrival.update.indices for arrival in arrivals if arrival.update.indices is not None]
    return union(sets).astype(np.int32) if len(sets) == len(arrivals) else None

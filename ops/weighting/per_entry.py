"""AdaComp's damping: each entry counts by the updates that have hit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.types import ConfigurationError, State, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Of releases beyond a window: with the hits within, a count that fits an int32.
_MOST_FORGOTTEN = 1 << 30


@dataclasses.dataclass(frozen=True)
class PerEntry:
    """AdaComp's damping: divide each entry by the updates that hit it since the worker's pull.

    ``rate(i) = eta / max(1, sigma_i)``, sigma_i = number of releases s with
    ``v <= s < T``, v the version the update was computed at, whose index set holds i; an empty
    window (fresh update) damps nothing.

    Attributes:
        window: Most releases remembered; older ones are forgotten even if a worker is behind them.
        beyond_window: An update older than the window is weighed with the retained part plus the
            number of forgotten releases (``count``: an upper bound of sigma), or dropped
            (``reject``).

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/methods/adacomp.md.
    """

    window: int = 1024
    beyond_window: str = "count"
    needs_copies: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse an empty window or an unknown policy beyond it."""
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
            "first": version,  # of history[0]
            "history": [],  # per release: ascending int32 [k] positions, or None for all
            "scratch": hit_counts.begin(size, self.window),
        }

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals damped entry by entry, and remember which entries they touch."""
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
    """Return the union of the arrivals' positions as int32, or None when one is dense."""
    import numpy as np

    from thinwire.ops.kernels.numpy_ops import union

    sets = [each.update.indices for each in arrivals if each.update.indices is not None]
    return union(sets).astype(np.int32) if len(sets) == len(arrivals) else None

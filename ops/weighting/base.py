"""The Weighting seam: what is a stale update worth?

A weighting sees the updates of one release together with the version each was computed at, and
returns them scaled. State is plain data; `window` below is a list of index arrays. Where a
weighting's `needs_copies` is true, the shard keeps what each worker was last handed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.types import ConfigurationError, State, Update
from thinwire.ops.weighting.dc_asgd import DcAsgd

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


#: Of releases beyond a window: with the hits within, a count that fits an int32.
_MOST_FORGOTTEN = 1 << 30


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One worker's update at the moment of its release."""

    worker: int
    update: Update
    base_version: int  # shard version that the worker held when it pushed
    step: int = 0  # of the push; 0: not known
    lag: int = 0  # versions from the one the update was computed at to base_version

    @property
    def computed_at(self) -> int:
        """Shard version the update was computed at."""
        return self.base_version - self.lag


@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """What a weighting may know of the shard."""

    version: int  # T: updates applied so far
    oldest_base: int  # smallest base version a live worker may still push from
    kernels: Any  # ops.kernels.Kernels
    theta: Float32  # [n], read-only: the weights before this release
    copies: Mapping[int, Float32]  # version -> theta [n] then, of what workers hold if needed
    # Worker -> [n], what it really has, where it was sent less than all (the same if needed).
    held: Mapping[int, Float32] = dataclasses.field(default_factory=dict)


class _StatelessWeighting:
    """A weighting without state."""

    needs_copies: ClassVar[bool] = False

    def init(self, size: int) -> State:
        """Return the empty state; `size` is the shard's number of entries."""
        del size
        return {}


@dataclasses.dataclass(frozen=True)
class Unweighted(_StatelessWeighting):
    """Every update counts in full."""

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals as they are."""
        del context
        return list(arrivals), state


@dataclasses.dataclass(frozen=True)
class Inverse(_StatelessWeighting):
    """Scale an update by 1/Y, Y = max(1, T - v + 1), v the version it was computed at.

    Source: Jiang et al. (CCGrid 2019), Grouping-SGD's weight factor WF.
    Differences: counted from the version the update was computed at, in every mode.
    """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals, each divided by its own staleness Y."""
        return [
            _scaled(arrival, 1.0 / staleness(context.version, arrival.computed_at), context)
            for arrival in arrivals
        ], state


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

    def init(self, size: int) -> State:
        """Return an empty history; `size` is the shard's number of entries."""
        from thinwire.ops.weighting import hit_counts

        return {
            "first": 0,  # version of history[0]
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
            hit_counts.note(touched, context.version, state["first"], state["scratch"])
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


def staleness(version: int, computed_at: int) -> int:
    """Return Y = max(1, T - v + 1), v the version an update was computed at; 1 means fresh."""
    return max(1, version - computed_at + 1)


def _scaled(arrival: Arrival, weight: float, context: ReleaseContext) -> Arrival:
    if weight == 1.0:
        return arrival
    values = context.kernels.scale(arrival.update.values, weight)
    return dataclasses.replace(arrival, update=Update(arrival.update.indices, values))


def _touched(arrivals: Sequence[Arrival]) -> Any:
    """Return the union of the arrivals' positions as int32, or None when one is dense."""
    import numpy as np

    from thinwire.ops.kernels.numpy_ops import union

    sets = [arrival.update.indices for arrival in arrivals]
    if any(indices is None for indices in sets):
        return None
    return union(sets).astype(np.int32)  # type: ignore[arg-type]


Weighting = Unweighted | Inverse | PerEntry | DcAsgd

#: --weighting value -> policy.
WEIGHTINGS: dict[str, type[Unweighted] | type[Inverse] | type[PerEntry] | type[DcAsgd]] = {
    "none": Unweighted,
    "inverse": Inverse,
    "per_entry": PerEntry,
    "dc_asgd": DcAsgd,
}

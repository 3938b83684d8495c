"""Counts of the releases that hit each entry of a shard, so that long windows are not walked.

The state is a running count per entry, and copies of the counts at some versions, the marks. The
hits since a mark are a difference of counts. Only the releases between the base version and the
next mark are walked. The counts follow from the history of releases, so snapshots do not contain
them. Short windows (few workers) have neither counts nor marks and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.kernels.base import HitSet
    from thinwire.ops.types import Int64

#: Number of releases between two marks. Windows shorter than two intervals have no marks.
MARK_INTERVAL = 32


def begin(size: int, longest_window: int) -> State:
    """Return the state for a shard of `size` entries and windows up to `longest_window`."""
    # Counts wrap around. A difference of counts is still exact if it fits the type, and no window
    # has more hits than `longest_window`.
    dtype = np.uint16 if longest_window <= np.iinfo(np.uint16).max else np.uint32
    return {
        "walked": np.zeros(size, np.uint16),  # [size] scratch of kernels.hits; zero between calls
        "counts": np.zeros(0, dtype),  # [size] hits since the first mark; empty: no marks
        "num_dense": 0,  # releases since the first mark that hit every entry
        "marks": [],  # {"version", "counts" [size], "num_dense"}, versions ascending
    }


def record(touched: HitSet, version: int, first: int, state: State) -> None:
    """Record the release that follows `version`.

    Args:
        touched: Unique positions that the release hits; None means all positions.
        version: Number of updates applied before the release.
        first: Oldest version from which hits may be counted.
        state: State from `begin`, changed in place.
    """
    marks = state["marks"]
    while marks and marks[0]["version"] < first:
        del marks[0]
    if version - first < 2 * MARK_INTERVAL:
        state["counts"] = state["counts"][:0]
        marks.clear()
        return
    if not len(state["counts"]):
        state["counts"] = np.zeros(len(state["walked"]), state["counts"].dtype)
        state["num_dense"] = 0
    if not marks or version - marks[-1]["version"] >= MARK_INTERVAL:
        counts = state["counts"].copy()
        marks.append({"version": version, "counts": counts, "num_dense": state["num_dense"]})
    if touched is None:
        state["num_dense"] += 1
    else:
        state["counts"][touched] += 1


def since(
    base: int,
    first: int,
    history: Sequence[HitSet],
    indices: Int64 | None,
    kernels: Kernels,
    state: State,
) -> NDArray[np.int32]:
    """Count, for each entry, the releases since version `base` that hit the entry.

    Args:
        base: Version from which hits are counted, at least `first`.
        first: Version of history[0].
        history: Positions that each release hit, or None if it hit all positions.
        indices: [k] ascending positions of the entries to count for; None means all entries.
        kernels: Kernels that count the hits of the walked releases.
        state: State from `begin`.

    Returns:
        Number of hits per entry, [k] (or [size]) int32.
    """
    marks = state["marks"]
    mark = None
    if marks:
        # Marks are one interval apart, so this is the first mark at `base` or later. Only a base
        # before the first mark makes the walk longer than one interval.
        near = (base - marks[0]["version"] + MARK_INTERVAL - 1) // MARK_INTERVAL
        mark = marks[max(0, near)] if near < len(marks) else None
    stop = len(history) if mark is None else mark["version"] - first
    sigma = kernels.hits(history[base - first : stop], indices, state["walked"])
    if mark is None:
        return sigma
    newest, marked = state["counts"], mark["counts"]
    more = newest - marked if indices is None else newest[indices] - marked[indices]
    total: NDArray[np.int32] = (
        sigma + more.astype(np.int32) + np.int32(state["num_dense"] - mark["num_dense"])
    )
    return total

"""How often each entry of a shard was hit, kept so that long windows need not be walked.

A running count per entry and copies of it at some versions, the marks: the hits since a mark are a
difference. Only from the base version to the next mark the releases themselves are walked. All of
this follows from the history of releases, so nothing of it is saved; short windows (few workers)
have neither counts nor marks and cost nothing.
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

#: Releases between two marks, and in a window that is walked in whole.
MARK_INTERVAL = 32


def begin(size: int, longest_window: int) -> State:
    """Return the state for a shard of `size` entries and windows up to `longest_window`.

    Counts wrap around; a difference is exact as long as it fits the type.
    """
    dtype = np.uint16 if longest_window <= np.iinfo(np.uint16).max else np.uint32
    return {
        "walked": np.zeros(size, np.uint16),  # [size], zero between calls: scratch of kernels.hits
        "counts": np.zeros(0, dtype),  # [size] since the first mark; empty: no marks
        "num_dense": 0,  # releases since the first mark that hit every entry
        "marks": [],  # {"version", "counts" [size], "num_dense"}, versions ascending
    }


def record(touched: HitSet, version: int, first: int, state: State) -> None:
    """Record the release that follows `version`.

    Args:
        touched: Unique positions that it hits; None is all.
        version: Updates applied before it.
        first: Oldest version that hits may be counted from.
        state: Changed in place.
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
    """Count the releases from version `base` on that hit each entry.

    Args:
        base: At least `first`.
        first: Version of history[0].
        history: Per release its positions, or None for all.
        indices: [k] ascending: the entries to count for; None: all.
        kernels: That count within a window.
        state: From `begin`.

    Returns:
        [k] (or [size]) int32.
    """
    marks = state["marks"]
    mark = None
    if marks:  # at most one interval apart, but for the first
        near = (base - marks[0]["version"] + MARK_INTERVAL - 1) // MARK_INTERVAL
        mark = marks[max(0, near)] if near < len(marks) else None
    stop = len(history) if mark is None else mark["version"] - first
    sigma = kernels.hits(history[base - first : stop], indices, state["walked"])
    if mark is None:
        return sigma
    now, then = state["counts"], mark["counts"]
    more = now - then if indices is None else now[indices] - then[indices]
    total: NDArray[np.int32] = (
        sigma + more.astype(np.int32) + np.int32(state["num_dense"] - mark["num_dense"])
    )
    return total

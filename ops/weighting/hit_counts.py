"""Counts of the updates that hit (have a value for) each weight, to avoid loops over updates.

An update hits a weight if it sends a value for the weight. The state of the hit counts is a running
count of updates per weight, and copies of the counts at some versions of the weights. The copies of
the hit counts at some versions of the weights are called marks. The number of hits since a mark (a
copy of the hit counts) is a difference of counts, so only the updates between a worker's version of
the weights and the next mark are read one by one. The hit counts follow from the history of
updates, so checkpoints do not contain the counts. Short windows of updates (few workers) need no
hit counts or marks (copies of the counts).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.ops.kernels.base import HitSet, Kernels
from thinwire.ops.types import Int32, Int64, State

#: Number of updates between two marks (copies of the hit counts). A window of fewer than two
#: intervals has no marks.
MARK_INTERVAL = 32


def begin(size: int, longest_window: int) -> State:
    """Return the hit counts' state for `size` weights and up to `longest_window` updates."""
    # Hit counts wrap around. A difference of counts is still exact if it fits the dtype: a window
    # has at most `longest_window` hits of one weight.
    dtype = np.uint16 if longest_window <= np.iinfo(np.uint16).max else np.uint32
    return {
        "walked": np.zeros(size, np.uint16),  # [size] scratch of kernels.hits; zero between calls
        "counts": np.zeros(0, dtype),  # [size] hits since the first mark; [0] if there are no marks
        "num_dense": 0,  # number of updates since the first mark that hit every weight
        "marks": [],  # dicts of "version", "counts" [size] and "num_dense", versions ascending
    }


def record(touched: HitSet, version: int, first: int, state: State) -> None:
    """Record which weights an update hits (has a value for).

    Args:
        touched: Unique positions that the update hits; None means all positions.
        version: Number of updates that the shard server applied before this update.
        first: Oldest version of the weights from which hits (updates of a weight) may be counted.
        state: State of the hit counts from `begin`, which `record` changes in place.
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
) -> Int32:
    """Count, for each weight, the updates since version `base` that hit the weight.

    Args:
        base: Version of the weights from which hits are counted, at least `first`.
        first: Version of the weights before the first update in `history`.
        history: Positions that each update hit, oldest first; None for an update that hit all
            weights.
        indices: [k] ascending positions of the weights for which to count; None means all weights.
        kernels: Kernels (array functions) that count the hits of the updates between `base` and the
            next mark (copy of the counts).
        state: State of the hit counts from `begin`.

    Returns:
        Number of hits per weight, int32: [k], or [size] if `indices` is None.
    """
    marks = state["marks"]
    mark = None
    if marks:
        # Marks are one interval apart, so `near` is the index of the first mark at `base` or later.
        # Only if `base` is before the first mark, updates of more than one interval are read.
        near = (base - marks[0]["version"] + MARK_INTERVAL - 1) // MARK_INTERVAL
        mark = marks[max(0, near)] if near < len(marks) else None
    stop = len(history) if mark is None else mark["version"] - first
    sigma = kernels.hits(history[base - first : stop], indices, state["walked"])
    if mark is None:
        return sigma
    newest, marked = state["counts"], mark["counts"]
    more = newest - marked if indices is None else newest[indices] - marked[indices]
    total: Int32 = sigma + more.astype(np.int32) + np.int32(state["num_dense"] - mark["num_dense"])
    return total

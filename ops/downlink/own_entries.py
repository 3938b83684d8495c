"""Weights that a reply to a worker can omit, because the worker computes them from its own push.

If the shard server only adds one push to its weights, most of the changed weights have exactly the
value that the worker computes by the same float32 addition of pushed values to its own weights. To
find the weights that a worker can compute from its own push, the shard server compares the results
of the worker's addition with its own weights, bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.downlink.types import OwnEntries
from thinwire.ops.types import Float32, Int64

if TYPE_CHECKING:
    from thinwire.ops.weighting.base import Arrival

_TINY = np.finfo(np.float32).tiny


def values_at(arrival: Arrival | None, theta: Float32) -> Float32:
    """Return the weights [k] at the positions of a worker's sparse update; [0] for no update."""
    return theta[arrival.update.indices] if arrival is not None else np.empty(0, np.float32)


def find(
    arrival: Arrival | None, before: Float32, theta: Float32, version: int
) -> OwnEntries | None:
    """Return the weights that equal previous weights plus pushed values, bit for bit.

    Numerical kernels differ on subnormal numbers, because TensorFlow's threads flush subnormal
    numbers to zero. The function `own_entries.find` leaves out entries with a subnormal value or
    sum, so replies contain the weights at these entries.

    Args:
        arrival: A worker's sparse update of k entries, as received; None if replies cannot omit
            entries.
        before: [k] float32, the weights at the update's entries before the update was applied.
        theta: [n] float32, all weights of the shard server after the update.
        version: Version of the shard server's weights after the update.

    Returns:
        The entries that the reply to the sender can omit; None if the arrival is None.
    """
    if arrival is None:
        return None
    indices, values = arrival.update.indices, arrival.update.values
    after = theta[indices]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        is_equal = (before + values).view(np.uint32) == after.view(np.uint32)
        is_equal &= (np.abs(values) >= _TINY) & (np.abs(after) >= _TINY)
    equal: Int64 = indices if is_equal.all() else indices[is_equal]  # type: ignore[assignment, index]
    return OwnEntries(arrival.worker, arrival.head.step, arrival.base_version, version, equal)

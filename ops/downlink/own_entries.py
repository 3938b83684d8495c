"""The entries of a worker's own push, which its reply may leave out.

A push that is released alone and simply added leaves most of its entries at exactly the value that
the worker computes from its weights and what it sent, in the same float32 operation. Which entries
these are is not derived from settings but compared in the shard's weights, bit by bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64
    from thinwire.ops.weighting.base import Arrival

_TINY = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class OwnEntries:
    """The entries to which one push, applied alone, did nothing but add its values."""

    worker: int
    step: int
    base_version: int
    version: int  # of the shard after it
    indices: Int64  # [j] int64, of the shard

    def as_state(self, indices: Int64) -> State:
        """Return some of the entries as plain data, to be kept in the worker's state."""
        return {
            "step": self.step,
            "base_version": self.base_version,
            "version": self.version,
            "indices": indices,
        }


def values_at(arrival: Arrival | None, theta: Float32) -> Float32:
    """Return the weights [k] at the entries of a sparse update; empty without an arrival."""
    return theta[arrival.update.indices] if arrival is not None else np.empty(0, np.float32)


def find(
    arrival: Arrival | None, before: Float32, theta: Float32, version: int
) -> OwnEntries | None:
    """Return the entries that equal the former weights plus the sent values, bit for bit.

    Below the normal range kernels differ (TensorFlow's threads flush such numbers to zero), so
    values and sums in that range do not count; they are sent like all others.

    Args:
        arrival: A sparse update of k entries, as received; None where nothing can be left out.
        before: [k] float32, the weights at its entries before it was applied.
        theta: [n] float32, the weights after.
        version: Of the shard, after.

    Returns:
        The entries; None without an arrival.
    """
    if arrival is None:
        return None
    indices, values = arrival.update.indices, arrival.update.values
    after = theta[indices]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        same = (before + values).view(np.uint32) == after.view(np.uint32)
        same &= (np.abs(values) >= _TINY) & (np.abs(after) >= _TINY)
    mine: Int64 = indices if same.all() else indices[same]  # type: ignore[assignment, index]
    return OwnEntries(arrival.worker, arrival.step, arrival.base_version, version, mine)

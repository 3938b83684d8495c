"""What a worker can add to its own model by itself, so that no reply need bring it.

A push that is released alone and simply added leaves most of its entries at exactly what the worker
can compute: what it has, plus what it sent, in the same float32 operation. Whether an entry is such
a one is not concluded from settings but seen from the shard's weights, bit by bit.
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
    """Where one push, applied alone, did nothing but add what it holds."""

    worker: int
    step: int
    base_version: int
    version: int  # that it made
    indices: Int64  # [j] int64, of the shard

    def plain(self, indices: Int64) -> State:
        """Return some of the entries as plain data, to be kept of the worker."""
        return {
            "step": self.step,
            "base_version": self.base_version,
            "version": self.version,
            "indices": indices,
        }


def values_at(arrival: Arrival | None, theta: Float32) -> Float32:
    """Return the weights [k] where a sparse update has entries; of no arrival, none."""
    return theta[arrival.update.indices] if arrival is not None else np.empty(0, np.float32)


def find(
    arrival: Arrival | None, before: Float32, theta: Float32, version: int
) -> OwnEntries | None:
    """Return where the weights are what they were plus what was sent, bit for bit.

    Below the normal range kernels differ (TensorFlow's threads flush such numbers to zero), so
    values and sums there are not counted; they are sent like anything else.

    Args:
        arrival: A sparse update of k entries, as it came; None where nothing can be left out.
        before: [k] float32, the weights at its entries before it was applied.
        theta: [n] float32, the weights after.
        version: After it.

    Returns:
        The entries; None of no arrival.
    """
    if arrival is None:
        return None
    indices, values = arrival.update.indices, arrival.update.values
    after = theta[indices]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        same = (before + values).view(np.uint32) == after.view(np.uint32)
        same &= (np.abs(values) >= _TINY) & (np.abs(after) >= _TINY)
    mine: Int64 = indices[same]  # type: ignore[index]
    return OwnEntries(arrival.worker, arrival.step, arrival.base_version, version, mine)

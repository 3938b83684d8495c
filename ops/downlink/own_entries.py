"""Entries of a worker's own push that the shard server's reply to the worker can omit.

If the shard server applies a push alone and simply adds it, most of the changed weights end at
exactly the value that the worker computes from its weights and the sent values with the same
float32 operation. The shard server does not derive from settings which entries the worker can
compute: it compares the results with its weights, bit by bit.
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
    """The weights to which one push, applied alone, did nothing but add its values."""

    worker: int  # number of the worker that sent the push
    step: int  # the worker's step in which it sent the push
    base_version: int  # version of the worker's weights when it computed the push
    version: int  # version of the shard server's weights after the push was applied
    indices: Int64  # [j] int64, positions of the entries in the shard server's weights

    def as_state(self, indices: Int64) -> State:
        """Return plain data of the push and `indices`, to store in the downlink codec's state."""
        return {
            "step": self.step,
            "base_version": self.base_version,
            "version": self.version,
            "indices": indices,
        }


def values_at(arrival: Arrival | None, theta: Float32) -> Float32:
    """Return the weights [k] at the entries of a worker's sparse update; empty for None."""
    return theta[arrival.update.indices] if arrival is not None else np.empty(0, np.float32)


def find(
    arrival: Arrival | None, before: Float32, theta: Float32, version: int
) -> OwnEntries | None:
    """Return the entries that equal the previous weights plus the sent values, bit for bit.

    Numerical kernels differ on subnormal numbers (TensorFlow's threads flush them to zero). Entries
    with a subnormal value or sum are therefore not returned by `find`, and replies contain these
    entries.

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
    return OwnEntries(arrival.worker, arrival.step, arrival.base_version, version, equal)

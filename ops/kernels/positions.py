"""Sets of ascending positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ops.types import Int64


def union(sets: Sequence[Int64]) -> Int64:
    """Return all positions that any of the sets has, ascending and once each.

    Not np.unique: that hashes, and takes a hundred times as long where runs are sorted already,
    which a stable sort merges.

    Args:
        sets: At least one; each ascending, [k] int64.
    """
    if len(sets) == 1:
        return sets[0]
    joined = np.concatenate(sets)
    joined.sort(kind="stable")
    is_new = np.ones(joined.size, bool)
    np.not_equal(joined[1:], joined[:-1], out=is_new[1:])
    return joined[is_new]

"""Merge a group's updates into their mean: workers weigh alike, whatever their local steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.types import Update


def mean_update(updates: Sequence[Update], size: int) -> Update:
    """Return the mean of one or more updates, summed in the order given.

    An entry that an update does not send counts as zero. The mean of sparse updates is sparse.

    Args:
        updates: At least one.
        size: Entries of the shard.
    """
    if len(updates) == 1:
        return updates[0]
    total = np.zeros(size, np.float32)
    for update in updates:
        if update.indices is None:
            total += update.values
        else:
            total[update.indices] += update.values
    total /= np.float32(len(updates))
    index_sets = [update.indices for update in updates if update.indices is not None]
    if len(index_sets) < len(updates):
        return Update(None, total)
    touched = np.unique(np.concatenate(index_sets))
    return Update(touched, total[touched])

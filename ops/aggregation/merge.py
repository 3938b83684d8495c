"""Functions that merge workers' updates: the mean, or per weight the mean of the middle values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.ops import buffers
from thinwire.ops.kernels.numpy_ops import union
from thinwire.ops.types import Float32, Int64, SpareUpdate, Update

_CHUNK = 1 << 14  # number of update entries processed at a time; a chunk fits the processor's cache
#: Number of entries of a file-backed update that are in memory at a time; a multiple of `_CHUNK`.
_KEPT = buffers.PIECE_BYTES // 4


def mean_update(updates: Sequence[Update], size: int) -> Update:
    """Return the mean of one or more updates, summed in the order of `updates`.

    In the mean of updates, an entry that a sparse update does not contain counts as zero. The mean
    of several sparse updates is a sparse update.

    Args:
        updates: Workers' updates to merge, at least one.
        size: Number of weights of the shard server that merges the updates.
    """
    if len(updates) == 1:
        return updates[0]
    if all(update.indices is None for update in updates):
        return _mean_of_dense(updates, size)
    total = np.zeros(size, np.float32)
    for update in updates:
        if update.indices is None:
            total += update.values
        else:
            total[update.indices] += update.values
    total /= np.float32(len(updates))
    touched = _touched(updates)
    return Update(None, total) if touched is None else Update(touched, total[touched])


def _mean_of_dense(updates: Sequence[Update], size: int) -> Update:
    """Return the mean of dense updates, which overwrites a `SpareUpdate` among them."""
    spares = (update.values for update in updates if isinstance(update, SpareUpdate))
    spare = next((values for values in spares if not buffers.is_in_file(values)), None)
    mean = np.empty(size, np.float32) if spare is None else spare
    total = np.empty(min(size, _CHUNK), np.float32)
    for start in range(0, size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        part = total[: len(mean[piece])]
        np.add(updates[0].values[piece], np.float32(0), out=part)  # adding 0 turns -0 into 0
        for update in updates[1:]:
            part += update.values[piece]
        # `mean` may be one of the updates: the sum of this chunk must be complete before the
        # division overwrites that update's values.
        np.divide(part, np.float32(len(updates)), out=mean[piece])
        if piece.stop % _KEPT == 0:
            for update in updates:
                buffers.put_away(update.values[piece.stop - _KEPT : piece.stop])
    return Update(None, mean)


def middle_update(updates: Sequence[Update], size: int, num_trimmed: int) -> Update:
    """Return, for each weight, the mean of updates without the smallest and largest values.

    In the trimmed mean of updates, an entry that is missing in a sparse update counts as zero. The
    trimmed mean of sparse updates is sparse: it has every position that at least one of the updates
    contains.

    Args:
        updates: Workers' updates to merge, at least one.
        size: Number of weights of the shard server that merges the updates.
        num_trimmed: Number of smallest values, and of largest values, that the mean leaves out per
            weight; fewer than half of the updates. With the largest possible number the result is
            the median.
    """
    if len(updates) == 1:
        return updates[0]
    touched = _touched(updates)
    rows = [_row(update, touched, size) for update in updates]
    merged = np.empty(size if touched is None else len(touched), np.float32)
    for start in range(0, len(merged), _CHUNK):
        columns = slice(start, start + _CHUNK)
        middle = _sorted([row[columns] for row in rows])[num_trimmed : len(rows) - num_trimmed]
        total = middle[0]
        for values in middle[1:]:
            total += values
        merged[columns] = total / np.float32(len(middle))
    return Update(touched, merged)


def _touched(updates: Sequence[Update]) -> Int64 | None:
    """Return the union of the updates' positions, ascending; None if an update is dense."""
    index_sets = [update.indices for update in updates if update.indices is not None]
    if len(index_sets) < len(updates):
        return None
    return union(index_sets)


def _row(update: Update, touched: Int64 | None, size: int) -> Float32:
    """Return an update's values at positions `touched` (None: all); missing values are 0."""
    if update.indices is None:
        return update.values
    row = np.zeros(size if touched is None else len(touched), np.float32)
    places = update.indices if touched is None else np.searchsorted(touched, update.indices)
    row[places] = update.values
    return row


def _sorted(rows: Sequence[Float32]) -> list[Float32]:
    """Return copies of the rows [k], sorted so that each column ascends from the first row on.

    `_sorted` uses odd-even transposition: each pass compares and exchanges whole neighboring rows.
    Odd-even transposition needs as many passes as the array has rows. The array to sort has one row
    per worker's update and thus few rows, so odd-even transposition is many times faster than
    sorting each column.
    """
    ordered, spare = [row.copy() for row in rows], np.empty_like(rows[0])
    for number in range(len(ordered)):
        for lower in range(number % 2, len(ordered) - 1, 2):
            smaller, larger = ordered[lower], ordered[lower + 1]
            np.minimum(smaller, larger, out=spare)
            np.maximum(smaller, larger, out=larger)
            ordered[lower], spare = spare, smaller
    return ordered

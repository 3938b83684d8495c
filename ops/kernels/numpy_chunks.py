"""Exact selection of the largest entries of each chunk of an array, in one pass over memory.

A chunk is a range of `chunk` consecutive entries of an array. From a last chunk that is shorter
than the other chunks, the selection functions select the same fraction of entries as from a full
chunk. Source: Wang et al., "SparseLoCo" (arXiv 2508.15706); docs/methods/local_steps.md.
"""

from __future__ import annotations

import numpy as np

from thinwire.ops.kernels.numpy_select import accumulate
from thinwire.ops.types import Bool, Float32, Int64

# number of entries processed together: they and their magnitudes stay in the processor's cache
_PIECE = 1 << 17


def chunk_top_k(x: Float32, k: int, chunk: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude in each chunk (range of entries) of an array.

    Among entries of equal magnitude, the entries with the lowest indices are selected. Zeros are
    never selected, so `chunk_top_k` can return fewer than k entries of a chunk.

    Args:
        x: Array [n] float32 of finite gradient values from which to select entries.
        k: Number of entries to select from each full chunk, 1 to `chunk`. From a shorter last chunk
            of m entries, ceil(k m / chunk) entries are selected.
        chunk: Number of consecutive array entries per chunk, at least 1.

    Returns:
        Ascending indices [m] int64 of the selected entries, and their values [m] float32.
    """
    return _select(x, None, k, chunk, 1.0)


def feedback_chunk_top_k(
    residual: Float32, addend: Float32, k: int, chunk: int, factor: float = 1.0
) -> tuple[Int64, Float32]:
    """Add an addend to a residual, then remove and return the k largest entries of each chunk.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then set to zero where
            selected.
        addend: [n] float32, finite values (a new gradient) to add to the residual.
        k: Number of entries to select from each full chunk of the sum.
        chunk: Number of consecutive entries per chunk of the array.
        factor: Factor on the addend before it is added to the residual.
    """
    return _select(residual, addend, k, chunk, factor)


def kept_of_last(size: int, k: int, chunk: int) -> int:
    """Return how many entries are selected from the last chunk of a tensor.

    >>> kept_of_last(4096, 64, 4096), kept_of_last(4097, 64, 4096), kept_of_last(4200, 64, 4096)
    (64, 1, 2)
    """
    length = size % chunk or chunk
    return -(-k * length // chunk)


def _select(
    x: Float32, addend: Float32 | None, k: int, chunk: int, factor: float
) -> tuple[Int64, Float32]:
    """Select the largest entries of each chunk of x, after adding the addend (if any) to x."""
    step = max(1, _PIECE // chunk) * chunk
    indices, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        if addend is not None:
            accumulate(piece, addend[start : start + step], factor)
        positions = _largest(np.abs(piece), k, chunk)
        values.append(piece.take(positions))
        if addend is not None:
            piece[positions] = 0
        positions += start
        indices.append(positions)
    return np.concatenate(indices), np.concatenate(values)


def _largest(magnitudes: Float32, k: int, chunk: int) -> Int64:
    """Return the ascending positions of the k largest magnitudes of each chunk."""
    is_selected = np.empty(magnitudes.size, bool)
    whole = magnitudes.size // chunk * chunk
    if whole:
        shape = (-1, chunk)
        _mark(magnitudes[:whole].reshape(shape), k, is_selected[:whole].reshape(shape))
    if whole < magnitudes.size:
        num_of_last = kept_of_last(magnitudes.size, k, chunk)
        _mark(magnitudes[None, whole:], num_of_last, is_selected[None, whole:])
    return is_selected.nonzero()[0]


def _mark(rows: Float32, k: int, kept: Bool) -> None:
    """Set `kept` to True for nonzero magnitudes that are among the k largest of their row."""
    np.greater(rows, 0, out=kept)
    length = rows.shape[1]
    if k >= length:
        return
    lowest = np.partition(rows, length - k, axis=1)[:, length - k, None]
    kept &= rows >= lowest
    # Magnitudes equal to the k-th largest can raise the number of selected entries above k, so the
    # last of them are deselected.
    for row in (np.count_nonzero(kept, axis=1) > k).nonzero()[0]:
        ties = (rows[row] == lowest[row]).nonzero()[0]
        surplus = np.count_nonzero(kept[row]) - k
        kept[row, ties[ties.size - surplus :]] = False

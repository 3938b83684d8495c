"""Selection of the largest entries of each chunk, exactly; one pass over memory.

Chunks are runs of `chunk` consecutive entries; the last may have fewer, and keeps as large a part.
Source: Wang et al., "SparseLoCo" (arXiv 2508.15706); docs/methods/local_steps.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.kernels.numpy_select import accumulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64

_PIECE = 1 << 17  # entries worked on at a time: with their magnitudes they stay in cache


def chunk_top_k(x: Float32, k: int, chunk: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude of each chunk.

    Ties go to the lowest index. Zeros are never selected, so a chunk may have fewer than k.

    Args:
        x: [n] float32, finite.
        k: Of each whole chunk, 1 to `chunk`; a last one of m entries keeps ceil(k m / chunk).
        chunk: Its entries, at least 1.

    Returns:
        Ascending indices [m] int64 and their values [m] float32.
    """
    return _select(x, None, k, chunk, 1.0)


def feedback_chunk_top_k(
    residual: Float32, addend: Float32, k: int, chunk: int, factor: float = 1.0
) -> tuple[Int64, Float32]:
    """Add to a residual, take out what `chunk_top_k` selects of it, keep the rest.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then zero where selected.
        addend: [n] float32, finite.
        k: Of each whole chunk.
        chunk: Its entries.
        factor: Of the addend.
    """
    return _select(residual, addend, k, chunk, factor)


def kept_of_last(size: int, k: int, chunk: int) -> int:
    """Return how many entries the last chunk of a tensor keeps.

    >>> kept_of_last(4096, 64, 4096), kept_of_last(4097, 64, 4096), kept_of_last(4200, 64, 4096)
    (64, 1, 2)
    """
    length = size % chunk or chunk
    return -(-k * length // chunk)


def _select(
    x: Float32, addend: Float32 | None, k: int, chunk: int, factor: float
) -> tuple[Int64, Float32]:
    """Select chunk by chunk; with an addend x changes in place while in cache."""
    step = max(1, _PIECE // chunk) * chunk
    indices, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        if addend is not None:
            accumulate(piece, addend[start : start + step], factor)
        found = _largest(np.abs(piece), k, chunk)
        values.append(piece.take(found))
        if addend is not None:
            piece[found] = 0
        found += start
        indices.append(found)
    return np.concatenate(indices), np.concatenate(values)


def _largest(magnitudes: Float32, k: int, chunk: int) -> Int64:
    """Return the positions of the k largest of each chunk, ascending."""
    kept = np.empty(magnitudes.size, bool)
    whole = magnitudes.size // chunk * chunk
    if whole:
        shape = (-1, chunk)
        _mark(magnitudes[:whole].reshape(shape), k, kept[:whole].reshape(shape))
    if whole < magnitudes.size:
        last = kept_of_last(magnitudes.size, k, chunk)
        _mark(magnitudes[None, whole:], last, kept[None, whole:])
    return kept.nonzero()[0]


def _mark(rows: Float32, k: int, kept: NDArray[np.bool_]) -> None:
    """Set which of each row's magnitudes are of its k largest, and not 0."""
    np.greater(rows, 0, out=kept)
    length = rows.shape[1]
    if k >= length:
        return
    lowest = np.partition(rows, length - k, axis=1)[:, length - k, None]
    kept &= rows >= lowest
    for row in (np.count_nonzero(kept, axis=1) > k).nonzero()[0]:
        ties = (rows[row] == lowest[row]).nonzero()[0]
        surplus = np.count_nonzero(kept[row]) - k
        kept[row, ties[ties.size - surplus :]] = False

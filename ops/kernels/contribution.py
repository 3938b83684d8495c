"""What blocks of a gradient contribute: moving averages of their mean magnitudes, in numpy.

Source: DGT's contribution; docs/methods/dgt.md. Sums are pairwise in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ops.types import Float32, Int64

_PIECE = 1 << 16  # entries whose magnitudes are held at a time: they stay in cache


def contribution(
    values: Float32, block_entries: int, averages: Float32, alpha: float
) -> tuple[Float32, Float32]:
    """Carry the averages of blocks on: ``alpha * average + (1 - alpha) * mean magnitude``.

    The average of a block whose sum is not finite stays as it is.

    Args:
        values: [size] float32.
        block_entries: Of a block; the last may have fewer, and its mean is over those.
        averages: [n] float32, n = ceil(size / block_entries).
        alpha: Weight of the past, 0 to 1.

    Returns:
        The new averages [n] float32, and the sums of magnitudes [n] float32: 0 only for a block
        of zeros, not finite where a value is not, or where the sum is too large for a float32.
    """
    sums = np.empty(averages.size, np.float32)
    num_full = values.size // block_entries
    step = max(1, _PIECE // block_entries)
    scratch = np.empty(min(step, num_full) * block_entries, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, num_full, step):
            last = min(first + step, num_full)
            piece = values[first * block_entries : last * block_entries]
            magnitudes = np.abs(piece, out=scratch[: piece.size])
            np.add.reduce(magnitudes.reshape(-1, block_entries), axis=1, out=sums[first:last])
        if num_full < sums.size:
            sums[-1] = np.add.reduce(np.abs(values[num_full * block_entries :]))
        return carried_on(averages, sums, values.size, block_entries, alpha), sums


def contribution_at(
    values: Float32, edges: Int64, size: int, block_entries: int, averages: Float32, alpha: float
) -> tuple[Float32, Float32]:
    """Do `contribution` for a tensor of which only some entries are given, the rest being 0.

    Args:
        values: [k] float32, in order of their positions.
        edges: [n + 1] int64: the values of block b are ``values[edges[b] : edges[b + 1]]``.
        size: Entries of the tensor.
        block_entries: Of a block.
        averages: [n] float32.
        alpha: Weight of the past.
    """
    sums = np.zeros(averages.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        filled = np.flatnonzero(edges[1:] > edges[:-1])
        if filled.size:
            sums[filled] = np.add.reduceat(np.abs(values), edges[:-1][filled])
        return carried_on(averages, sums, size, block_entries, alpha), sums


def carried_on(
    averages: Float32, sums: Float32, size: int, block_entries: int, alpha: float
) -> Float32:
    """Return the averages [n] after one more step, from the sums of magnitudes [n]."""
    means = sums / np.float32(block_entries)
    if means.size:
        means[-1] = sums[-1] / np.float32(size - (means.size - 1) * block_entries)
    new = np.float32(alpha) * averages
    new += np.float32(1 - alpha) * means
    return np.where(np.isfinite(sums), new, averages)

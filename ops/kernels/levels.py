"""Values of a block as few-bit levels between its least and its largest, in numpy.

``step = (hi - lo) / 2**bits``, ``level = floor((v - lo) / step)`` cut to the levels there are, and
a level stands for ``lo + (level + 0.5) * step``. A block of equal values has step 0 and stands for
``lo``. Values must be finite, and so must ``hi - lo``.

Source: docs/methods/dgt.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Float32, Int64


def to_levels(rows: Float32, bits: int) -> tuple[NDArray[Any], Float32, Float32]:
    """Code blocks of equal length.

    Args:
        rows: [m, e] float32, one block a row, e above 0.
        bits: 16, 8 or 4.

    Returns:
        Levels [m, e] uint16 (16 bits) or uint8; lows [m] and steps [m] float32.
    """
    lows = rows.min(axis=1, initial=np.inf)
    steps = step_of(lows, rows.max(axis=1, initial=-np.inf), bits)
    return _levels(rows, lows[:, None], steps[:, None], bits), lows, steps


def to_levels_at(
    values: Float32, starts: Int64, bits: int
) -> tuple[NDArray[Any], Float32, Float32]:
    """Code blocks of any length above 0, one after the other.

    Args:
        values: [k] float32.
        starts: [m] int64, ascending from 0: where each block begins.
        bits: 16, 8 or 4.

    Returns:
        Levels [k]; lows [m] and steps [m].
    """
    if not starts.size:
        return np.zeros(0, _dtype(bits)), np.zeros(0, np.float32), np.zeros(0, np.float32)
    lows = np.minimum.reduceat(values, starts)
    steps = step_of(lows, np.maximum.reduceat(values, starts), bits)
    lengths = np.diff(starts, append=values.size)
    spread = np.repeat(lows, lengths), np.repeat(steps, lengths)
    return _levels(values, *spread, bits), lows, steps


def from_levels(levels: NDArray[Any], lows: Float32, steps: Float32) -> Float32:
    """Return what levels stand for; lows and steps are broadcast against them."""
    values = levels.astype(np.float32)
    values += np.float32(0.5)
    values *= steps
    values += lows
    return values


def step_of(lows: Float32, highs: Float32, bits: int) -> Float32:
    """Return (hi - lo) / 2**bits float32."""
    return (highs - lows) / np.float32(2**bits)


def _levels(values: Float32, lows: Float32, steps: Float32, bits: int) -> NDArray[Any]:
    levels = values - lows
    levels /= np.where(steps > 0, steps, np.float32(1))  # of equal values: 0 / 1
    np.minimum(levels, np.float32(2**bits - 1), out=levels)
    return levels.astype(_dtype(bits))  # cuts off what is behind the point: floor, as none is < 0


def _dtype(bits: int) -> type:
    return np.uint16 if bits == 16 else np.uint8

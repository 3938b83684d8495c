"""The unreliable blocks of a slot in few bits, and what that changes of their values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.kernels.levels import from_levels, to_levels_at
from ops.kernels.quantise import dequantise
from ops.routing.routed import Encoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.routing.cutting import Scored
    from ops.types import Float32, Int64

#: Bits of a level -> how it travels.
ENCODINGS = {16: Encoding.UINT16, 8: Encoding.UINT8, 4: Encoding.UINT4}
_PIECE = 1 << 16  # entries coded at a time: buffers stay in cache


@dataclasses.dataclass(frozen=True)
class Coded:
    """A slot's values as levels; 0 where a block is not unreliable."""

    data: NDArray[Any]  # [k], or [size] if dense: levels
    lows: Float32  # [n]
    scales: Float32  # [n]
    entries: Int64 | None  # [u]: which of a sparse block's values have errors; None: all of a dense
    errors: Float32  # [u], or [size] if dense: value minus what its level stands for


def dense(bits: int, slot: Scored, kernels: Any) -> Coded:
    """Code blocks of a dense slot, all of them of full length."""
    size, entries = slot.block.size, slot.entries
    body = (slot.size - 1) * entries
    rows = dequantise(slot.block.values)[:body].reshape(-1, entries)
    data = np.zeros(size, np.uint16 if bits == 16 else np.uint8)
    coded = Coded(
        data, np.zeros(slot.size, np.float32), np.zeros(slot.size, np.float32), None,
        np.zeros(size, np.float32),
    )  # fmt: skip
    numbers = np.sort(slot.numbers)
    step = max(1, _PIECE // entries)
    for first in range(0, numbers.size, step):
        some = numbers[first : first + step]
        piece = rows[some]
        levels, lows, scales = kernels.to_levels(piece, bits)
        coded.lows[some], coded.scales[some] = lows, scales
        data[:body].reshape(-1, entries)[some] = levels
        piece -= from_levels(levels, lows[:, None], scales[:, None])
        coded.errors[:body].reshape(-1, entries)[some] = piece
    return coded


def sparse(bits: int, slot: Scored, kernels: Any) -> Coded:
    """Code blocks of which only some entries are there; they lie in the host's memory anyway."""
    del kernels
    counts = np.diff(slot.edges)
    is_low = np.zeros(slot.size, bool)
    is_low[slot.numbers] = True
    entries = np.flatnonzero(np.repeat(is_low, counts))
    values = dequantise(slot.block.values)[entries]
    lengths = counts[is_low]
    levels, lows, scales = to_levels_at(values, np.cumsum(lengths) - lengths, bits)
    all_lows, all_scales = np.zeros(slot.size, np.float32), np.zeros(slot.size, np.float32)
    all_lows[is_low], all_scales[is_low] = lows, scales
    data = np.zeros(slot.block.values.data.size, levels.dtype)
    data[entries] = levels
    errors = values - from_levels(levels, np.repeat(lows, lengths), np.repeat(scales, lengths))
    return Coded(data, all_lows, all_scales, entries, errors)

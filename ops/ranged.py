"""Blocks of which only some ranges are there: as bytes and back, and put in their places.

On the wire: uint32 entries of a range, one bit for each range, then the values of those there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from ops.index_codings import WireError
from ops.types import CodedValues, RangedBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Int64

_HEADER = struct.Struct("<I")  # entries of a range


def num_ranges(size: int, block_entries: int) -> int:
    """Return how many ranges a slot is cut into."""
    return -(-size // block_entries)


def lengths(size: int, block_entries: int) -> Int64:
    """Return [n] int64: the entries of each range."""
    result = np.full(num_ranges(size, block_entries), block_entries)
    if result.size:
        result[-1] = size - (result.size - 1) * block_entries
    return result


def mask(block: RangedBlock) -> NDArray[np.bool_]:
    """Return [size] bool: which entries of the slot are there."""
    return np.repeat(block.present, lengths(block.size, block.block_entries))


def described(block: RangedBlock) -> bytes:
    """Return what stands before the values on the wire."""
    return (
        _HEADER.pack(block.block_entries) + np.packbits(block.present, bitorder="little").tobytes()
    )


def decode(slot: int, values: CodedValues, head: memoryview, size: int) -> RangedBlock:
    """Check and decode one block.

    Args:
        slot: Its slot.
        values: [k], of the ranges that are there.
        head: What stood before the values.
        size: Entries of the slot.

    Raises:
        WireError: Lengths do not fit each other.
    """
    if len(head) < _HEADER.size:
        raise WireError(f"{len(head)} bytes about ranges; expected {_HEADER.size} and a bitmap")
    (block_entries,) = _HEADER.unpack(head[: _HEADER.size])
    if not block_entries:
        raise WireError("ranges of no entries; expected at least 1")
    count = num_ranges(size, block_entries)
    bits = np.frombuffer(head, np.uint8, offset=_HEADER.size)
    if bits.size != -(-count // 8):
        raise WireError(f"a bitmap of {bits.size} bytes for {count} ranges")
    flags = np.unpackbits(bits, bitorder="little").view(bool)
    if flags[count:].any():
        raise WireError(f"the bitmap of {count} ranges has bits beyond them")
    present = flags[:count]
    expected = int(lengths(size, block_entries)[present].sum())
    if values.data.size != expected:
        raise WireError(f"{values.data.size} values in ranges of {expected} entries")
    return RangedBlock(slot, size, None, values, block_entries, present)

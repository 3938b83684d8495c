"""Low-rank blocks as bytes: the header of two matrix factors, and the decoder of the product."""

from __future__ import annotations

import dataclasses
import math
import struct

from thinwire.ops.types import Block, CodedValues, LowRankBlock
from thinwire.ops.wire.index_codings import WireError
from thinwire.ops.wire.low_rank import expanded

#: Header of a low-rank block: column of the block's first entry, number of columns, scale of the
#: right factor.
FACTORS = struct.Struct("<IIf")


def decode_factors(
    slot: int, coded: CodedValues, rank: int, described: memoryview, size: int
) -> Block:
    """Return the product of a low-rank block's two factors as a dense float32 block.

    The caller checks that the factors have no more values than the slot (tensor or variable slice)
    has entries. By checking the factors' number of values, the caller of `decode_factors` limits
    the number of columns, and so the allocated memory.

    Args:
        slot: Number of the block's slot (tensor or variable slice).
        coded: Coded values of the left factor, then of the right factor.
        rank: Number of columns of each of the two factors.
        described: Received header of the factors, packed by `FACTORS`.
        size: Number of entries in the block's slot (tensor or variable slice).

    Raises:
        WireError: The header of the factors contradicts the number of values or of entries.
    """
    if len(described) != FACTORS.size:
        raise WireError(f"low-rank header has {len(described)} bytes; expected {FACTORS.size}")
    first, columns, scale = FACTORS.unpack(described)
    if rank < 1 or not first < columns:
        raise WireError(f"low-rank block of rank {rank} begins at column {first} of {columns}")
    rows, count = -(-(first + size) // columns), coded.data.size
    if count != rank * (rows + columns):
        raise WireError(
            f"low-rank block: {count} values of rank {rank} for {rows} rows and {columns} columns"
        )
    if not 0 < scale < math.inf:
        raise WireError(f"low-rank right factor's scale {scale}; expected a finite number above 0")
    left = dataclasses.replace(coded, data=coded.data[: rows * rank])
    right = CodedValues(coded.dtype, coded.data[rows * rank :], scale)
    return expanded(LowRankBlock(slot, size, None, left, right, rank, first))

"""Estimates of the bytes that a shard server's replies take, without coding the replies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thinwire.ops.types import VALUE_BITS, Block, ChunkedValues

if TYPE_CHECKING:
    from thinwire.ops.wire.blocks import WireBlock


def reply_bytes(count: int, size: int, value_dtype: str = "float32") -> float:
    """Estimate the bytes of a reply with `count` of `size` entries, positions at their entropy.

    >>> round(reply_bytes(10, 1000)), reply_bytes(1000, 1000), reply_bytes(0, 1000)
    (50, 4000.0, 0.0)
    """
    position_bits = 0.0
    if 0 < count < size:
        share = count / size
        position_bits = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return (count * VALUE_BITS[value_dtype] + position_bits) / 8


def block_bytes(block: Block | WireBlock) -> float:
    """Estimate how many bytes a block's positions and values take in a message."""
    if not isinstance(block, Block):
        return block.num_bytes
    values = block.values
    scales = 2 * values.scales.size if isinstance(values, ChunkedValues) else 0
    return scales + reply_bytes(len(values.data), block.size, values.dtype)

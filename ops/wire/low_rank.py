"""Blocks that are products of two thin matrices: written out, and cut over shards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from thinwire.ops.types import Block, CodedValues, LowRankBlock, Slice

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


def pays(rank: int, rows: int, columns: int, size: int) -> bool:
    """Return whether the factors have fewer values than the entries that they stand for.

    >>> pays(2, 9, 5, 45), pays(4, 9, 5, 45)
    (True, False)
    """
    return rank * (rows + columns) < size


def expanded(block: Block) -> Block:
    """Return a block with a value for every entry in place of factors; another as it is."""
    if not isinstance(block, LowRankBlock):
        return block
    from thinwire.ops.kernels import numpy_ops

    entries = numpy_ops.entries(*factors(block), block.first, block.size)
    return Block(block.slot, block.size, None, CodedValues("float32", entries))


def factors(block: LowRankBlock) -> tuple[Float32, Float32]:
    """Return what a block is the product of: P [rows, rank] and Q [columns, rank]."""
    from thinwire.ops.kernels.numpy_ops import dequantise

    left, right = dequantise(block.values), dequantise(block.right)
    return left.reshape(-1, block.rank), right.reshape(-1, block.rank)


def part(block: LowRankBlock, slot: int, piece: Slice) -> Block:
    """Return the block of one slice of the tensor.

    It has the rows that the slice touches, and every column. A slice so thin that its factors are
    no smaller than itself is written out; it decodes to the same bits.

    Args:
        block: Of a tensor, or a part of one.
        slot: Of the part.
        piece: Which entries of the block.
    """
    columns, rank = block.columns, block.rank
    start, stop = block.first + piece.start, block.first + piece.stop
    top, bottom = start // columns, -(-stop // columns)
    rows = dataclasses.replace(block.values, data=block.values.data[top * rank : bottom * rank])
    cut = LowRankBlock(slot, piece.size, None, rows, block.right, rank, start % columns)
    return cut if pays(rank, bottom - top, columns, piece.size) else expanded(cut)

"""Functions that multiply out low-rank blocks (products of thin matrices) or cut them."""

from __future__ import annotations

import dataclasses

from thinwire.ops.types import Block, CodedValues, Float32, LowRankBlock, Slice


def pays(rank: int, rows: int, columns: int, size: int) -> bool:
    """Return whether two factors of this rank have fewer values than a tensor of `size` entries.

    >>> pays(2, 9, 5, 45), pays(4, 9, 5, 45)
    (True, False)
    """
    return rank * (rows + columns) < size


def expanded(block: Block) -> Block:
    """Return a low-rank block multiplied out to dense float32; return other blocks unchanged."""
    if not isinstance(block, LowRankBlock):
        return block
    from thinwire.ops.kernels import numpy_ops

    entries = numpy_ops.entries(*factors(block), block.first, block.size)
    return Block(block.slot, block.size, None, CodedValues("float32", entries))


def factors(block: LowRankBlock) -> tuple[Float32, Float32]:
    """Return the decoded factors of a low-rank block, P [rows, rank] and Q [columns, rank]."""
    from thinwire.ops.kernels.numpy_ops import dequantise

    left, right = dequantise(block.values), dequantise(block.right)
    return left.reshape(-1, block.rank), right.reshape(-1, block.rank)


def part(block: LowRankBlock, slot: int, piece: Slice) -> Block:
    """Cut a slice of a tensor out of the tensor's low-rank block; return the slice's block.

    The low-rank block of a slice has those rows of the matrix that the slice touches, and all
    columns. If the factors of a slice's low-rank block are not smaller than the slice, the block is
    multiplied out, which does not change the decoded bits.

    Args:
        block: Low-rank block of a tensor, or of a part of a tensor.
        slot: Number of the new block's variable slice.
        piece: Range of the low-rank block's entries to cut out.
    """
    columns, rank = block.columns, block.rank
    start, stop = block.first + piece.start, block.first + piece.stop
    top, bottom = start // columns, -(-stop // columns)
    rows = dataclasses.replace(block.values, data=block.values.data[top * rank : bottom * rank])
    cut = LowRankBlock(slot, piece.size, None, rows, block.right, rank, start % columns)
    return cut if pays(rank, bottom - top, columns, piece.size) else expanded(cut)

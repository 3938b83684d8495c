"""Between blocks of a shard's slices and updates in its flat coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import Block, CodedValues, ShardLayout, Update, where_of

if TYPE_CHECKING:
    from thinwire.ops.types import Int64

#: Above this share of the shard a sparse update is cheaper to handle as a dense one.
_DENSE_FRACTION = 0.25
_NO_ENTRIES = np.empty(0, np.int64)


def blocks_of(update: Update, layout: ShardLayout) -> list[Block]:
    """Divide an update in shard coordinates into one block per slice; empty ones are left out."""
    offsets = layout.offsets
    blocks = []
    for slot, piece in enumerate(layout.slices):
        start, stop = offsets[slot], offsets[slot + 1]
        if update.indices is None:
            values = CodedValues("float32", update.values[start:stop])
            blocks.append(Block(slot, piece.size, None, values))
            continue
        first, last = update.indices.searchsorted((start, stop))
        if first < last:
            values = CodedValues("float32", update.values[first:last])
            indices = update.indices[first:last] - start
            blocks.append(Block(slot, piece.size, indices, values))
    return blocks


def flatten(blocks: Sequence[Block], layout: ShardLayout, kernels: Kernels) -> Update:
    """Join blocks in shard coordinates, dense where that is cheaper.

    Args:
        blocks: At most one for each slice, in order of slots.
        layout: Of the shard.
        kernels: The array work.
    """
    num_sent = sum(len(block.values.data) for block in blocks)
    if num_sent > _DENSE_FRACTION * layout.size:
        return _dense(blocks, layout, kernels)
    if not blocks:
        return Update(_NO_ENTRIES, np.empty(0, np.float32))
    values = [kernels.dequantise(block.values) for block in blocks]
    return Update(_positions(blocks, layout), np.concatenate(values))


def _positions(blocks: Sequence[Block], layout: ShardLayout) -> Int64:
    """Return what the blocks touch, in shard coordinates, ascending."""
    offsets = layout.offsets
    return np.concatenate(
        [
            (np.arange(block.size) if block.indices is None else block.indices)
            + offsets[block.slot]
            for block in blocks
        ]
    )


def _dense(blocks: Sequence[Block], layout: ShardLayout, kernels: Kernels) -> Update:
    complete = [block.slot for block in blocks] == list(range(len(layout.slices)))
    all_dense = complete and all(block.indices is None for block in blocks)
    flat, offsets = (np.empty if all_dense else np.zeros)(layout.size, np.float32), layout.offsets
    for block in blocks:
        start = offsets[block.slot]
        target = flat[start : start + block.size]
        target[where_of(block.indices)] = kernels.dequantise(block.values)
    if all_dense:
        return Update(None, flat)
    touched = _positions(blocks, layout)
    return Update(touched, flat[touched])

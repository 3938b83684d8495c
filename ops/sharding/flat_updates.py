"""Conversion between blocks of variable slices and updates of a shard server's flat weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Block, CodedValues, Int64, ModelSpec, ShardLayout, Update

_NO_ENTRIES = np.empty(0, np.int64)
#: Largest number of entries of a joined block. For larger blocks, the fixed cost per block does not
#: matter.
_MOST_JOINED = 1 << 20


def joined(blocks: Sequence[Block], layout: ShardLayout) -> tuple[Block, ...]:
    """Join neighboring sparse blocks of equal dtype and scale to blocks that span several slices.

    Each block of an update costs some tenths of a millisecond to describe, encode and decode. An
    update that consists of fewer blocks takes less time to encode and decode.

    Args:
        blocks: Blocks of an update, at most one per variable slice, ordered by slice.
        layout: Layout of the shard server: its slices of variables.
    """
    runs: list[list[Block]] = []
    num_entries = 0
    for block in blocks:
        num_entries += len(block.values.data)
        if not (runs and num_entries <= _MOST_JOINED and _fit(runs[-1][-1], block)):
            runs.append([])
            num_entries = len(block.values.data)
        runs[-1].append(block)
    return tuple(run[0] if len(run) == 1 else _one(run, layout) for run in runs)


def _fit(one: Block, other: Block) -> bool:
    """Return True if one joined block can hold the entries of two neighboring blocks."""
    for block in (one, other):
        is_plain = type(block) is Block and type(block.values) is CodedValues
        if not is_plain or block.indices is None or not isinstance(block.values.data, np.ndarray):
            return False
    first, second = one.values, other.values
    return first.dtype == second.dtype and first.scale == second.scale


def _one(run: Sequence[Block], layout: ShardLayout) -> Block:
    first, last, offsets = run[0], run[-1], layout.offsets
    start, stop = offsets[first.slot], offsets[last.slot + last.slots]
    positions = _positions(run, layout)
    if start:
        positions -= start
    # A decoder returns a block with every entry as a dense block (indices None). The joined block
    # must have the same form.
    indices = positions if positions.size < stop - start else None
    data = np.concatenate([block.values.data for block in run])
    values = CodedValues(first.values.dtype, data, first.values.scale)
    slots = last.slot + last.slots - first.slot
    return Block(first.slot, stop - start, indices, values, slots=slots)


class SlicesInModel:
    """The ranges of a shard server's variable slices in the flat model.

    Args:
        spec: Paths, shapes and dtypes of the model's variables.
        layout: Layout of the shard server: its slices of variables.
    """

    def __init__(self, spec: ModelSpec, layout: ShardLayout) -> None:
        self._layout, positions = layout, shard_positions(spec, layout)
        self._starts = [place.start for place in positions]
        # _ends[slot] is the end (exclusive) of the series of variable slices, from number `slot`
        # on, that are adjacent in the flat model.
        self._ends = [len(positions)] * len(positions)
        for slot in reversed(range(len(positions) - 1)):
            follows = positions[slot].stop == positions[slot + 1].start
            self._ends[slot] = self._ends[slot + 1] if follows else slot + 1

    def places(self, blocks: Iterable[Block]) -> Iterator[tuple[slice, Block]]:
        """Yield (range in the flat model, block) for each of the given shard server's blocks.

        A block that spans variable slices with gaps between them in the model is cut into one block
        per slice.
        """
        for block in blocks:
            stop = block.slot + block.slots
            is_one = self._ends[block.slot] >= stop
            edges = self._layout.offsets[block.slot : stop + 1]
            for part in (block,) if is_one else _cut(block, [edge - edges[0] for edge in edges]):
                start = self._starts[part.slot]
                yield slice(start, start + part.size), part


def _cut(block: Block, edges: Sequence[int]) -> list[Block]:
    """Cut a block that spans variable slices into one block per slice, without empty blocks."""
    indices, values = block.indices, block.values
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        first, last = (start, stop) if indices is None else indices.searchsorted((start, stop))
        if indices is None or first < last:
            some = None if indices is None else indices[first:last] - start
            data = CodedValues(values.dtype, values.data[first:last], values.scale)
            parts.append(Block(block.slot + number, stop - start, some, data))
    return parts


def blocks_of(update: Update, layout: ShardLayout) -> list[Block]:
    """Return an update of a shard server's flat weights as blocks of variable slices.

    A sparse update that is not large becomes one block that spans all variable slices; an empty
    sparse update becomes no block. A dense or large sparse update becomes one block per variable
    slice.
    """
    values = CodedValues("float32", update.values)
    whole = Block(0, layout.size, update.indices, values, slots=len(layout.slices))
    if update.indices is not None and update.indices.size <= _MOST_JOINED:
        return [whole] if update.indices.size else []
    return _cut(whole, layout.offsets)


def flatten(blocks: Sequence[Block], layout: ShardLayout, kernels: Kernels) -> Update:
    """Join blocks into one update with positions in the shard server's flat weights.

    The joined update is dense if dense blocks cover all weights of the shard server.

    Args:
        blocks: Blocks of an update, ordered by variable slice; at most one block per slice.
        layout: Layout of the shard server: its slices of variables.
        kernels: Kernels (array functions) that decode the values of blocks.
    """
    if not blocks:
        return Update(_NO_ENTRIES, np.empty(0, np.float32))
    counts = [len(block.values.data) for block in blocks]
    values, start = np.empty(sum(counts), np.float32), 0
    # One block is decoded at a time, to save memory.
    for block, count in zip(blocks, counts, strict=True):
        values[start : start + count] = kernels.dequantise(block.values)
        start += count
    is_whole = sum(block.slots for block in blocks) == len(layout.slices)
    if is_whole and all(block.indices is None for block in blocks):
        return Update(None, values)
    return Update(_positions(blocks, layout), values)


def _positions(blocks: Sequence[Block], layout: ShardLayout) -> Int64:
    """Return a new array with the blocks' ascending positions in the shard's flat weights."""
    parts = []
    for block in blocks:
        indices = np.arange(block.size) if block.indices is None else block.indices
        start = layout.offsets[block.slot]
        parts.append(indices + start if start else indices)
    return np.concatenate(parts)

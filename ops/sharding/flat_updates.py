"""Between blocks of a shard's slices and updates in its flat coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Block, CodedValues, ModelSpec, ShardLayout, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Int64

_NO_ENTRIES = np.empty(0, np.int64)
#: Entries of a block that spans several slices, at most: beyond, what each block costs is nothing.
_MOST_JOINED = 1 << 20


def joined(blocks: Sequence[Block], layout: ShardLayout) -> tuple[Block, ...]:
    """Join neighbouring sparse blocks whose values are of one kind: one then spans their slices.

    To describe, code and decode a block takes tenths of a millisecond, whatever is in it.

    Args:
        blocks: At most one for each slice, in order of slots.
        layout: Of the shard.
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
    """Return whether a block can span the slices of both."""
    for block in (one, other):
        is_plain = type(block) is Block and type(block.values) is CodedValues
        if not is_plain or block.indices is None or not isinstance(block.values.data, np.ndarray):
            return False
    mine, theirs = one.values, other.values
    return mine.dtype == theirs.dtype and mine.scale == theirs.scale


def _one(run: Sequence[Block], layout: ShardLayout) -> Block:
    first, last, offsets = run[0], run[-1], layout.offsets
    start, stop = offsets[first.slot], offsets[last.slot + last.slots]
    positions = _positions(run, layout)
    if start:
        positions -= start
    indices = positions if positions.size < stop - start else None  # as it is decoded
    data = np.concatenate([block.values.data for block in run])
    values = CodedValues(first.values.dtype, data, first.values.scale)
    slots = last.slot + last.slots - first.slot
    return Block(first.slot, stop - start, indices, values, slots=slots)


class SlicesInModel:
    """Where the slices of a shard lie in the flat model.

    Args:
        spec: The model.
        layout: Of the shard.
    """

    def __init__(self, spec: ModelSpec, layout: ShardLayout) -> None:
        self._layout, positions = layout, shard_positions(spec, layout)
        self._starts = [place.start for place in positions]
        # Of each slot, the first one after it that does not follow it directly in the model.
        self._ends = [len(positions)] * len(positions)
        for slot in reversed(range(len(positions) - 1)):
            follows = positions[slot].stop == positions[slot + 1].start
            self._ends[slot] = self._ends[slot + 1] if follows else slot + 1

    def places(self, blocks: Iterable[Block]) -> Iterator[tuple[slice, Block]]:
        """Yield the place in the model of each of the shard's blocks, and the block.

        One that spans slices which do not follow each other is cut.
        """
        for block in blocks:
            stop = block.slot + block.slots
            is_one = self._ends[block.slot] >= stop
            edges = self._layout.offsets[block.slot : stop + 1]
            for part in (block,) if is_one else _cut(block, [edge - edges[0] for edge in edges]):
                start = self._starts[part.slot]
                yield slice(start, start + part.size), part


def _cut(block: Block, edges: Sequence[int]) -> list[Block]:
    """Return the part of a spanning block in each of its slices; sparse ones only if not empty."""
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
    """Return an update in shard coordinates as blocks: one, or one per slice; none of nothing."""
    values = CodedValues("float32", update.values)
    whole = Block(0, layout.size, update.indices, values, slots=len(layout.slices))
    if update.indices is not None and update.indices.size <= _MOST_JOINED:
        return [whole] if update.indices.size else []
    return _cut(whole, layout.offsets)


def flatten(blocks: Sequence[Block], layout: ShardLayout, kernels: Kernels) -> Update:
    """Join blocks in shard coordinates; dense if all that the shard has is in dense ones.

    Args:
        blocks: In order of slots; no two of one slice.
        layout: Of the shard.
        kernels: The array work.
    """
    if not blocks:
        return Update(_NO_ENTRIES, np.empty(0, np.float32))
    counts = [len(block.values.data) for block in blocks]
    values, start = np.empty(sum(counts), np.float32), 0
    for block, count in zip(blocks, counts, strict=True):  # one after the other, for its memory
        values[start : start + count] = kernels.dequantise(block.values)
        start += count
    is_whole = sum(block.slots for block in blocks) == len(layout.slices)
    if is_whole and all(block.indices is None for block in blocks):
        return Update(None, values)
    return Update(_positions(blocks, layout), values)


def _positions(blocks: Sequence[Block], layout: ShardLayout) -> Int64:
    """Return what the blocks touch, in shard coordinates, ascending; a new array."""
    parts = []
    for block in blocks:
        indices = np.arange(block.size) if block.indices is None else block.indices
        start = layout.offsets[block.slot]
        parts.append(indices + start if start else indices)
    return np.concatenate(parts)

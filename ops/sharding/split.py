"""Division of a model, and of a packet with its update, over the shards.

A placement decides which shard holds which slices of the tensors. This module cuts a packet by the
slices' index ranges. A codec has already selected entries from whole tensors, so the number of
shards never changes which entries are sent.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from thinwire.ops.types import (
    Block,
    ChunkedValues,
    CodedValues,
    ConfigurationError,
    LowRankBlock,
    ModelSpec,
    Packet,
    ShardLayout,
    Slice,
    TensorSpec,
)
from thinwire.ops.wire import low_rank

#: A tensor with more entries than this number is cut into one slice per shard (as in MXNet's
#: kvstore).
MAX_SLICE_ENTRIES = 1_000_000


def place_tensors(spec: ModelSpec, num_shards: int, cuts: bool = True) -> tuple[ShardLayout, ...]:
    """Spread tensors over shards: large tensors in equal slices, others to the least loaded shard.

    The result is deterministic, so every node computes the same placement without communication.
    The largest pieces are placed first, which keeps the shards' sizes even. Ties go to the lower
    tensor number and the lower shard number.

    Args:
        spec: Paths, shapes and dtypes of the model's variables.
        num_shards: Number of PS shards, 1 or more.
        cuts: True if a variable may be cut, so that a shard holds a part of it.

    Returns:
        One layout per shard, with its slices in tensor order.

    Raises:
        ConfigurationError: There are more shards than pieces, so that a shard would be empty.
    """
    parts = num_shards if cuts else 1
    pieces = [piece for number in range(len(spec.tensors)) for piece in _cut(spec, number, parts)]
    most = sum(piece.size > 0 for piece in pieces)
    if most < num_shards:
        raise ConfigurationError(
            f"--nb_ps={num_shards}: this model has only {most} tensors with entries that can be "
            f"placed on shards; expected 1..{most} shards."
        )
    loads = [0] * num_shards
    shards: list[list[Slice]] = [[] for _ in range(num_shards)]
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.tensor, piece.start)):
        target = loads.index(min(loads))
        shards[target].append(piece)
        loads[target] += piece.size
    return tuple(
        ShardLayout(tuple(sorted(shard, key=lambda piece: (piece.tensor, piece.start))))
        for shard in shards
    )


def _cut(spec: ModelSpec, number: int, parts: int) -> list[Slice]:
    size = spec.tensors[number].size
    parts = parts if size > MAX_SLICE_ENTRIES else 1
    edges = [size * part // parts for part in range(parts + 1)]
    return [Slice(number, start, stop) for start, stop in itertools.pairwise(edges)]


def shard_positions(spec: ModelSpec, layout: ShardLayout) -> list[slice]:
    """Return for each of a shard's slices its range in the flat model."""
    starts = spec.offsets
    return [
        slice(starts[piece.tensor] + piece.start, starts[piece.tensor] + piece.stop)
        for piece in layout.slices
    ]


def shard_spec(spec: ModelSpec, layout: ShardLayout) -> ModelSpec:
    """Return the specification of a shard's part as a model: one tensor per slice.

    A slice with a part of a variable becomes a flat tensor with the variable's path.
    """
    pieces = []
    for piece in layout.slices:
        tensor = spec.tensors[piece.tensor]
        whole = piece.size == tensor.size
        pieces.append(tensor if whole else TensorSpec(tensor.path, (piece.size,)))
    return ModelSpec(tuple(pieces))


def part_of_spec(spec: ModelSpec, numbers: Sequence[int]) -> ModelSpec:
    """Return the specification of the model that has only the variables with these numbers."""
    return ModelSpec(tuple(spec.tensors[number] for number in numbers))


def part_of_layout(layout: ShardLayout, numbers: Sequence[int]) -> tuple[ShardLayout, list[int]]:
    """Return the part of a shard's layout that belongs to some variables of the model.

    Args:
        layout: The layout of the shard, for the whole model.
        numbers: Numbers of the variables in the model, ascending.

    Returns:
        The layout for `part_of_spec(spec, numbers)`, and the numbers of its slices in `layout`.
    """
    renumbered = {number: position for position, number in enumerate(numbers)}
    slots = [slot for slot, piece in enumerate(layout.slices) if piece.tensor in renumbered]
    pieces = [layout.slices[slot] for slot in slots]
    slices = (Slice(renumbered[piece.tensor], piece.start, piece.stop) for piece in pieces)
    return ShardLayout(tuple(slices)), slots


def split_packet(packet: Packet, layouts: tuple[ShardLayout, ...]) -> list[tuple[Block, ...]]:
    """Cut a packet into one tuple of blocks per shard; a block's `slot` is the slice number.

    If a slice contains no entry of a sparse block, the shard gets no block for this slice.
    """
    by_tensor = {block.slot: block for block in packet.blocks}
    return [
        tuple(
            part
            for slot, piece in enumerate(layout.slices)
            if piece.tensor in by_tensor
            if (part := _part(by_tensor[piece.tensor], slot, piece)) is not None
        )
        for layout in layouts
    ]


def _part(block: Block, slot: int, piece: Slice) -> Block | None:
    if isinstance(block, LowRankBlock):
        return low_rank.part(block, slot, piece)
    if piece.size == block.size and (block.indices is None or block.indices.size):
        return block if block.slot == slot else dataclasses.replace(block, slot=slot)
    if block.indices is None:
        return Block(slot, piece.size, None, _some(block.values, piece.start, piece.stop, piece))
    first, last = block.indices.searchsorted((piece.start, piece.stop))
    if first == last:
        return None
    indices = block.indices[first:last] - piece.start if piece.start else block.indices[first:last]
    return Block(slot, piece.size, indices, _some(block.values, first, last, piece))


def _some(values: CodedValues, first: int, last: int, piece: Slice) -> CodedValues:
    """Return the values from `first` to `last` of a block, for the slice `piece` of its tensor."""
    if isinstance(values, ChunkedValues):
        return values.part(slice(first, last), piece.start)
    return dataclasses.replace(values, data=values.data[first:last])

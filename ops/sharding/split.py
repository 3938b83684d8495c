"""Division of a model, and of a worker's packet (coded update), among the shard servers.

A placement policy decides which shard server holds which slices of the tensors. The module `split`
cuts a packet (coded update) by the index ranges of variable slices. The gradient codec selects
entries from whole tensors before `split_packet`, so the number of shard servers does not affect
which entries are sent.
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

#: A tensor with more entries than this number is cut into one slice per shard server (as in MXNet's
#: kvstore).
MAX_SLICE_ENTRIES = 1_000_000


def place_tensors(spec: ModelSpec, num_shards: int, cuts: bool = True) -> tuple[ShardLayout, ...]:
    """Spread tensors over shards: large ones in equal slices, others to the least loaded shard.

    The placement of tensors by `place_tensors` is deterministic, so every node computes the same
    placement without communication. The largest tensors and slices are placed first, which keeps
    the shard servers' sizes even. Among tensors of equal size, the tensor with the lowest number is
    placed first; among equally loaded shard servers, the server with the lowest number gets the
    tensor.

    Args:
        spec: Paths, shapes and dtypes of the model's variables.
        num_shards: Number of shard servers, 1 or more.
        cuts: True if a variable may be cut, so that a shard server holds only a part of the
            variable.

    Returns:
        One layout per shard, with its slices in tensor order.

    Raises:
        ConfigurationError: There are more shard servers than tensors and slices, so that a shard
            server would have no weights.
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
    """Return, for each variable slice of a shard server, the slice's range in the flat model."""
    starts = spec.offsets
    return [
        slice(starts[piece.tensor] + piece.start, starts[piece.tensor] + piece.stop)
        for piece in layout.slices
    ]


def shard_spec(spec: ModelSpec, layout: ShardLayout) -> ModelSpec:
    """Return a shard server's slices as the specification of a model: one tensor per slice.

    A slice that is a part of a variable becomes a flat tensor with the variable's path.
    """
    pieces = []
    for piece in layout.slices:
        tensor = spec.tensors[piece.tensor]
        whole = piece.size == tensor.size
        pieces.append(tensor if whole else TensorSpec(tensor.path, (piece.size,)))
    return ModelSpec(tuple(pieces))


def part_of_spec(spec: ModelSpec, numbers: Sequence[int]) -> ModelSpec:
    """Return the specification of a model that has only the variables `numbers` of a model."""
    return ModelSpec(tuple(spec.tensors[number] for number in numbers))


def part_of_layout(layout: ShardLayout, numbers: Sequence[int]) -> tuple[ShardLayout, list[int]]:
    """Return the part of a shard server's layout that belongs to some variables of the model.

    Args:
        layout: The layout (list of variable slices) of the shard server, for the whole model.
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
    """Cut a packet into a tuple of blocks per shard server; a block's `slot` is its slice number.

    If a variable slice contains no entry of a sparse block, the shard server gets no block for the
    slice.
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

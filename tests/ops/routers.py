"""Shards with blocks for a router, a simple way to combine the router's parts, and losses."""

import dataclasses

import numpy as np

from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels.numpy_ops import dequantise, from_levels
from thinwire.ops.routing.base import LostEntries, RouteContext, ValueEncoding
from thinwire.ops.types import Block, CodedValues, RangedBlock, ShardLayout, Slice
from thinwire.ops.wire import blocks as wire_blocks
from thinwire.ops.wire.low_rank import expanded

BODIES = load_kernels("numpy")
FLOAT = np.float32


def shard_of(*sizes):
    """One shard that holds tensors of these sizes."""
    return (ShardLayout(tuple(Slice(number, 0, size) for number, size in enumerate(sizes))),)


def context(step=1, loss=None, seed=5, worker=1, bodies=BODIES):
    return RouteContext(step, loss, seed, worker, bodies)


def dense(slot, values, dtype="float32"):
    return Block(slot, len(values), None, BODIES.quantise(np.asarray(values, FLOAT), dtype))


def sparse(slot, size, at, values, dtype="float32"):
    at = np.asarray(at, np.int64)
    return Block(slot, size, at, BODIES.quantise(np.asarray(values, FLOAT), dtype))


def blocks_of(*magnitudes):
    """A tensor of blocks of four entries, each of one magnitude."""
    return np.repeat(np.array(magnitudes, FLOAT), 4)


def entries_of(blocks, sizes):
    """Decode blocks: [size] float32 per slot, 0 at entries without a value."""
    found = [np.zeros(size, FLOAT) for size in sizes]
    for block in blocks:
        block, target = expanded(block), found[block.slot]
        if isinstance(block, RangedBlock):
            lengths = wire_blocks.lengths(block.size, block.block_entries)
            target[np.repeat(block.present, lengths)] = dequantise(block.values)
        else:
            target[slice(None) if block.indices is None else block.indices] = dequantise(
                block.values
            )
    return found


def parts_of(part):
    """Number of a block, its channel, its entries in the slot, its datagrams' decoded values."""
    for number, channel in zip(part.blocks, part.channels, strict=True):
        start, stop = number * part.block_entries, (number + 1) * part.block_entries
        if part.indices is None:
            at = inside = np.arange(start, min(stop, part.size))
        else:
            inside = np.flatnonzero((part.indices >= start) & (part.indices < stop))
            at = part.indices[inside]
        low, scale = part.lows[number], part.scales[number]
        yield int(number), int(channel), at, value_of(part, part.data[inside], low, scale)


def value_of(part, data, low, scale):
    """The definition of each encoding."""
    if part.encoding in (ValueEncoding.UINT16, ValueEncoding.UINT8, ValueEncoding.UINT4):
        return from_levels(data, low, scale)
    assert low == 0
    dtype = part.encoding.name.lower()
    return dequantise(CodedValues(dtype, data, float(scale)))


def together(routed, sizes, arrives=lambda slot, number: True):
    """The slots as a shard has them when some unreliable blocks have arrived."""
    found = entries_of(routed.reliable, sizes)
    for part in routed.unreliable:
        for number, _, at, values in parts_of(part):
            if arrives(part.slot, number):
                assert not found[part.slot][at].any(), "on two channels at once"
                found[part.slot][at] = values
    return found


def lost_of(routed, arrives):
    """Return the arguments of `Dgt.undelivered`."""
    lost = []
    for part in routed.unreliable:
        gone = [at for number, _, at, _ in parts_of(part) if not arrives(part.slot, number)]
        if not gone:
            continue
        if part.indices is None:
            ranges = np.array([[at[0], at[-1] + 1] for at in gone])
            lost.append(LostEntries(part.slot, ranges))
        else:
            lost.append(LostEntries(part.slot, None, np.sort(np.concatenate(gone))))
    return lost


def channels_of(routed, slot, num_blocks):
    """The channel of each block of a slot: 0 reliable, None: not sent."""
    by_slot = {block.slot: block for block in routed.reliable}
    block = by_slot[slot]
    present = block.present if isinstance(block, RangedBlock) else np.ones(num_blocks, bool)
    found = [0 if there else None for there in present]
    for part in routed.unreliable:
        if part.slot == slot:
            for number, channel in zip(part.blocks, part.channels, strict=True):
                assert found[number] is None
                found[number] = int(channel)
    return found


def routed(policy, layouts, blocks, state=None, **about):
    """One exchange of a single shard: begin, cut."""
    state = policy.init(layouts) if state is None else state
    now = context(**about)
    return policy.cut(0, tuple(blocks), policy.begin(state, now), now)


def same_bits(one, other):
    """Whether two pictures of plain data are alike to the last bit."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        return all(
            same_bits(getattr(one, field.name), getattr(other, field.name))
            for field in dataclasses.fields(one)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other

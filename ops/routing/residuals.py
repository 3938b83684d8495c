"""Residuals of a router: rounding errors and lost values, to add to the worker's next gradient.

One shard server's residuals are lists with one item per variable slice: ``residual`` [size]
float32; ``holds``, True if the residual is not all zeros; ``owed`` [m] int64, lost positions that
the next sparse gradient must include; ``before``, the values that undo the last push; ``sent``, the
values sent in datagrams by the last push, until the shard server reports which datagrams arrived.
The router adds the whole residual of a variable slice to a dense gradient. To a sparse gradient
only the residual at the gradient's positions and at owed positions (lost earlier) is added, so
rounding errors alone never make a sparse gradient denser.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.ops.kernels.numpy_ops import dequantise, from_levels, is_on_device, union
from thinwire.ops.routing.base import LostEntries, UnreliableBlocks, ValueEncoding
from thinwire.ops.types import Array, Block, CodedValues, Float32, Int64, State

_LEVELS = (ValueEncoding.UINT16, ValueEncoding.UINT8, ValueEncoding.UINT4)


def zeros(sizes: list[int]) -> State:
    """Return zero residuals for a shard server; `sizes` has each slice's number of entries."""
    return {
        "residual": [np.zeros(size, np.float32) for size in sizes],
        "holds": [False] * len(sizes),
        "owed": [np.zeros(0, np.int64) for _ in sizes],
        "before": [None] * len(sizes),
        "sent": [None] * len(sizes),
    }


def begin_push(kept: State) -> None:
    """Forget the data with which `undo` restores the residuals from before the previous push."""
    for name in ("before", "sent"):
        kept[name] = [None] * len(kept["holds"])


def owed_blocks(kept: State, blocks: tuple[Block, ...]) -> list[Block]:
    """Return an empty sparse block for each slice that `blocks` lacks and that has owed positions.

    Owed positions are positions with lost gradient values, which the next push must include.
    """
    slots = {block.slot for block in blocks}
    empty = np.zeros(0, np.float32)
    return [
        Block(slot, kept["residual"][slot].size, owed[:0], CodedValues("float32", empty))
        for slot, owed in enumerate(kept["owed"])
        if owed.size and slot not in slots
    ]


def compensate(kept: State, block: Block) -> Block:
    """Return the sum of a gradient block and its residual, and set the used residual to zero."""
    slot = block.slot
    residual = kept["residual"][slot]
    if not kept["holds"][slot]:
        if not isinstance(
            block.values.data, type(residual)
        ):  # the gradient is in device memory and the residual in host memory, or vice versa
            residual = kept["residual"][slot] = _zeros_like(block)
        kept["before"][slot] = {"at": None, "residual": residual, "owed": kept["owed"][slot]}
        return block
    values, owed = dequantise(block.values), kept["owed"][slot]
    if block.indices is None:
        at = None
        kept["before"][slot] = {"at": at, "residual": residual, "owed": owed}
        values = values + residual
        kept["residual"][slot] = _zeros_like(block)
        kept["holds"][slot] = False
    else:
        at, values = _united(block.indices, values, owed)
        held = residual[at]
        kept["before"][slot] = {"at": at, "residual": held, "owed": owed}
        values = values + np.asarray(held)  # sparse gradient values are in host memory
        residual[at] = 0
    kept["owed"][slot] = owed[:0]
    return Block(slot, block.size, at, CodedValues("float32", values))


def _zeros_like(block: Block) -> Float32:
    """Return zeros for all entries of the slice, in the memory (device or host) of its gradient."""
    data: Any = block.values.data
    if block.indices is not None or not is_on_device(data):
        return np.zeros(block.size, np.float32)
    zeros: Float32 = data.zeros()
    return zeros


def _united(indices: Int64, values: Float32, owed: Int64) -> tuple[Int64, Float32]:
    """Return the ascending union of `indices` and `owed`, and its values: 0 at added positions."""
    if not owed.size:
        return indices, values
    positions = union([indices, owed])
    spread = np.zeros(positions.size, np.float32)
    spread[np.searchsorted(positions, indices)] = values
    return positions, spread


def store_errors(kept: State, block: Block, entries: Int64 | None, errors: Float32) -> None:
    """Store the rounding errors of quantized gradient values (value minus sent value) as residuals.

    Args:
        kept: The worker's residuals for one shard server.
        block: Gradient block that `compensate` returned.
        entries: Indices of the sparse gradient's values that have rounding errors; None for a dense
            gradient.
        errors: Rounding errors of the gradient values. The caller must not use the array after the
            call.
    """
    slot = block.slot
    if entries is None or block.indices is None:
        kept["residual"][slot] = errors
    else:
        # The array of zeros is also in `before`, which restores it if the shard server refuses the
        # push. Rounding errors written into the shared array would survive the undo, so they need a
        # new array.
        if not kept["holds"][slot]:
            kept["residual"][slot] = np.zeros(block.size, np.float32)
        kept["residual"][slot][block.indices[entries]] = errors
    kept["holds"][slot] = True


def remember_sent(kept: State, parts: tuple[UnreliableBlocks, ...]) -> None:
    """Store the gradient values sent in datagrams until `settle` learns which values were lost."""
    for part in parts:
        names = ("block_entries", "indices", "data", "scales", "lows")
        kept["sent"][part.slot] = {name: getattr(part, name) for name in names}
        kept["sent"][part.slot]["encoding"] = int(part.encoding)


def settle(kept: State, lost: tuple[LostEntries, ...]) -> None:
    """Add the lost gradient values of the last push to the residuals; forget the arrived values."""
    for missed in lost:
        sent, slot = kept["sent"][missed.slot], missed.slot
        at = positions_of(missed)
        if sent is None or not at.size:
            continue
        kept["residual"][slot][at] += _values_at(sent, at)
        kept["holds"][slot] = True
        kept["owed"][slot] = union([kept["owed"][slot], at])
    begin_push(kept)


def undo(kept: State) -> None:
    """Restore the residuals from before the last push, which the shard server refused."""
    for slot, before in enumerate(kept["before"]):
        if before is None:
            continue
        if before["at"] is None:
            kept["residual"][slot] = before["residual"]
        else:
            kept["residual"][slot][before["at"]] = before["residual"]
        kept["owed"][slot] = before["owed"]
        kept["holds"][slot] = bool(kept["residual"][slot].any())
    begin_push(kept)


def positions_of(lost: LostEntries) -> Int64:
    """Return the positions of the lost gradient entries in their variable slice, [m] int64."""
    if lost.positions is not None:
        return lost.positions
    if lost.ranges is None or not len(lost.ranges):
        return np.zeros(0, np.int64)
    starts, stops = np.asarray(lost.ranges, np.int64).T
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    positions: Int64 = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return positions


def _values_at(sent: State, at: Int64) -> Float32:
    """Return the values that the last push sent in datagrams for positions `at` of a slice."""
    indices = sent["indices"]
    data: Array = sent["data"][at if indices is None else np.searchsorted(indices, at)]
    number = at // sent["block_entries"]
    if ValueEncoding(sent["encoding"]) in _LEVELS:
        return from_levels(data, sent["lows"][number], sent["scales"][number])
    return data

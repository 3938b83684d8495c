"""From what has come of a slot to its block, as if everything had come reliably; else zeros."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ops.kernels.quantise import dequantise
from ops.routing.late import Held
from ops.types import Block, CodedValues, RangedBlock

if TYPE_CHECKING:
    from ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class Fresh:
    """What came in datagrams for one slot in its own step."""

    slot: int
    size: int  # entries
    dense: Float32 | None  # [size] float32: for the values, zeros elsewhere; None: a sparse slot
    has_dense: bool  # whether there is anything in it
    sparse: list[tuple[Int64, Float32]]  # positions and values


def closed_block(fresh: Fresh, block: Block | None, held: Held | None) -> Block | None:
    """Return one slot's block in float32; None: a sparse slot that nothing came for.

    Args:
        fresh: Of the datagrams in time; its dense buffer becomes the block's.
        block: The reliable part: dense, ranges of a dense one, or sparse; None: there is none.
        held: What came late.
    """
    is_dense = fresh.dense is not None if block is None else block.indices is None
    with np.errstate(over="ignore"):  # whoever takes the block looks whether it is finite
        if is_dense and fresh.dense is not None:
            return _dense(fresh, fresh.dense, block, held)
        return _sparse(fresh, block, held)


def _dense(fresh: Fresh, target: Float32, block: Block | None, held: Held | None) -> Block:
    if isinstance(block, RangedBlock):
        _place_ranges(target, block)
    elif block is not None:
        target[:] = dequantise(block.values)
    for positions, values in fresh.sparse:
        np.add.at(target, positions, values)
    if held is not None:
        if held.dense is not None:
            target += held.dense
        for positions, values in zip(held.positions, held.values, strict=True):
            np.add.at(target, positions, values)
    target.flags.writeable = False  # the same may be asked for again
    return Block(fresh.slot, fresh.size, None, CodedValues("float32", target))


def _place_ranges(target: Float32, block: RangedBlock) -> None:
    """Write the ranges that are present; all but the last are equally long."""
    values = dequantise(block.values)
    each, num_whole = block.block_entries, block.size // block.block_entries
    whole = block.present[:num_whole]
    num_values = each * int(np.count_nonzero(whole))
    target[: num_whole * each].reshape(num_whole, each)[whole] = values[:num_values].reshape(
        -1, each
    )
    if num_values < values.size:
        target[num_whole * each :] = values[num_values:]


def _sparse(fresh: Fresh, block: Block | None, held: Held | None) -> Block | None:
    parts = list(fresh.sparse)
    if block is not None and block.indices is not None:
        parts.insert(0, (block.indices, dequantise(block.values)))
    buffers = [fresh.dense] if fresh.has_dense else []
    if held is not None:
        parts += zip(held.positions, held.values, strict=True)
        buffers.append(held.dense)
    for buffer in buffers:
        if buffer is not None:
            positions = np.flatnonzero(buffer)
            parts.append((positions, buffer[positions]))
    parts = [part for part in parts if len(part[0])]
    if not parts:
        return None
    indices, values = _merged(parts)
    return Block(fresh.slot, fresh.size, indices, CodedValues("float32", values))


def _merged(parts: list[tuple[Int64, Float32]]) -> tuple[Int64, Float32]:
    """Return positions, ascending and unique, and values; what occurs twice is summed."""
    if len(parts) == 1:
        indices, values = parts[0]
    else:
        indices = np.concatenate([positions for positions, _ in parts])
        values = np.concatenate([values for _, values in parts])
    if (indices[1:] > indices[:-1]).all():
        return indices, values
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.concatenate([[True], indices[1:] != indices[:-1]])
    if first.all():
        return indices, values
    starts = np.flatnonzero(first)
    return indices[starts], np.add.reduceat(values, starts)

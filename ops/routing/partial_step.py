"""A gradient that a shard server is receiving over UDP and gRPC, and the received blocks.

A `PartialStep` writes the values of UDP datagrams into a buffer as they arrive, and collects the
gradient blocks that arrive over gRPC. A slot (slice of a variable) is closed when the shard server
has ended the wait for its UDP datagrams. `finalize_block` makes one gradient block for a closed
variable slice (its wait is over) from the gRPC part, the datagrams that arrived in time, and late
datagrams of earlier steps in `LateBlocks`. A shard server sets gradient entries that did not arrive
in UDP datagrams to zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from thinwire.ops.kernels.numpy_ops import dequantise
from thinwire.ops.routing.base import Manifest
from thinwire.ops.routing.parser import ParsedDatagrams
from thinwire.ops.routing.sequence_set import SequenceSet
from thinwire.ops.types import Block, Bool, CodedValues, Float32, Int64, LowRankBlock, RangedBlock


@dataclasses.dataclass
class MarkedSlots:
    """Gradient blocks received in one gRPC message, for all variable slices or for one tensor."""

    blocks: tuple[Block, ...]  # gradient blocks that arrived over gRPC
    slots: Int64  # [b] int64: numbers of the variable slices
    # announcement of the UDP datagrams for the variable slices of this gRPC message
    manifest: Manifest
    marked_at: float  # time at which the gRPC part of the gradient arrived, in seconds
    # time at which the wait for datagrams of the message's variable slices ends, in seconds
    deadline: float
    closed: bool = False

    @property
    def num_announced(self) -> int:
        """Number of UDP datagrams that the worker announced in the gRPC message."""
        return sum(announced.count for announced in self.manifest.channels)


class PartialStep:
    """UDP datagrams and gRPC messages of one pushed gradient that have arrived at a shard server.

    Attributes:
        number: Number of the training step whose gradient is pushed, modulo 2**32.
        step: Full number of the training step whose gradient is pushed; None if no gRPC part of the
            gradient has arrived.
        sequences: Set of the sequence numbers of the UDP datagrams that have arrived.
        ended: True if all gRPC parts of the pushed gradient have arrived.
        groups: Gradient parts that have arrived over gRPC, with their variable slices.
        closed: [slots] bool: True for variable slices whose wait for datagrams is over; a datagram
            for a closed slice is late.
        num_placed: Number of datagrams whose gradient values were written into the buffer.
        num_late: Number of late datagrams of earlier steps whose gradient values were added.
        sum_of_ages: Sum of the delays, in training steps, of the late datagrams that `num_late`
            counts.
        num_filled: Number of places for datagrams in the buffer that only late datagrams of earlier
            steps have filled.
    """

    def __init__(self, number: int, offsets: Sequence[int]) -> None:
        """Start without datagrams; `offsets` has each variable slice's start and the total size."""
        self.number = number
        self.step: int | None = None
        self.sequences = SequenceSet(offsets[-1])
        self.ended = False
        self.groups: list[MarkedSlots] = []
        self.num_placed = self.num_late = self.sum_of_ages = self.num_filled = 0
        num_slots = len(offsets) - 1
        self.closed = np.zeros(num_slots, bool)
        self._offsets = np.array(offsets, np.int64)
        self._marked: set[int] = set()
        # number of arrived datagrams per variable slice
        self._arrived = np.zeros(num_slots, np.int64)
        # [shard] float32: gradient values of all variable slices; None before the first dense
        # values.
        self._flat: Float32 | None = None
        self._has_dense: Bool = np.zeros(num_slots, bool)
        self._sparse: dict[int, list[tuple[Int64, Float32]]] = {}
        # positions in the shard's buffer at which written datagrams start
        self._starts: list[Int64] = []
        self._results: dict[int, Block] = {}

    # -- datagrams --------------------------------------------------------------------------

    def place(self, arrivals: ParsedDatagrams) -> None:
        """Write the gradient values of new datagrams to their positions in the buffer.

        The shard server must not have ended the wait for the slices of the datagrams given to
        `place`.
        """
        slots, values = arrivals.slots, arrivals.values
        starts = self._offsets[slots] + arrivals.offsets
        if arrivals.positions is None:
            count = values.shape[1]
            flat = self._dense()
            # Row i of `windows` is a view of flat[i : i + count], so one assignment places the
            # values of all datagrams without a loop.
            windows: Float32 = np.ndarray(
                (flat.size - count + 1, count), np.float32, flat, 0, flat.strides * 2
            )
            windows[starts] = values
            self._has_dense[slots] = True
        else:
            for slot, part in arrivals.by_slot():
                if part.positions is not None:
                    entries = part.positions.ravel(), np.array(part.values).ravel()
                    self._sparse.setdefault(slot, []).append(entries)
        self._starts.append(starts)
        self._arrived += np.bincount(slots, minlength=len(self._arrived))
        self.num_placed += len(arrivals)

    def _dense(self) -> Float32:
        if self._flat is None:
            self._flat = np.zeros(self._offsets[-1], np.float32)
        return self._flat

    # -- the reliable part ------------------------------------------------------------------

    def is_repeated(self, blocks: Sequence[Block]) -> bool:
        """Return True if the gRPC part with the given gradient blocks was added before."""
        return self.ended or bool(blocks and {block.slot for block in blocks} <= self._marked)

    def add_reliable(
        self, blocks: Sequence[Block], manifest: Manifest, now: float, wait: float
    ) -> None:
        """Add a gRPC part of the pushed gradient, for all variable slices or for one tensor.

        Args:
            blocks: Gradient blocks that arrived over gRPC, one per variable slice.
            manifest: Announcement of the UDP datagrams for the variable slices in `blocks`.
            now: Current time by the caller's clock, in seconds.
            wait: Longest wait for the announced UDP datagrams, in seconds.

        Raises:
            ValueError: The gRPC part does not fit the shard's variables, or repeats a slice, or the
                gradient has too many parts.
        """
        self._check(blocks)
        if len(self.groups) > len(self.closed):
            raise ValueError(
                f"{len(self.groups) + 1} reliable messages of one step; expected at most one for "
                f"each of {len(self.closed)} tensor slots and one more"
            )
        self.sequences.announce(manifest.channels)
        slots = np.array([block.slot for block in blocks], np.int64)
        self.groups.append(MarkedSlots(tuple(blocks), slots, manifest, now, now + wait))
        self._marked.update(slots.tolist())

    def _check(self, blocks: Sequence[Block]) -> None:
        sizes = np.diff(self._offsets)
        slots = [block.slot for block in blocks]
        if len(set(slots)) < len(slots) or not self._marked.isdisjoint(slots):
            raise ValueError(
                f"a message with reliable entries of tensor slots {slots} arrived after messages "
                f"for slots {sorted(self._marked)}; expected each slot once"
            )
        for block in blocks:
            if not 0 <= block.slot < len(sizes) or block.size != sizes[block.slot]:
                raise ValueError(
                    f"a push has a block of {block.size} entries for slot {block.slot}, but the "
                    f"tensor slots of this shard have {sizes.tolist()} entries"
                )
            if isinstance(block, RangedBlock):
                _check_ranges(block)

    def is_complete(self, group: MarkedSlots) -> bool:
        """Return True if all UDP datagrams that a gRPC part announced have arrived."""
        num_arrived: int = sum(self._arrived[group.slots].tolist())
        return num_arrived >= group.num_announced

    # -- closing ----------------------------------------------------------------------------

    def close(self, group: MarkedSlots, late: LateBlocks) -> int:
        """End the wait for datagrams of a gRPC part's slices; return the number of unused ones."""
        group.closed = True
        unused = sum(self._close_slot(block.slot, block, late) for block in group.blocks)
        group.blocks = ()
        return unused

    def close_rest(self, late: LateBlocks) -> None:
        """End the wait for variable slices that have datagrams, but no gRPC part of a gradient."""
        waiting = np.flatnonzero((self._arrived > 0) & ~self.closed).tolist()
        unmarked = (slot for slot in late if not self.closed[slot])
        for slot in sorted({*waiting, *unmarked}):
            self._close_slot(slot, None, late)

    def _close_slot(self, slot: int, block: Block | None, late: LateBlocks) -> int:
        self.closed[slot] = True
        held = late.pop(slot, None)
        if isinstance(block, LowRankBlock):
            self._results[slot] = block
            return 0 if held is None else held.num_datagrams
        start, stop = int(self._offsets[slot]), int(self._offsets[slot + 1])
        is_dense = self._has_dense[slot] or (block is not None and block.indices is None)
        view = self._dense()[start:stop] if is_dense else None
        sparse = self._sparse.pop(slot, [])
        fresh = TimelyValues(slot, stop - start, view, bool(self._has_dense[slot]), sparse)
        closed = finalize_block(fresh, block, held)
        if closed is not None:
            self._results[slot] = closed
        if held is not None:
            self.num_late += held.num_datagrams
            self.sum_of_ages += held.sum_of_ages
            self.num_filled += self._num_filled(start, block, held)
        return 0

    def _num_filled(self, start: int, block: Block | None, held: LateValues) -> int:
        """Return the number of datagrams' places that only late datagrams have filled."""
        places = np.unique(np.concatenate(held.starts))
        if isinstance(block, RangedBlock):
            places = places[~block.present[places // block.block_entries]]
        elif block is not None and block.indices is None:
            return 0
        fresh = np.concatenate(self._starts) if self._starts else np.zeros(0, np.int64)
        return int(np.count_nonzero(~np.isin(places + start, fresh)))

    def total(self, count: Callable[[Manifest], int]) -> int:
        """Return the sum of `count` over the announcements of the pushed gradient's datagrams."""
        return sum(count(group.manifest) for group in self.groups)

    def blocks(self) -> tuple[Block, ...]:
        """Return the gradient blocks of variable slices whose wait is over, ordered by slice."""
        return tuple(self._results[slot] for slot in sorted(self._results))

    def flat(self) -> Float32 | None:
        """Return all slices' gradients in one buffer [shard]; None if one is missing or sparse."""
        results = self._results.values()
        if len(results) < len(self.closed) or not all(_is_dense(block) for block in results):
            return None
        flat = self._dense()
        # the gradient may be returned a second time (find_closed), so it is read-only
        flat.flags.writeable = False
        return flat


def _is_dense(block: Block) -> bool:
    return block.indices is None and not isinstance(block, LowRankBlock)


def _check_ranges(block: RangedBlock) -> None:
    """Check that a gradient block received in part has as many values as its ranges have entries.

    Raises:
        ValueError: The number of ranges or of values of the gradient block is wrong for its
            variable slice.
    """
    num_ranges = -(-block.size // block.block_entries) if block.block_entries > 0 else -1
    if len(block.present) != num_ranges:
        raise ValueError(
            f"the block of tensor slot {block.slot} has {len(block.present)} ranges of "
            f"{block.block_entries} entries for {block.size} entries; expected {num_ranges} ranges"
        )
    expected = block.block_entries * int(np.count_nonzero(block.present))
    if num_ranges and block.present[-1]:
        expected -= num_ranges * block.block_entries - block.size
    if block.values.data.size != expected:
        raise ValueError(
            f"slot {block.slot}: {block.values.data.size} values for ranges of {expected} entries"
        )


# -- late datagrams -----------------------------------------------------------------------------


@dataclasses.dataclass
class LateValues:
    """Gradient values of late datagrams for a variable slice, with less weight for more delay."""

    size: int  # number of entries of the variable slice
    # [size] float32: sum of dense gradients of late datagrams; None before the first one
    dense: Float32 | None = None
    # positions of the values of late sparse datagrams
    positions: list[Int64] = dataclasses.field(default_factory=list)
    # values of late sparse datagrams, in the order of `positions`
    values: list[Float32] = dataclasses.field(default_factory=list)
    # position of the first value of each late datagram
    starts: list[Int64] = dataclasses.field(default_factory=list)
    num_datagrams: int = 0
    sum_of_ages: int = 0  # sum of the delays of the late datagrams, in steps

    def add(self, part: ParsedDatagrams, age: int, weight: float) -> None:
        """Add datagrams of the slice that are `age` steps late, with values times `weight`."""
        values = part.values if weight == 1 else part.values * np.float32(weight)
        if part.positions is not None:
            self.positions.append(part.positions.ravel())
            self.values.append(np.array(values).ravel())
        else:
            if self.dense is None:
                self.dense = np.zeros(self.size, np.float32)
            windows = np.lib.stride_tricks.sliding_window_view(
                self.dense, values.shape[1], writeable=True
            )
            # The datagrams must not have common entries: `+=` with an index array reads all rows
            # before it writes a row, so the values of one of two overlapping datagrams would be
            # lost. The caller checks that the sum of gradients is finite.
            with np.errstate(over="ignore"):
                windows[part.offsets] += values
        self.starts.append(part.offsets)
        self.num_datagrams += len(part)
        self.sum_of_ages += age * len(part)


#: Number of a variable slice -> values of its late datagrams, stored until a later push of the
#: slice. A datagram is late if it arrives after the shard server's wait for datagrams has ended.
#:
#: Source: the diff-reception of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021:
#: a late block is added to the block of the next iteration. Differences: each datagram counts once
#: and only up to an age, and its weight may fall with its age.
LateBlocks = dict[int, LateValues]


# -- finalizing ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TimelyValues:
    """Gradient values of one variable slice from datagrams that arrived in time."""

    slot: int
    size: int  # number of entries of the variable slice
    # [size] float32: gradient values, 0 for missing values; None for a sparse gradient
    dense: Float32 | None
    has_dense: bool  # True if datagrams with values of a dense gradient have arrived
    sparse: list[tuple[Int64, Float32]]  # positions and values of datagrams of a sparse gradient


def finalize_block(
    fresh: TimelyValues, block: Block | None, held: LateValues | None
) -> Block | None:
    """Return a slice's gradient in float32; None for a sparse gradient without arrived values.

    Args:
        fresh: Gradient values of datagrams that arrived in time; the result uses the memory of
            `fresh`.
        block: Gradient block that arrived over gRPC: dense, ranges of a dense block, or sparse;
            None if it has not arrived.
        held: Gradient values of late datagrams; None if the variable slice has none.
    """
    is_dense = fresh.dense is not None if block is None else block.indices is None
    with np.errstate(over="ignore"):  # the caller checks that the gradient block is finite
        if is_dense and fresh.dense is not None:
            return _dense(fresh, fresh.dense, block, held)
        return _sparse(fresh, block, held)


def _dense(
    fresh: TimelyValues, target: Float32, block: Block | None, held: LateValues | None
) -> Block:
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
    # the gradient block may be returned a second time (find_closed), so it is read-only
    target.flags.writeable = False
    return Block(fresh.slot, fresh.size, None, CodedValues("float32", target))


def _place_ranges(target: Float32, block: RangedBlock) -> None:
    """Write the received ranges of a gradient block into `target` [size]."""
    values = dequantise(block.values)
    length, num_whole = block.block_entries, block.size // block.block_entries
    whole = block.present[:num_whole]
    num_values = length * int(np.count_nonzero(whole))
    target[: num_whole * length].reshape(num_whole, length)[whole] = values[:num_values].reshape(
        -1, length
    )
    if num_values < values.size:
        target[num_whole * length :] = values[num_values:]


def _sparse(fresh: TimelyValues, block: Block | None, held: LateValues | None) -> Block | None:
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
    """Return the unique ascending positions of all given parts, and the summed values."""
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

"""One step that is being received: values in place, what is marked, what is still missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ops.routing.closing import Fresh, closed_block
from ops.routing.late import Held, Late
from ops.routing.parsing import Arrivals
from ops.routing.routed import Manifest
from ops.routing.sequences import Sequences
from ops.types import Block, LowRankBlock, RangedBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Float32, Int64


@dataclasses.dataclass
class Group:
    """What one end marker is for: the slots of a step, or of one tensor."""

    blocks: tuple[Block, ...]  # the reliable part
    slots: Int64  # [b] int64
    manifest: Manifest
    marked_at: float
    deadline: float  # it is closed then at the latest
    closed: bool = False

    @property
    def num_announced(self) -> int:
        """Datagrams that travel for its slots."""
        return sum(each.count for each in self.manifest.channels)


class OpenStep:
    """What has come of one step.

    Attributes:
        number: Of the step, modulo 2**32.
        step: The same in full, once it is marked.
        sequences: Which datagrams have come.
        ended: All reliable parts are in.
        groups: One for each end marker so far.
        closed: [slots] bool: which take no more.
        num_placed: Datagrams that are in place.
        num_late, sum_of_ages: Of earlier steps' datagrams that were taken in.
        num_filled: Of those, the ones where nothing of this step came.
    """

    def __init__(self, number: int, offsets: Sequence[int]) -> None:
        """Begin with nothing; slots lie at `offsets` in the shard, the total at the end."""
        self.number = number
        self.step: int | None = None
        self.sequences = Sequences(offsets[-1])
        self.ended = False
        self.groups: list[Group] = []
        self.num_placed = self.num_late = self.sum_of_ages = self.num_filled = 0
        num_slots = len(offsets) - 1
        self.closed = np.zeros(num_slots, bool)
        self._offsets = np.array(offsets, np.int64)
        self._marked: set[int] = set()
        self._arrived = np.zeros(num_slots, np.int64)  # datagrams
        self._flat: Float32 | None = None  # [shard] float32, made when something dense comes
        self._has_dense: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self._sparse: dict[int, list[tuple[Int64, Float32]]] = {}
        self._starts: list[Int64] = []  # of the datagrams in place, in the shard
        self._results: dict[int, Block] = {}

    # -- datagrams --------------------------------------------------------------------------

    def place(self, arrivals: Arrivals) -> None:
        """Put new datagrams for slots that are not closed where they belong."""
        slots, values = arrivals.slots, arrivals.values
        starts = self._offsets[slots] + arrivals.offsets
        if arrivals.positions is None:
            count = values.shape[1]
            flat = self._dense()
            windows: Float32 = np.ndarray(
                (flat.size - count + 1, count), np.float32, flat, 0, flat.strides * 2
            )
            windows[starts] = values
            self._has_dense[slots] = True
        else:
            for slot, part in arrivals.by_slot():
                entries = part.positions.ravel(), np.array(part.values).ravel()  # type: ignore[union-attr]
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
        """Return whether this reliable part is here already."""
        return self.ended or bool(blocks and {block.slot for block in blocks} <= self._marked)

    def mark(self, blocks: Sequence[Block], manifest: Manifest, now: float, wait: float) -> None:
        """Take in the reliable part of the step or of one tensor.

        Raises:
            ValueError: It does not fit the shard, repeats a slot, or is one part too many.
        """
        self._check(blocks)
        if len(self.groups) > len(self.closed):
            raise ValueError(
                f"{len(self.groups) + 1} parts of one step; expected at most one for each of "
                f"{len(self.closed)} slots and one more"
            )
        self.sequences.announce(manifest.channels)
        slots = np.array([block.slot for block in blocks], np.int64)
        self.groups.append(Group(tuple(blocks), slots, manifest, now, now + wait))
        self._marked.update(slots.tolist())

    def _check(self, blocks: Sequence[Block]) -> None:
        sizes = np.diff(self._offsets)
        slots = [block.slot for block in blocks]
        if len(set(slots)) < len(slots) or not self._marked.isdisjoint(slots):
            raise ValueError(f"slots {slots} beside {sorted(self._marked)}: one of them repeats")
        for block in blocks:
            if not 0 <= block.slot < len(sizes) or block.size != sizes[block.slot]:
                raise ValueError(
                    f"a block of {block.size} entries for slot {block.slot}; this shard's slots "
                    f"have {sizes.tolist()}"
                )
            if isinstance(block, RangedBlock):
                _check_ranges(block)

    def is_complete(self, group: Group) -> bool:
        """Return whether all datagrams that a marker announced are in place."""
        return sum(self._arrived[group.slots].tolist()) >= group.num_announced

    # -- closing ----------------------------------------------------------------------------

    def close(self, group: Group, late: Late) -> int:
        """Close a group's slots; return how many late datagrams found no use there."""
        group.closed = True
        unused = sum(self._close_slot(block.slot, block, late) for block in group.blocks)
        group.blocks = ()
        return unused

    def close_rest(self, late: Late) -> None:
        """Close the slots that no marker named but datagrams came for, of this or a past step."""
        waiting = np.flatnonzero((self._arrived > 0) & ~self.closed).tolist()
        unmarked = (slot for slot in late.slots() if not self.closed[slot])
        for slot in sorted({*waiting, *unmarked}):
            self._close_slot(slot, None, late)

    def _close_slot(self, slot: int, block: Block | None, late: Late) -> int:
        self.closed[slot] = True
        held = late.take(slot)
        if isinstance(block, LowRankBlock):
            self._results[slot] = block
            return 0 if held is None else held.num_datagrams
        start, stop = int(self._offsets[slot]), int(self._offsets[slot + 1])
        is_dense = self._has_dense[slot] or (block is not None and block.indices is None)
        view = self._dense()[start:stop] if is_dense else None
        sparse = self._sparse.pop(slot, [])
        fresh = Fresh(slot, stop - start, view, bool(self._has_dense[slot]), sparse)
        closed = closed_block(fresh, block, held)
        if closed is not None:
            self._results[slot] = closed
        if held is not None:
            self.num_late += held.num_datagrams
            self.sum_of_ages += held.sum_of_ages
            self.num_filled += self._num_filled(start, block, held)
        return 0

    def _num_filled(self, start: int, block: Block | None, held: Held) -> int:
        """Return in how many places something came late, but nothing of this step."""
        places = np.unique(np.concatenate(held.starts))
        if isinstance(block, RangedBlock):
            places = places[~block.present[places // block.block_entries]]
        elif block is not None and block.indices is None:
            return 0
        fresh = np.concatenate(self._starts) if self._starts else np.zeros(0, np.int64)
        return int(np.count_nonzero(~np.isin(places + start, fresh)))

    def total(self, count: Callable[[Manifest], int]) -> int:
        """Return the sum of one of the manifests' counts."""
        return sum(count(group.manifest) for group in self.groups)

    def blocks(self) -> tuple[Block, ...]:
        """Return what the closed slots hold, ascending."""
        return tuple(self._results[slot] for slot in sorted(self._results))

    def flat(self) -> Float32 | None:
        """Return all slots in one buffer, if every one is there and dense."""
        results = self._results.values()
        if len(results) < len(self.closed) or not all(_is_dense(block) for block in results):
            return None
        flat = self._dense()
        flat.flags.writeable = False  # the same may be asked for again
        return flat


def _is_dense(block: Block) -> bool:
    return block.indices is None and not isinstance(block, LowRankBlock)


def _check_ranges(block: RangedBlock) -> None:
    """Refuse values that are not those of the ranges present.

    Raises:
        ValueError: They are not.
    """
    num_ranges = -(-block.size // block.block_entries) if block.block_entries > 0 else -1
    if len(block.present) != num_ranges:
        raise ValueError(
            f"slot {block.slot}: {len(block.present)} ranges of {block.block_entries} entries for "
            f"{block.size} entries; expected {num_ranges}"
        )
    expected = block.block_entries * int(np.count_nonzero(block.present))
    if num_ranges and block.present[-1]:
        expected -= num_ranges * block.block_entries - block.size
    if block.values.data.size != expected:
        raise ValueError(
            f"slot {block.slot}: {block.values.data.size} values for ranges of {expected} entries"
        )

"""All-reduce algorithms as data, and one engine that carries any of them out. No IO, no clock.

An algorithm gives each member a list of steps: which entries go to whom, which come from whom, and
whether what comes is added or takes the place of what is there. Every entry is summed in one place
and copied from there, and the order of the additions follows from the schedule alone, so all
members end with the same bits, and so do repeats.

Sources: ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009; recursive halving and doubling, and binary blocks, Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005, and Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Entries ``start:stop`` of the buffer.
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SendPart:
    """Hand entries to a member."""

    peer: int
    entries: Range


@dataclasses.dataclass(frozen=True)
class ReceivePart:
    """Wait for entries of a member; add them to one's own, or overwrite these."""

    peer: int
    entries: Range
    adds: bool


Step = SendPart | ReceivePart
#: (member 0..p-1, members p, entries of the buffer) -> that member's steps, in order.
Algorithm = Callable[[int, int, int], list[Step]]


def ring(member: int, num_members: int, size: int) -> list[Step]:
    """Pass p-th parts around a ring: p - 1 times adding, p - 1 times copying.

    Each member sends 2 (p - 1) / p of the buffer.
    """
    after, before = (member + 1) % num_members, (member - 1) % num_members
    borders = [part * size // num_members for part in range(num_members + 1)]

    def part(number: int) -> Range:
        number %= num_members
        return borders[number], borders[number + 1]

    steps: list[Step] = []
    for turn in range(num_members - 1):
        steps.append(SendPart(after, part(member - turn)))
        steps.append(ReceivePart(before, part(member - turn - 1), adds=True))
    for turn in range(num_members - 1):
        steps.append(SendPart(after, part(member + 1 - turn)))
        steps.append(ReceivePart(before, part(member - turn), adds=False))
    return _without_empty(steps)


def butterfly(member: int, num_members: int, size: int) -> list[Step]:
    """Recursive halving, then doubling: 2 log2 p steps, 2 (p - 1) / p of the buffer sent.

    Where p is no power of two, each of the p - q members beyond the largest power of two q first
    hands its whole buffer to a partner among the q, and is given the result at the end.
    """
    block = _largest_power(num_members)
    whole = (0, size)
    if member >= block:
        partner = member - block
        return _without_empty([SendPart(partner, whole), ReceivePart(partner, whole, adds=False)])
    partner = member + block
    inside = [*_halve(member, block, 0, whole), *_double(member, block, 0, whole)]
    if partner < num_members:
        inside = [ReceivePart(partner, whole, adds=True), *inside, SendPart(partner, whole)]
    return _without_empty(inside)


def binary_blocks(member: int, num_members: int, size: int) -> list[Step]:
    """Halve inside blocks of powers of two, join the blocks from small to large, and go back.

    6 members are blocks of 4 and 2. After halving, the members of a smaller block hold larger
    ranges; each hands the parts of its range to the members of the next larger block that hold
    them, and gets their sums back before the doubling. Any p: slightly more than 2 (p - 1) / p.
    """
    blocks = _blocks(num_members)
    mine = max(number for number, (first, _) in enumerate(blocks) if first <= member)
    first, length = blocks[mine]
    whole = (0, size)
    held = _held(member - first, length, whole)
    steps = _halve(member - first, length, first, whole)
    up: list[Step] = []  # with the next larger block
    down: list[Step] = []  # with the next smaller block
    back: list[Step] = []
    if mine + 1 < len(blocks):
        small_first, small_length = blocks[mine + 1]
        small = small_first + (member - first) * small_length // length
        down, back = [ReceivePart(small, held, adds=True)], [SendPart(small, held)]
    if mine:
        large_first, large_length = blocks[mine - 1]
        share = large_length // length
        start = (member - first) * share
        for place in range(start, start + share):
            part = _held(place, large_length, whole)
            up.append(SendPart(large_first + place, part))
            back.insert(place - start, ReceivePart(large_first + place, part, adds=False))
    doubling = _double(member - first, length, first, whole)
    return _without_empty([*steps, *down, *up, *back, *doubling])


#: The value of --collective that sums at the parameter server; it needs no schedule.
THROUGH_PS = "ps"

#: Every other value -> its schedule.
REGISTRY: dict[str, Algorithm] = {
    "ring": ring,
    "butterfly": butterfly,
    "blocks": binary_blocks,
}


@dataclasses.dataclass(frozen=True)
class CollectivePart:
    """Entries that travel from one member to another: the `number`-th between these two."""

    peer: int
    number: int
    entries: Range


class Reduction:
    """One member's work on one sum: it returns what to send, and merges what arrives."""

    def __init__(self, steps: Sequence[Step], buffer: Float32) -> None:
        """Start.

        Args:
            steps: From an Algorithm, for this member and this buffer's size.
            buffer: [n] float32, this member's summand; becomes the sum in place. A range that was
                to be sent is not written to before it has reached its receiver.
        """
        self.buffer = buffer
        self._steps = collections.deque(steps)
        self._sent: collections.Counter[int] = collections.Counter()
        self._received: collections.Counter[int] = collections.Counter()

    def outgoing(self) -> list[CollectivePart]:
        """Return what is to be sent before the next part can be taken in."""
        parts = []
        while self._steps and isinstance(self._steps[0], SendPart):
            step = self._steps.popleft()
            parts.append(CollectivePart(step.peer, self._sent[step.peer], step.entries))
            self._sent[step.peer] += 1
        return parts

    @property
    def awaited(self) -> CollectivePart | None:
        """The part that is needed now, or None: the buffer holds the sum."""
        if not self._steps:
            return None
        step = self._steps[0]
        return CollectivePart(step.peer, self._received[step.peer], step.entries)

    def take(self, values: Float32) -> None:
        """Take in the awaited part: its entries [stop - start] float32.

        Raises:
            ValueError: Nothing is awaited, or the part has another length.
        """
        step = self._steps[0] if self._steps else None
        if not isinstance(step, ReceivePart):
            raise ValueError("no part is awaited now; send what `outgoing` returns first")
        start, stop = step.entries
        if len(values) != stop - start:
            raise ValueError(
                f"a part of {len(values)} entries from member {step.peer} where entries "
                f"{start}..{stop} are awaited; both must use the same algorithm"
            )
        if step.adds:
            self.buffer[start:stop] += values
        else:
            self.buffer[start:stop] = values
        self._received[step.peer] += 1
        self._steps.popleft()


def _halve(place: int, length: int, first: int, entries: Range) -> list[Step]:
    """Reduce-scatter in a block of `length` (a power of two): keep the half of one's own side."""
    steps: list[Step] = []
    distance = length // 2
    while distance:
        kept, given = _sides(place, distance, entries)
        peer = first + (place ^ distance)
        steps += [SendPart(peer, given), ReceivePart(peer, kept, adds=True)]
        entries, distance = kept, distance // 2
    return steps


def _double(place: int, length: int, first: int, entries: Range) -> list[Step]:
    """All-gather in a block: the way of `_halve` back."""
    steps: list[Step] = []
    distance = length // 2
    while distance:
        kept, given = _sides(place, distance, entries)
        peer = first + (place ^ distance)
        steps = [SendPart(peer, kept), ReceivePart(peer, given, adds=False), *steps]
        entries, distance = kept, distance // 2
    return steps


def _held(place: int, length: int, entries: Range) -> Range:
    """Return what `_halve` leaves to a member."""
    distance = length // 2
    while distance:
        entries, _ = _sides(place, distance, entries)
        distance //= 2
    return entries


def _sides(place: int, distance: int, entries: Range) -> tuple[Range, Range]:
    """Return (the half of one's own side, the other half)."""
    start, stop = entries
    middle = (start + stop) // 2
    low, high = (start, middle), (middle, stop)
    return (high, low) if place & distance else (low, high)


def _largest_power(number: int) -> int:
    """Return the largest power of two that is no larger."""
    return 1 << (number.bit_length() - 1)


def _blocks(num_members: int) -> list[tuple[int, int]]:
    """Return (first member, length) of the blocks, largest first: 7 is 4 + 2 + 1."""
    blocks: list[tuple[int, int]] = []
    first = 0
    while first < num_members:
        length = _largest_power(num_members - first)
        blocks.append((first, length))
        first += length
    return blocks


def _without_empty(steps: Sequence[Step]) -> list[Step]:
    """Leave out steps that move nothing; both ends see the same range, so both leave it out."""
    return [step for step in steps if step.entries[0] < step.entries[1]]

"""All-reduce algorithms as data (lists of steps), and one engine that executes the steps.

The module `thinwire.ops.collectives` does no input or output and reads no clock.

An all-reduce algorithm returns a list of steps for each worker that participates in the all-reduce.
A step of an all-reduce sends a range of buffer entries to a peer, or receives a range from a peer
and adds it to the buffer or overwrites the buffer. In an all-reduce, one member sums each buffer
entry, and the sum is then copied to the other members. The list of steps of an all-reduce algorithm
alone fixes the order of the additions. So all members of an all-reduce end with the same bits, and
a repeated all-reduce gives the same bits too.

Sources: ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009; recursive halving and doubling, and binary blocks, Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005, and Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from thinwire.ops.types import Float32

#: Range of buffer entries ``start:stop``, as the tuple (start, stop).
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SendPart:
    """Step of an all-reduce that sends a range of buffer entries to a peer."""

    peer: int
    entries: Range


@dataclasses.dataclass(frozen=True)
class ReceivePart:
    """Step of an all-reduce that receives a peer's entries and adds or copies the entries."""

    peer: int
    entries: Range
    adds: bool


Step = SendPart | ReceivePart
#: Function of (member 0..p-1, number of members p, entries of the buffer) that returns the member's
#: all-reduce steps, in order.
Algorithm = Callable[[int, int, int], list[Step]]


def ring(member: int, num_members: int, size: int) -> list[Step]:
    """Return the steps of ring all-reduce: p buffer parts circulate, once added and once copied.

    Ring all-reduce among p members adds the p parts of the buffer in p - 1 turns, and copies the
    sums in p - 1 turns. In ring all-reduce each of p members sends 2 (p - 1) / p times the size of
    the buffer.
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
    """Return the all-reduce steps of recursive halving followed by recursive doubling.

    In an all-reduce by recursive halving and doubling among p members, with p a power of two, each
    member takes 2 log2 p steps and sends 2 (p - 1) / p times the size of the buffer. If the number
    p of all-reduce members is no power of two, q is the largest power of two below p. With p
    members and q the largest power of two below p, each of the last p - q members first sends its
    whole buffer to a partner among the first q members, and receives the sum at the end.
    """
    block = _largest_power(num_members)
    whole = (0, size)
    if member >= block:
        partner = member - block
        return _without_empty([SendPart(partner, whole), ReceivePart(partner, whole, adds=False)])
    partner = member + block
    scatter, _, gather = _exchanges(member, block, 0, whole)
    inside = [*scatter, *gather]
    if partner < num_members:
        inside = [ReceivePart(partner, whole, adds=True), *inside, SendPart(partner, whole)]
    return _without_empty(inside)


def binary_blocks(member: int, num_members: int, size: int) -> list[Step]:
    """Return the all-reduce steps of halving and doubling in blocks of 2^k members.

    For example, the 6 members of an all-reduce form a block of 4 and a block of 2 members. After
    recursive halving, members of a smaller block hold larger ranges of the buffer than members of a
    larger block. After recursive halving, a member of a smaller block sends the parts of its buffer
    range to the members of the next larger block that hold these parts, and receives the sums
    before recursive doubling. In the all-reduce with binary blocks, each of p members sends
    slightly more than 2 (p - 1) / p times the size of the buffer.
    """
    blocks = _blocks(num_members)
    block = max(number for number, (first, _) in enumerate(blocks) if first <= member)
    first, length = blocks[block]
    whole = (0, size)
    scatter, held, gather = _exchanges(member - first, length, first, whole)
    up: list[Step] = []  # steps that exchange buffer entries with the next larger block of members
    down: list[Step] = []  # steps that receive summands from the next smaller block of members
    back: list[Step] = []  # steps that return sums to the next smaller block of members
    if block + 1 < len(blocks):
        small_first, small_length = blocks[block + 1]
        small = small_first + (member - first) * small_length // length
        down, back = [ReceivePart(small, held, adds=True)], [SendPart(small, held)]
    if block:
        large_first, large_length = blocks[block - 1]
        share = large_length // length
        start = (member - first) * share
        for place in range(start, start + share):
            _, part, _ = _exchanges(place, large_length, large_first, whole)
            up.append(SendPart(large_first + place, part))
            back.insert(place - start, ReceivePart(large_first + place, part, adds=False))
    return _without_empty([*scatter, *down, *up, *back, *gather])


#: Value of the flag --collective with which the parameter server sums gradients. The value has no
#: all-reduce algorithm.
THROUGH_PS = "ps"

#: Value of the flag --collective with which workers sum gradients -> function that returns the
#: all-reduce algorithm's steps.
REGISTRY: dict[str, Algorithm] = {
    "ring": ring,
    "butterfly": butterfly,
    "blocks": binary_blocks,
}


@dataclasses.dataclass(frozen=True)
class CollectivePart:
    """Part: range of buffer entries that one member of an all-reduce sends to another member.

    Attributes:
        peer: Index of the sending or receiving peer among the members of the all-reduce.
        number: Number of earlier parts that the sender has sent to the same receiver in this
            all-reduce.
        entries: Range of the buffer's entries that the part contains.
    """

    peer: int
    number: int
    entries: Range


class Reduction:
    """State of one member during an all-reduce.

    A Reduction lists the buffer parts to send, and merges received parts into the buffer.
    """

    def __init__(self, steps: Sequence[Step], buffer: Float32) -> None:
        """Begin an all-reduce at the first of the given steps.

        Args:
            steps: All-reduce steps that an Algorithm returned for this member and this buffer's
                size.
            buffer: [n] float32 summand of this member of the all-reduce. The sum replaces the
                summand in place.
        """
        # A caller may send views of the buffer without copying them. The all-reduce steps overwrite
        # a sent range only with a sum that includes the sent entries, so the receiver has read the
        # range.
        self.buffer = buffer
        self._steps = collections.deque(steps)
        self._sent: collections.Counter[int] = collections.Counter()
        self._received: collections.Counter[int] = collections.Counter()

    def outgoing(self) -> list[CollectivePart]:
        """Return the buffer parts that this member must send before it receives the next part."""
        parts = []
        while self._steps and isinstance(self._steps[0], SendPart):
            step = self._steps.popleft()
            parts.append(CollectivePart(step.peer, self._sent[step.peer], step.entries))
            self._sent[step.peer] += 1
        return parts

    @property
    def awaited(self) -> CollectivePart | None:
        """Buffer part that this member must receive next, or None if the buffer holds the sum."""
        if not self._steps:
            return None
        step = self._steps[0]
        return CollectivePart(step.peer, self._received[step.peer], step.entries)

    def take(self, values: Float32) -> None:
        """Add or copy the received values of the awaited buffer part into the buffer.

        Args:
            values: [stop - start] float32 entries of the awaited buffer part.

        Raises:
            ValueError: The all-reduce awaits no buffer part, or `values` has not the length of the
                awaited part.
        """
        step = self._steps[0] if self._steps else None
        if not isinstance(step, ReceivePart):
            raise ValueError("all-reduce expects no part now; send what `outgoing` returns")
        start, stop = step.entries
        if len(values) != stop - start:
            raise ValueError(
                f"member {step.peer} of the all-reduce sent a part of {len(values)} entries, but "
                f"entries {start}..{stop} are expected; both members must use the same algorithm"
            )
        if step.adds:
            self.buffer[start:stop] += values
        else:
            self.buffer[start:stop] = values
        self._received[step.peer] += 1
        self._steps.popleft()


def _exchanges(
    place: int, length: int, first: int, entries: Range
) -> tuple[list[Step], Range, list[Step]]:
    """Return the steps of a reduce-scatter and of an all-gather in a block of 2^k members.

    In each step of the reduce-scatter a member sends the peer's half of its buffer range to the
    peer, and adds the received entries to its own half. The all-gather reverses these steps.

    Returns:
        Steps of the reduce-scatter; the range that the member has summed then; steps of the
        all-gather.
    """
    scatter: list[Step] = []
    gather: list[Step] = []
    distance = length // 2
    while distance:
        start, stop = entries
        middle = (start + stop) // 2
        own_half, peer_half = (start, middle), (middle, stop)
        if place & distance:
            own_half, peer_half = peer_half, own_half
        peer = first + (place ^ distance)
        scatter += [SendPart(peer, peer_half), ReceivePart(peer, own_half, adds=True)]
        gather = [SendPart(peer, own_half), ReceivePart(peer, peer_half, adds=False), *gather]
        entries, distance = own_half, distance // 2
    return scatter, entries, gather


def _largest_power(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def _blocks(num_members: int) -> list[tuple[int, int]]:
    """Return (first member, size) of each block of members: 7 members form blocks of 4, 2 and 1."""
    blocks: list[tuple[int, int]] = []
    first = 0
    while first < num_members:
        length = _largest_power(num_members - first)
        blocks.append((first, length))
        first += length
    return blocks


def _without_empty(steps: Sequence[Step]) -> list[Step]:
    """Drop all-reduce steps with an empty buffer range, as both sender and receiver do."""
    return [step for step in steps if step.entries[0] < step.entries[1]]

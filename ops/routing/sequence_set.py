"""The set of datagrams of one step that have come: a byte for each sequence number by channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.routing.base import AnnouncedDatagrams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Int64

_MODULUS, _HALF = 1 << 32, 1 << 31
#: What the bytes mean; 0 has not come.
IN_TIME, LATE = 1, 2


def ahead(number: int, base: int) -> int:
    """Return how far `number` is ahead of `base`, modulo 2**32; negative is behind.

    >>> ahead(3, 1), ahead(1, 2**32 - 1), ahead(2**32 - 1, 1)
    (2, 2, -2)
    """
    return (number - base + _HALF) % _MODULUS - _HALF


class SequenceSet:
    """The datagrams of one step that have come.

    Until the step's announcements are complete, sequence numbers up to `limit` away from the first
    that comes are accepted; from `finish` on only those announced.
    """

    def __init__(self, limit: int) -> None:
        """Start with none; a step has at most `limit` datagrams."""
        self._limit = limit
        self._first: dict[int, int] = {}  # channel -> sequence number of seen[0]
        self._seen: dict[int, NDArray[np.uint8]] = {}
        self._ranges: list[AnnouncedDatagrams] = []
        self._finished = False

    def announce(self, ranges: tuple[AnnouncedDatagrams, ...]) -> None:
        """Add ranges that the sender has announced; those of one channel may come in any order.

        Raises:
            ValueError: More datagrams than the shard has entries.
        """
        for each in ranges:
            self._check(each)
        self._ranges += [each for each in ranges if each.count]

    def _check(self, announced: AnnouncedDatagrams) -> None:
        if not 0 <= announced.count <= self._limit or not 0 <= announced.first < _MODULUS:
            raise ValueError(
                f"channel {announced.channel}: {announced.count} datagrams from number "
                f"{announced.first} on announced; expected 0 to {self._limit}, from a number below "
                "2**32"
            )

    def finish(self) -> None:
        """Accept only what was announced from now on.

        Raises:
            ValueError: The ranges of a channel are not one range together, or more datagrams than
                the shard has entries.
        """
        exact: dict[int, tuple[int, int]] = {}
        for channel in {each.channel for each in self._ranges}:
            ranges = [each for each in self._ranges if each.channel == channel]
            anchor = ranges[0].first
            ranges.sort(key=lambda each: ahead(each.first, anchor))
            first, count = ranges[0].first, 0
            for each in ranges:
                if ahead(each.first, first) != count:
                    raise ValueError(
                        f"channel {channel}: datagrams from number {each.first} on announced; "
                        f"expected {(first + count) % _MODULUS}, where the others end"
                    )
                count += each.count
            self._check(AnnouncedDatagrams(channel, first, count))
            exact[channel] = first, count
        self._seen = {channel: self._cut(channel, *exact[channel]) for channel in sorted(exact)}
        self._first = {channel: first for channel, (first, _) in exact.items()}
        self._finished = True

    def add(self, channel: int, numbers: Int64, mark: int) -> tuple[NDArray[np.bool_], int]:
        """Record datagrams.

        Args:
            channel: Of all of them.
            numbers: [m] int64 sequence numbers; at least one.
            mark: IN_TIME or LATE.

        Returns:
            [m] which of them are new, and how many were not announced.
        """
        if channel not in self._seen:
            if self._finished:
                return np.zeros(len(numbers), bool), len(numbers)
            # Only the pages that are written to become memory.
            self._first[channel] = (int(numbers[0]) - self._limit) % _MODULUS
            self._seen[channel] = np.zeros(2 * self._limit, np.uint8)
        seen = self._seen[channel]
        places = (numbers - self._first[channel] + _HALF) % _MODULUS - _HALF
        inside = (places >= 0) & (places < len(seen))
        num_inside = int(np.count_nonzero(inside))
        if num_inside == len(numbers):
            new = _new(places, seen)
        else:
            new = inside.copy()
            new[inside] = _new(places[inside], seen)
        seen[places[new]] = mark
        return new, len(numbers) - num_inside

    def _cut(self, channel: int, first: int, count: int) -> NDArray[np.uint8]:
        """Return what has come of `count` numbers from `first` on."""
        exact = np.zeros(count, np.uint8)
        seen = self._seen.get(channel)
        if seen is not None:
            start = ahead(first, self._first[channel])
            low, high = max(start, 0), min(start + count, len(seen))
            if low < high:
                exact[low - start : high - start] = seen[low:high]
        return exact

    def announced(self) -> dict[int, int]:
        """Return the number of datagrams announced, by channel."""
        return {channel: len(seen) for channel, seen in self._seen.items()}

    def in_time(self) -> dict[int, int]:
        """Return the number of datagrams that came in time, by channel."""
        return {
            channel: int(np.count_nonzero(seen == IN_TIME)) for channel, seen in self._seen.items()
        }

    def bitmap(self) -> bytes:
        """Return a bit for each announced datagram: whether it came in time.

        Channels ascend, within a channel sequence numbers; the lowest bit of a byte is the first.
        """
        if not self._seen:
            return b""
        bits = np.concatenate([self._seen[channel] == IN_TIME for channel in sorted(self._seen)])
        return np.packbits(bits, bitorder="little").tobytes()


def _new(places: Int64, seen: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which places [m] have not been seen, nor are named earlier among them."""
    new: NDArray[np.bool_] = seen[places] == 0
    if len(places) > 1 and not (np.diff(places) > 0).all():
        _, firsts = np.unique(places, return_index=True)
        alone = np.zeros(len(places), bool)
        alone[firsts] = True
        new &= alone
    return new

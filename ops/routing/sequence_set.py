"""Set of the arrived UDP datagrams of a pushed gradient, with one byte per sequence number."""

from __future__ import annotations

import numpy as np

from thinwire.ops.routing.base import AnnouncedDatagrams
from thinwire.ops.types import Bool, Int64, UInt8

_MODULUS, _HALF = 1 << 32, 1 << 31
#: Marks of arrived datagrams in a `SequenceSet`; the mark 0 means that a datagram has not arrived.
IN_TIME, LATE = 1, 2


def ahead(number: int, base: int) -> int:
    """Return how far `number` is ahead of `base`, modulo 2**32; negative if `number` is behind.

    >>> ahead(3, 1), ahead(1, 2**32 - 1), ahead(2**32 - 1, 1)
    (2, 2, -2)
    """
    return (number - base + _HALF) % _MODULUS - _HALF


class SequenceSet:
    """Sequence numbers of the UDP datagrams that have arrived for one gradient, by channel.

    Before `finish` is called, a SequenceSet accepts datagrams whose sequence number differs by at
    most `limit` from the channel's first arrived datagram. After `finish` is called, a SequenceSet
    accepts only announced sequence numbers of UDP datagrams.
    """

    def __init__(self, limit: int) -> None:
        """Start without datagrams; a pushed gradient has at most `limit` datagrams."""
        self._limit = limit
        # channel -> sequence number of the first entry of `seen` (the marks of arrived datagrams)
        self._first: dict[int, int] = {}
        self._seen: dict[int, UInt8] = {}
        self._ranges: list[AnnouncedDatagrams] = []
        self._finished = False

    def announce(self, ranges: tuple[AnnouncedDatagrams, ...]) -> None:
        """Add announced ranges of datagrams' sequence numbers; a channel's ranges have any order.

        Raises:
            ValueError: A range has more datagrams than the shard has gradient entries.
        """
        for announced in ranges:
            self._check(announced)
        self._ranges += [announced for announced in ranges if announced.count]

    def _check(self, announced: AnnouncedDatagrams) -> None:
        if not 0 <= announced.count <= self._limit or not 0 <= announced.first < _MODULUS:
            raise ValueError(
                f"a worker announces {announced.count} datagrams on channel {announced.channel}, "
                f"from sequence number {announced.first} on; expected 0 to {self._limit} "
                "datagrams, from a number below 2**32"
            )

    def finish(self) -> None:
        """Accept only announced sequence numbers of datagrams from now on.

        Raises:
            ValueError: The ranges of a channel do not join to one range, or have more datagrams
                than the shard has gradient entries.
        """
        exact: dict[int, tuple[int, int]] = {}
        for channel in {announced.channel for announced in self._ranges}:
            ranges = [announced for announced in self._ranges if announced.channel == channel]
            # Sequence numbers wrap around, so ranges are ordered by their distance to the first
            # number of one range.
            anchor = ranges[0].first
            ranges.sort(key=lambda each: ahead(each.first, anchor))
            first, count = ranges[0].first, 0
            for announced in ranges:
                if ahead(announced.first, first) != count:
                    raise ValueError(
                        f"channel {channel}: a datagram range begins at {announced.first}; "
                        f"expected {(first + count) % _MODULUS}, the end of the previous range"
                    )
                count += announced.count
            self._check(AnnouncedDatagrams(channel, first, count))
            exact[channel] = first, count
        self._seen = {channel: self._cut(channel, *exact[channel]) for channel in sorted(exact)}
        self._first = {channel: first for channel, (first, _) in exact.items()}
        self._finished = True

    def add(self, channel: int, numbers: Int64, mark: int) -> tuple[Bool, int]:
        """Record arrived datagrams of one channel by sequence number.

        Args:
            channel: Channel (priority class) of the datagrams.
            numbers: [m] int64 sequence numbers of the arrived datagrams, m at least 1.
            mark: IN_TIME, or LATE if the wait for the datagrams' variable slices is over.

        Returns:
            [m] bool: True for new datagrams; and the number of datagrams that were not announced.
        """
        if channel not in self._seen:
            if self._finished:
                return np.zeros(len(numbers), bool), len(numbers)
            # The array of marks is large, but the operating system allocates only pages that are
            # written.
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

    def _cut(self, channel: int, first: int, count: int) -> UInt8:
        """Return the arrival marks of `count` sequence numbers from `first` on; 0: not arrived."""
        exact = np.zeros(count, np.uint8)
        seen = self._seen.get(channel)
        if seen is not None:
            start = ahead(first, self._first[channel])
            low, high = max(start, 0), min(start + count, len(seen))
            if low < high:
                exact[low - start : high - start] = seen[low:high]
        return exact

    def announced(self) -> dict[int, int]:
        """Return channel -> number of announced UDP datagrams."""
        return {channel: len(seen) for channel, seen in self._seen.items()}

    def in_time(self) -> dict[int, int]:
        """Return channel -> number of UDP datagrams that arrived in time."""
        return {
            channel: int(np.count_nonzero(seen == IN_TIME)) for channel, seen in self._seen.items()
        }

    def bitmap(self) -> bytes:
        """Return a bit for each announced UDP datagram, 1 if the datagram arrived in time.

        The bits of datagrams are ordered by channel, then by sequence number; the lowest bit of a
        byte is first.
        """
        if not self._seen:
            return b""
        bits = np.concatenate([self._seen[channel] == IN_TIME for channel in sorted(self._seen)])
        return np.packbits(bits, bitorder="little").tobytes()


def _new(places: Int64, seen: UInt8) -> Bool:
    """Return [m] bool: True for `places` that are not marked in `seen` and not repeated."""
    new: Bool = seen[places] == 0
    if len(places) > 1 and not (np.diff(places) > 0).all():
        _, firsts = np.unique(places, return_index=True)
        is_first = np.zeros(len(places), bool)
        is_first[firsts] = True
        new &= is_first
    return new

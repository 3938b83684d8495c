"""Parse and check received datagrams, so that a shard server can use their values unchecked.

The datagram parser checks every field of all UDP datagrams in a receive buffer in one pass. The
datagram parser checks a datagram's session, then its authentication tag, then its contents, so that
datagrams from unknown senders cost the least time. A received datagram that fails a check is
counted and dropped; no check raises an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from thinwire.ops.kernels.numpy_ops import from_levels
from thinwire.ops.routing import datagram_format as form
from thinwire.ops.routing.base import SPARSE, ValueEncoding
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.types import Array, Bool, Float32, Int64, UInt8, UInt32

_ENCODINGS = {int(encoding): encoding for encoding in ValueEncoding}
#: Columns of a datagram's header that is read as 16 words of 32 bits.
_KIND, _SLOT, _STEP, _BLOCK, _NUM_BLOCKS, _OFFSET, _COUNT, _ENTRIES = 1, 5, 6, 7, 8, 9, 10, 11
_SCALE, _LOW, _SEQUENCE, _PAYLOAD_BYTES = 12, 13, 14, 15
_NUM_WORDS = form.HEADER_BYTES // 4
#: Header words that must be equal in datagrams that are decoded together.
_ALIKE = [_KIND, _STEP, _COUNT]


@dataclasses.dataclass(frozen=True)
class ParsedDatagrams:
    """Checked datagrams that have equal channel, step, encoding and number of values."""

    channel: int
    step: int  # number of the step whose gradient is pushed, modulo 2**32
    size: int  # size of each received datagram, in bytes
    slots: Int64  # [m] int64: number of each datagram's variable slice
    offsets: Int64  # [m] int64: position of each datagram's first value in its variable slice
    sequences: Int64  # [m] int64: sequence number of each datagram
    values: Float32  # [m, count] float32 gradient values, which may be a view of the receive buffer
    # [m, count] int64: position of each value in its variable slice; None: dense gradient
    positions: Int64 | None

    def __len__(self) -> int:
        """Return the number of parsed datagrams."""
        return len(self.slots)

    def select(self, chosen: Bool) -> ParsedDatagrams:
        """Return those parsed datagrams for which `chosen` [m] is True."""
        return dataclasses.replace(
            self,
            slots=self.slots[chosen],
            offsets=self.offsets[chosen],
            sequences=self.sequences[chosen],
            values=self.values[chosen],
            positions=None if self.positions is None else self.positions[chosen],
        )

    def by_slot(self) -> Iterator[tuple[int, ParsedDatagrams]]:
        """Yield each variable slice's number with the parsed datagrams for the slice."""
        first = int(self.slots[0])
        if (self.slots == first).all():
            yield first, self
            return
        for slot in np.unique(self.slots).tolist():
            yield slot, self.select(self.slots == slot)


class DatagramParser:
    """Parses and checks the UDP datagrams of one worker's session with one shard server."""

    def __init__(
        self,
        session: DatagramSession,
        sizes: Sequence[int],
        block_entries: int,
        channels: int,
        counters: ReassemblyCounters,
    ) -> None:
        """Prepare the checks of the datagrams received in a session.

        Args:
            session: Datagram session to which accepted datagrams belong.
            sizes: Number of entries of each variable slice of the shard server.
            block_entries: Number of entries of a gradient block.
            channels: Number C of UDP datagram channels.
            counters: Counters of accepted and dropped datagrams, which the parser increases in
                place.
        """
        self._key, self._counters, self._channels = session.key, counters, channels
        self._sizes = np.array(sizes, np.int64)
        self._block_entries = block_entries
        low, high = session.id & 0xFFFFFFFF, session.id >> 32
        self._expected = np.array([form.MAGIC, form.VERSION, low, high, session.worker], np.uint32)
        self._mask = np.array([0xFFFFFFFF, 0xFF, *[0xFFFFFFFF] * 3], np.uint32)

    def parse(self, data: memoryview, size: int) -> Iterator[ParsedDatagrams]:
        """Yield the valid datagrams in `data`, of `size` bytes each; the last may be shorter."""
        if size <= 0:
            return
        whole = len(data) - len(data) % size
        for part, part_size in ((data[:whole], size), (data[whole:], len(data) - whole)):
            if not len(part):
                continue
            if part_size < form.FRAME_BYTES:
                self._counters.dropped["short"] += len(part) // part_size
                continue
            yield from self._parse_equal_sizes(part, part_size)

    def _parse_equal_sizes(self, data: memoryview, size: int) -> Iterator[ParsedDatagrams]:
        num = len(data) // size
        strides = (size, 4)
        words = np.ndarray((num, _NUM_WORDS), "<u4", data, 0, strides).astype(np.uint32)
        raw = np.frombuffer(data, np.uint8).reshape(num, size)
        rows = self._ours(words)
        if rows is not None:
            words, raw = words[rows], raw[rows]
            if not len(words):
                return
            data = raw.reshape(-1).data
        right = form.authentic(
            data, size, range(0, len(data), size), raw[:, size - form.TAG_BYTES :], self._key
        )
        if not right.all():
            self._drop("tag", right)
            words, raw = words[right], raw[right]
        while len(words):
            alike = (words[:, _ALIKE] == words[0, _ALIKE]).all(axis=1)
            if alike.all():
                yield from self._parse_alike(words, raw)
                return
            yield from self._parse_alike(words[alike], raw[alike])
            words, raw = words[~alike], raw[~alike]

    def _ours(self, words: UInt32) -> Bool | None:
        """Return [m] bool: which datagrams belong to the parser's session; None: all of them."""
        matches = (words[:, :5] & self._mask) == self._expected
        if matches.all():
            return None
        good = np.ones(len(words), bool)
        for reason, right in (
            ("magic", matches[:, 0]),
            ("version", matches[:, 1]),
            ("session", matches[:, 2:].all(axis=1)),
        ):
            self._drop(reason, right | ~good)
            good &= right
        return good

    def _drop(self, reason: str, good: Bool) -> bool:
        """Count datagrams with `good` False as dropped; return True if there is at least one."""
        num_bad = len(good) - int(np.count_nonzero(good))
        self._counters.dropped[reason] += num_bad
        return num_bad > 0

    def _parse_alike(self, words: UInt32, raw: UInt8) -> Iterator[ParsedDatagrams]:
        """Yield the valid datagrams among authentic datagrams of equal kind, step and length."""
        _, code, channel, flags = int(words[0, _KIND]).to_bytes(4, "little")
        sparse = bool(code & SPARSE)
        encoding = _ENCODINGS.get(code & ~SPARSE)
        count = int(words[0, _COUNT])
        size = raw.shape[1]
        if encoding is None or flags:
            self._counters.dropped["encoding"] += len(words)
            return
        if not 1 <= channel <= self._channels:
            self._counters.dropped["channel"] += len(words)
            return
        if not count or form.FRAME_BYTES + form.payload_bytes(encoding, sparse, count) != size:
            self._counters.dropped["bounds"] += len(words)
            return
        within = self._within(words, count, size, sparse)
        if within is not None:
            words, raw = words[within], raw[within]
        decoded = self._decoded(words, raw, encoding, count, sparse) if len(words) else None
        if decoded is None:
            return
        words, values, positions = decoded
        self._counters.num_datagrams[channel] += len(words)
        self._counters.num_bytes[channel] += len(words) * size
        slots, offsets, sequences = words[:, [_SLOT, _OFFSET, _SEQUENCE]].astype(np.int64).T
        step = int(words[0, _STEP])
        yield ParsedDatagrams(channel, step, size, slots, offsets, sequences, values, positions)

    def _decoded(
        self,
        words: UInt32,
        raw: UInt8,
        encoding: ValueEncoding,
        count: int,
        sparse: bool,
    ) -> tuple[UInt32, Float32, Int64 | None] | None:
        """Return headers, values and sparse positions of valid datagrams; None if none is valid."""
        positions = None
        if sparse:
            positions = _positions(words, raw, count)
            good = _ascend(positions, words)
            if self._drop("gaps", good):
                words, raw, positions = words[good], raw[good], positions[good]
            if not len(words):
                return None
        values = _values(words, raw, encoding, count)
        finite = np.isfinite(values)
        if finite.all():
            return words, values, positions
        good = np.logical_and.reduce(finite, axis=1)
        self._drop("not_finite", good)
        positions = None if positions is None else positions[good]
        return (words[good], values[good], positions) if good.any() else None

    def _within(self, words: UInt32, count: int, size: int, sparse: bool) -> Bool | None:
        """Return [m] bool: which datagrams fit the shard server's slices; None: all of them."""
        wide = words[:, _SLOT : _ENTRIES + 1].astype(np.int64)
        slots, _, blocks, num_blocks, offsets, _, entries = wide.T
        known = slots < len(self._sizes)
        sizes = self._sizes[np.where(known, slots, 0)]
        fits = known & (entries == sizes) & (offsets + count <= sizes)
        fits &= words[:, _PAYLOAD_BYTES] == size - form.FRAME_BYTES
        length = self._block_entries
        block: Bool = (blocks == offsets // length) & (num_blocks == -(-sizes // length))
        if not sparse:
            block &= (offsets + (count - 1)) // length == blocks
        if (fits & block).all():
            return None
        self._drop("bounds", fits)
        self._drop("block", block | ~fits)
        both: Bool = fits & block
        return both


def _positions(words: UInt32, raw: UInt8, count: int) -> Int64:
    """Return positions [m, count] of the values in m sparse datagrams within the variable slice."""
    shape, strides = (len(raw), count), (raw.shape[1], form.GAP_DTYPE.itemsize)
    gaps = np.ndarray(shape, form.GAP_DTYPE, raw, form.HEADER_BYTES, strides)
    positions = np.cumsum(gaps, axis=1, dtype=np.int64)
    positions += words[:, _OFFSET, None].astype(np.int64)
    return positions


def _ascend(positions: Int64, words: UInt32) -> Bool:
    """Return [m] bool: which rows of positions ascend from their offset on and fit the slice."""
    good: Bool = np.logical_and.reduce(np.diff(positions, axis=1) > 0, axis=1)
    good &= positions[:, 0] == words[:, _OFFSET]
    good &= positions[:, -1] < words[:, _ENTRIES]
    return good


def _values(words: UInt32, raw: UInt8, encoding: ValueEncoding, count: int) -> Float32:
    """Return the gradient values [m, count] of m payloads; float32 payloads are not copied."""
    num, size = raw.shape
    dtype = form.VALUE_DTYPES[encoding]
    wire_bytes = form.value_bytes(encoding, count)
    start = size - form.TAG_BYTES - wire_bytes
    shape = (num, wire_bytes // dtype.itemsize)
    coded: Array = np.ndarray(shape, dtype, raw, start, (size, dtype.itemsize))
    if encoding is ValueEncoding.UINT4:
        coded = form.unpack_nibbles(coded, count)
    scales, lows = words[:, [_SCALE, _LOW]].view(np.float32).T[:, :, None]
    if encoding is ValueEncoding.FLOAT32 and (scales == 1).all():
        return coded
    with np.errstate(all="ignore"):  # the caller checks that the decoded gradient values are finite
        if encoding in form.LEVELS:
            return from_levels(coded, lows, scales)
        if encoding is ValueEncoding.BFLOAT16:
            values = (coded.astype(np.uint32) << 16).view(np.float32)
        else:
            values = coded.astype(np.float32, copy=False)
        return values if (scales == 1).all() else values * scales

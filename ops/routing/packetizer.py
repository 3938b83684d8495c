"""Worker's side of sending gradients over UDP: write gradient blocks into signed datagrams.

A `Packetizer` divides the gradient values of each variable slice into datagrams, numbers the
datagrams by channel and writes them to buffers that one system call can send. Each UDP datagram
fits the MTU (largest packet) of the network path. A datagram of a dense gradient has values of one
block only; a datagram of a sparse gradient may have entries of several blocks of one channel. If a
UDP datagram is lost, only the gradient values in the datagram are lost; `SealedStep.lost` returns
their positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from thinwire.ops.routing import datagram_format as form
from thinwire.ops.routing.base import (
    SPARSE,
    AnnouncedDatagrams,
    LostEntries,
    UnreliableBlocks,
    ValueEncoding,
)
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.types import Array, Int64, UInt8

#: Largest number of datagrams, and of their bytes, that Linux sends in one system call.
_MOST_SEGMENTS, _MOST_BYTES = 64, form.LARGEST_DATAGRAM
#: Smallest legal value of --dgt_mtu, in bytes; every network path transmits datagrams of this size.
_SMALLEST_MTU = 128
_MODULUS = 1 << 32


@dataclasses.dataclass(frozen=True)
class SealedBatch:
    """Datagrams of one size and one channel, consecutive in one buffer for one system call."""

    channel: int
    size: int  # size of each datagram, in bytes
    count: int  # number of datagrams
    # writable buffer of count * size bytes with the datagrams
    data: memoryview

    def sign(self, key: bytes) -> None:
        """Write each datagram's authentication tag, which the shard server requires."""
        form.sign(self.data, self.size, key)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Sent UDP datagrams of one channel and one variable slice, in order of sequence numbers."""

    channel: int
    slot: int
    # [d] int64: index of each datagram's first value, in the variable slice or in `positions`
    starts: Int64
    counts: Int64  # [d] int64: number of gradient values of each datagram
    positions: Int64 | None  # positions of a sparse gradient's entries; None for a dense gradient


@dataclasses.dataclass(frozen=True)
class SealedStep:
    """UDP datagrams of one pushed gradient for one shard server, complete except for their tags."""

    # unsigned datagrams ordered by channel, then by sequence number
    batches: tuple[SealedBatch, ...]
    # ranges of the sequence numbers of the whole step, one per channel
    announced: tuple[AnnouncedDatagrams, ...]
    # variable slice -> ranges of its datagrams' sequence numbers, one per channel
    by_slot: dict[int, tuple[AnnouncedDatagrams, ...]]
    _sent: tuple[_Sent, ...]  # sent datagrams ordered by channel, then by sequence number

    def lost(self, bitmap: bytes) -> list[LostEntries]:
        """Return the gradient entries of datagrams that did not arrive, ordered by variable slice.

        Args:
            bitmap: The shard server's report, with a bit for each datagram: 1 if the datagram
                arrived. The order of the bits is by channel, then by sequence number, the lowest
                bit of a byte first. Unused bits of the last byte are ignored.

        Raises:
            ValueError: The bitmap of arrived datagrams has a wrong length.
        """
        total = sum(len(sent.starts) for sent in self._sent)
        expected = (total + 7) // 8
        if len(bitmap) != expected:
            raise ValueError(
                f"a bitmap for {total} datagrams has {len(bitmap)} bytes; expected {expected} bytes"
            )
        arrived = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
        missing: dict[int, list[_Sent]] = {}
        first = 0
        for sent in self._sent:
            lost = arrived[first : first + len(sent.starts)] == 0
            first += len(sent.starts)
            if lost.any():
                part = dataclasses.replace(sent, starts=sent.starts[lost], counts=sent.counts[lost])
                missing.setdefault(sent.slot, []).append(part)
        return [_lost(slot, missing[slot]) for slot in sorted(missing)]


def _lost(slot: int, parts: list[_Sent]) -> LostEntries:
    """Return the gradient entries of one variable slice in lost datagrams, ascending."""
    starts = np.concatenate([part.starts for part in parts])
    stops = starts + np.concatenate([part.counts for part in parts])
    order = np.argsort(starts)
    ranges = np.stack([starts[order], stops[order]], axis=1)
    positions = parts[0].positions
    if positions is None:
        return LostEntries(slot, ranges)
    lost = np.concatenate([positions[start:stop] for start, stop in ranges])
    return LostEntries(slot, None, np.sort(lost))


class Packetizer:
    """Writes one worker's UDP datagrams for one shard server, numbered by channel.

    Attributes:
        mtu: Largest size of a UDP datagram, in bytes, which the caller may lower between two
            training steps.
    """

    def __init__(self, session: DatagramSession, mtu: int, channels: int) -> None:
        """Start the sequence numbers of a datagram session at 0.

        Args:
            session: Datagram session of the worker with the shard server.
            mtu: Largest size of a datagram, in bytes, 128 to 65,507.
            channels: Number C of UDP datagram channels, 1 to 7.

        Raises:
            ValueError: `mtu` or `channels` is out of range.
        """
        if not _SMALLEST_MTU <= mtu <= form.LARGEST_DATAGRAM:
            raise ValueError(
                f"datagrams have {mtu} bytes; expected {_SMALLEST_MTU} to {form.LARGEST_DATAGRAM}"
            )
        if not 1 <= channels <= form.MOST_CHANNELS:
            raise ValueError(f"{channels} datagram channels; expected 1 to {form.MOST_CHANNELS}")
        self.mtu = mtu
        self._session = session
        self._next = [0] * (channels + 1)  # next sequence number of each datagram channel

    def seal(self, step: int, parts: Sequence[UnreliableBlocks]) -> SealedStep:
        """Return the UDP datagrams of one pushed gradient; each gradient value is copied once.

        Args:
            step: Number of the training step whose gradient is pushed.
            parts: Gradient blocks to send in datagrams, ordered by variable slice.
        """
        batches: list[SealedBatch] = []
        sent: list[_Sent] = []
        by_slot: dict[int, tuple[AnnouncedDatagrams, ...]] = {}
        for part in parts:
            fragments = fragment(part, self.mtu - form.FRAME_BYTES)
            announced = []
            for channel in np.unique(fragments.channels).tolist():
                rows = np.flatnonzero(fragments.channels == channel)
                chunks = _equal_chunks(fragments, rows, part)
                order = np.concatenate(chunks)
                first = self._next[channel]
                self._next[channel] = (first + len(order)) % _MODULUS
                announced.append(AnnouncedDatagrams(channel, first, len(order)))
                starts, counts = fragments.starts[order], fragments.counts[order]
                sent.append(_Sent(channel, part.slot, starts, counts, fragments.positions))
                headers = self._headers(step, part, fragments, order, first)
                edges = np.cumsum([len(chunk) for chunk in chunks])
                batches += [
                    _batch(part, fragments, chunk, own)
                    for chunk, own in zip(chunks, np.split(headers, edges[:-1]), strict=True)
                ]
            by_slot[part.slot] = tuple(announced)
        # Both sorts must be stable. Within a channel the sequence numbers ascend by variable slice,
        # and the bits of a bitmap (`SealedStep.lost`) follow the order of sequence numbers.
        batches.sort(key=lambda batch: batch.channel)
        sent.sort(key=lambda each: each.channel)
        return SealedStep(tuple(batches), _joined(by_slot), by_slot, tuple(sent))

    def _headers(
        self, step: int, part: UnreliableBlocks, fragments: SlotFragments, order: Int64, first: int
    ) -> Array:
        """Return the headers [d] of a channel's datagrams for one variable slice, in order."""
        starts, counts = fragments.starts[order], fragments.counts[order]
        offsets = starts if fragments.positions is None else fragments.positions[starts]
        blocks = offsets // part.block_entries
        sparse = part.indices is not None
        headers = np.zeros(len(order), form.HEADER)
        headers["magic"] = form.MAGIC
        headers["version"] = form.VERSION
        headers["encoding"] = part.encoding | (SPARSE if sparse else 0)
        headers["channel"] = fragments.channels[order]
        headers["session"] = self._session.id
        headers["worker"] = self._session.worker
        headers["slot"] = part.slot
        headers["step"] = step % _MODULUS
        headers["block"] = blocks
        headers["num_blocks"] = -(-part.size // part.block_entries)
        headers["offset"] = offsets
        headers["count"] = counts
        headers["entries"] = part.size
        headers["scale"] = part.scales[blocks]
        headers["low"] = part.lows[blocks]
        headers["sequence"] = (first + np.arange(len(order))) % _MODULUS
        return headers


def _joined(by_slot: dict[int, tuple[AnnouncedDatagrams, ...]]) -> tuple[AnnouncedDatagrams, ...]:
    """Return the range of the datagrams' sequence numbers for each channel."""
    channels: dict[int, AnnouncedDatagrams] = {}
    for announced in (part for slot in by_slot.values() for part in slot):
        so_far = channels.get(announced.channel)
        if so_far is not None:
            announced = dataclasses.replace(so_far, count=so_far.count + announced.count)
        channels[announced.channel] = announced
    return tuple(channels[channel] for channel in sorted(channels))


def _equal_chunks(fragments: SlotFragments, rows: Int64, part: UnreliableBlocks) -> list[Int64]:
    """Return indices of equal datagrams to send in one system call, roughly by importance."""
    counts = fragments.counts[rows]
    chunks = []
    for count in np.unique(counts).tolist():
        equal = rows[counts == count]
        size = form.FRAME_BYTES + form.payload_bytes(part.encoding, part.indices is not None, count)
        length = min(_MOST_SEGMENTS, _MOST_BYTES // size)
        chunks += [equal[start : start + length] for start in range(0, len(equal), length)]
    return sorted(chunks, key=lambda chunk: int(chunk[-1]))


def _batch(
    part: UnreliableBlocks, fragments: SlotFragments, rows: Int64, headers: Array
) -> SealedBatch:
    count = int(fragments.counts[rows[0]])
    starts = fragments.starts[rows]
    sparse = fragments.positions is not None
    payload = form.payload_bytes(part.encoding, sparse, count)
    headers["payload_bytes"] = payload
    size = form.FRAME_BYTES + payload
    raw = np.empty((len(rows), size), np.uint8)
    raw[:, : form.HEADER_BYTES] = headers.view(np.uint8).reshape(len(rows), -1)
    values = _rows(fragments.source, starts, count)
    if part.encoding is ValueEncoding.UINT4:
        values = form.pack_nibbles(values)
    end = size - form.TAG_BYTES
    start = end - form.value_bytes(part.encoding, count)
    raw[:, start:end] = values.view(np.uint8).reshape(len(rows), -1)
    if fragments.positions is not None:
        gaps = np.zeros((len(rows), count), form.GAP_DTYPE)
        gaps[:, 1:] = np.diff(_rows(fragments.positions, starts, count), axis=1)
        raw[:, form.HEADER_BYTES : start] = gaps.view(np.uint8).reshape(len(rows), -1)
    return SealedBatch(int(headers["channel"][0]), size, len(rows), raw.reshape(-1).data)


def _rows(source: Array, starts: Int64, count: int) -> Array:
    """Copy `count` values from each index in `starts` of the source, to [len(starts), count]."""
    shape = (source.size - count + 1, count)
    windows: Array = np.ndarray(shape, source.dtype, source, 0, source.strides * 2)
    return windows[starts]


# -- fragments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SlotFragments:
    """Division of one variable slice's gradient into datagrams, most important values first.

    Each datagram of the division has consecutive values of the array `source`.
    """

    # contiguous gradient values, in the dtype of the wire (UINT4: unpacked)
    source: Array
    # position of each gradient value in the variable slice; None: dense gradient
    positions: Int64 | None
    channels: UInt8  # [p] uint8: channel (priority class) of each datagram, ascending
    starts: Int64  # [p] int64: index in the source of each datagram's first value
    counts: Int64  # [p] int64: number of gradient values of each datagram, at least 1


def fragment(part: UnreliableBlocks, limit_bytes: int) -> SlotFragments:
    """Divide a variable slice's gradient blocks into datagrams of at most `limit_bytes` payload."""
    if part.indices is None:
        starts = part.blocks * part.block_entries
        lengths = np.minimum(part.block_entries, part.size - starts)
        return _fragments(part, limit_bytes, part.data, None, starts, lengths, part.channels)
    return _fragment_sparse(part, part.indices, limit_bytes)


def _fragment_sparse(part: UnreliableBlocks, indices: Int64, limit_bytes: int) -> SlotFragments:
    """Divide a sparse gradient's blocks into datagrams, with ascending positions in each channel.

    A datagram of a sparse gradient has one scale and one lowest value for all its quantized values,
    and uint16 gaps between positions. A datagram of a sparse gradient ends before an entry with a
    different scale or low end, or with a gap above the uint16 limit.
    """
    channel_of_block = np.zeros(len(part.scales), np.uint8)
    channel_of_block[part.blocks] = part.channels
    channels = channel_of_block[indices // part.block_entries]
    order = np.argsort(channels, kind="stable")
    order = order[np.searchsorted(channels[order], 1) :]
    positions, channels = indices[order], channels[order]
    blocks = positions // part.block_entries
    ends = np.diff(channels) != 0
    for values in (part.scales[blocks], part.lows[blocks]):
        ends |= values[1:] != values[:-1]
    ends |= np.diff(positions) > form.LARGEST_GAP
    starts = np.flatnonzero(np.concatenate([[len(order) > 0], ends]))
    lengths = np.diff(np.append(starts, len(order)))
    return _fragments(
        part, limit_bytes, part.data[order], positions, starts, lengths, channels[starts]
    )


def _fragments(
    part: UnreliableBlocks,
    limit_bytes: int,
    source: Array,
    positions: Int64 | None,
    starts: Int64,
    lengths: Int64,
    channels: UInt8,
) -> SlotFragments:
    """Divide each sequence of values into full datagrams and, at its end, a shorter datagram."""
    full = form.most_values(part.encoding, positions is not None, limit_bytes)
    parts = -(-lengths // full)
    run = np.repeat(np.arange(len(starts)), parts)
    within = (np.arange(len(run)) - (np.cumsum(parts) - parts)[run]) * full
    return SlotFragments(
        np.ascontiguousarray(source, form.VALUE_DTYPES[part.encoding]),
        positions,
        channels[run],
        starts[run] + within,
        np.minimum(full, lengths[run] - within),
    )

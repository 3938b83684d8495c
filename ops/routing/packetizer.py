"""The sender's half: from what a router sends unreliably to signed datagrams.

A `Packetizer` fragments each slot's values, numbers the datagrams by channel and lays them out in
buffers that one system call can send. A dense block is cut into datagrams that fit the path, never
across blocks; of a sparse slot the entries of one channel are packed together across the borders of
blocks. A lost datagram loses its own values only, and `SealedStep.lost` finds which these were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Int64

#: Linux sends no more segments, and no more bytes, in one call.
_MOST_SEGMENTS, _MOST_BYTES = 64, form.LARGEST_DATAGRAM
#: Every path carries datagrams of this size.
_SMALLEST_MTU = 128
_MODULUS = 1 << 32


@dataclasses.dataclass(frozen=True)
class SealedBatch:
    """Datagrams of one size and one channel, one after the other in one buffer."""

    channel: int
    size: int  # bytes of each datagram
    count: int
    data: memoryview  # writable, count * size bytes

    def sign(self, key: bytes) -> None:
        """Write the tags; a shard drops datagrams without."""
        form.sign(self.data, self.size, key)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """The datagrams of one channel and one slot, by sequence number."""

    channel: int
    slot: int
    starts: Int64  # [d] int64: of the values of each, in the slot or in `positions`
    counts: Int64  # [d] int64
    positions: Int64 | None  # of a sparse slot's entries


@dataclasses.dataclass(frozen=True)
class SealedStep:
    """One step's datagrams for one shard, complete but for their tags."""

    batches: tuple[SealedBatch, ...]  # channel ascending, then by sequence number; not signed yet
    announced: tuple[AnnouncedDatagrams, ...]  # of the step, channel ascending
    by_slot: dict[int, tuple[AnnouncedDatagrams, ...]]  # the same, slot by slot
    _sent: tuple[_Sent, ...]  # channel ascending, then by sequence number

    def lost(self, bitmap: bytes) -> list[LostEntries]:
        """Return what did not arrive, slots ascending.

        Args:
            bitmap: A bit for each datagram: channels ascending, within a channel by sequence
                number, the lowest bit of a byte first. The rest of the last byte is ignored.

        Raises:
            ValueError: It has another length.
        """
        total = sum(len(sent.starts) for sent in self._sent)
        expected = (total + 7) // 8
        if len(bitmap) != expected:
            raise ValueError(
                f"a bitmap of {len(bitmap)} bytes for {total} datagrams; expected {expected}"
            )
        arrived = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
        missing: dict[int, list[_Sent]] = {}
        first = 0
        for sent in self._sent:
            gone = arrived[first : first + len(sent.starts)] == 0
            first += len(sent.starts)
            if gone.any():
                left = dataclasses.replace(sent, starts=sent.starts[gone], counts=sent.counts[gone])
                missing.setdefault(sent.slot, []).append(left)
        return [_lost(slot, missing[slot]) for slot in sorted(missing)]


def _lost(slot: int, parts: list[_Sent]) -> LostEntries:
    """Return the lost entries of one slot, ascending."""
    starts = np.concatenate([part.starts for part in parts])
    stops = starts + np.concatenate([part.counts for part in parts])
    order = np.argsort(starts)
    ranges = np.stack([starts[order], stops[order]], axis=1)
    positions = parts[0].positions
    if positions is None:
        return LostEntries(slot, ranges)
    gone = np.concatenate([positions[start:stop] for start, stop in ranges])
    return LostEntries(slot, None, np.sort(gone))


class Packetizer:
    """Makes one worker's datagrams for one shard, with sequence numbers by channel.

    Attributes:
        mtu: Bytes of the largest datagram; may be lowered between two steps.
    """

    def __init__(self, session: DatagramSession, mtu: int, channels: int) -> None:
        """Start a session's sequences at 0.

        Args:
            session: Of the worker with the shard.
            mtu: Bytes of the largest datagram, 128 to 65,507.
            channels: C, 1 to 7.

        Raises:
            ValueError: One of them is out of range.
        """
        if not _SMALLEST_MTU <= mtu <= form.LARGEST_DATAGRAM:
            raise ValueError(
                f"datagrams of {mtu} bytes; expected {_SMALLEST_MTU} to {form.LARGEST_DATAGRAM}"
            )
        if not 1 <= channels <= form.MOST_CHANNELS:
            raise ValueError(f"{channels} channels; expected 1 to {form.MOST_CHANNELS}")
        self.mtu = mtu
        self._session = session
        self._next = [0] * (channels + 1)  # sequence number, by channel

    def seal(self, step: int, parts: Sequence[UnreliableBlocks]) -> SealedStep:
        """Return the datagrams of one step; each value is copied once.

        Args:
            step: Of the push.
            parts: Slots ascending.
        """
        batches: list[SealedBatch] = []
        sent: list[_Sent] = []
        by_slot: dict[int, tuple[AnnouncedDatagrams, ...]] = {}
        for part in parts:
            fragments = fragment(part, self.mtu - form.FRAME_BYTES)
            announced = []
            for channel, rows in _by_channel(fragments):
                chunks = list(_equal_chunks(fragments, rows, part))
                order = np.concatenate(chunks)
                first = self._next[channel]
                self._next[channel] = (first + len(order)) % _MODULUS
                announced.append(AnnouncedDatagrams(channel, first, len(order)))
                starts, counts = fragments.starts[order], fragments.counts[order]
                sent.append(_Sent(channel, part.slot, starts, counts, fragments.positions))
                headers = self._headers(step, part, fragments, order, first)
                batches += _written(part, fragments, chunks, headers)
            by_slot[part.slot] = tuple(announced)
        batches.sort(key=lambda batch: batch.channel)  # stable: slots stay in order
        sent.sort(key=lambda each: each.channel)
        return SealedStep(tuple(batches), _joined(by_slot), by_slot, tuple(sent))

    def _headers(
        self, step: int, part: UnreliableBlocks, fragments: SlotFragments, order: Int64, first: int
    ) -> NDArray[Any]:
        """Return the headers [d] of one channel's datagrams of one slot, in sending order."""
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
    """Return what is announced for all slots together."""
    channels: dict[int, AnnouncedDatagrams] = {}
    for each in (announced for slot in by_slot.values() for announced in slot):
        so_far = channels.get(each.channel)
        if so_far is not None:
            each = dataclasses.replace(so_far, count=so_far.count + each.count)
        channels[each.channel] = each
    return tuple(channels[channel] for channel in sorted(channels))


def _by_channel(fragments: SlotFragments) -> Iterator[tuple[int, Int64]]:
    """Yield each channel with its fragments, best rank first."""
    edges = np.searchsorted(fragments.channels, np.arange(1, form.MOST_CHANNELS + 2))
    for channel in range(1, form.MOST_CHANNELS + 1):
        if edges[channel - 1] < edges[channel]:
            yield channel, np.arange(edges[channel - 1], edges[channel])


def _equal_chunks(fragments: SlotFragments, rows: Int64, part: UnreliableBlocks) -> Iterator[Int64]:
    """Yield rows of fragments that are equally long and fit one send; about in order of rank."""
    counts = fragments.counts[rows]
    chunks = []
    for count in np.unique(counts).tolist():
        equal = rows[counts == count]
        size = form.FRAME_BYTES + form.payload_bytes(part.encoding, part.indices is not None, count)
        length = min(_MOST_SEGMENTS, _MOST_BYTES // size)
        chunks += [equal[start : start + length] for start in range(0, len(equal), length)]
    yield from sorted(chunks, key=lambda chunk: int(chunk[-1]))


def _written(
    part: UnreliableBlocks, fragments: SlotFragments, chunks: list[Int64], headers: NDArray[Any]
) -> list[SealedBatch]:
    """Return one batch for each chunk: headers, gaps and values in place."""
    batches = []
    first = 0
    for chunk in chunks:
        batches.append(_batch(part, fragments, chunk, headers[first : first + len(chunk)]))
        first += len(chunk)
    return batches


def _batch(
    part: UnreliableBlocks, fragments: SlotFragments, rows: Int64, headers: NDArray[Any]
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


def _rows(source: NDArray[Any], starts: Int64, count: int) -> NDArray[Any]:
    """Return a copy [len(starts), count] of what begins at `starts` in the contiguous source."""
    shape = (source.size - count + 1, count)
    windows: NDArray[Any] = np.ndarray(shape, source.dtype, source, 0, source.strides * 2)
    return windows[starts]


# -- fragments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SlotFragments:
    """One slot's datagrams, best rank first: each takes consecutive values of one source."""

    source: NDArray[Any]  # contiguous, as values lie on the wire (UINT4: unpacked)
    positions: Int64 | None  # of the source's values in the slot; None: every entry of the slot
    channels: NDArray[np.uint8]  # [p] uint8, ascending
    starts: Int64  # [p] int64: first value, in the source
    counts: Int64  # [p] int64, at least 1


def fragment(part: UnreliableBlocks, limit_bytes: int) -> SlotFragments:
    """Cut one slot's part for datagrams of at most `limit_bytes` of payload."""
    if part.indices is None:
        starts = part.blocks * part.block_entries
        lengths = np.minimum(part.block_entries, part.size - starts)
        return _fragments(part, limit_bytes, part.data, None, starts, lengths, part.channels)
    return _fragment_sparse(part, part.indices, limit_bytes)


def _fragment_sparse(part: UnreliableBlocks, indices: Int64, limit_bytes: int) -> SlotFragments:
    """Cut channel by channel, ascending positions within each.

    A run of entries ends where the next is too far away for a gap, or is of another scale.
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
    source: NDArray[Any],
    positions: Int64 | None,
    starts: Int64,
    lengths: Int64,
    channels: NDArray[np.uint8],
) -> SlotFragments:
    """Cut runs of values, each into full datagrams and a rest."""
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

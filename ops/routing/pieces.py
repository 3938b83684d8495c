"""Where one slot's unreliable values are cut into datagrams."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.routing import datagram_format as form
from ops.routing.routed import Unreliable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Int64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """One slot's datagrams, best rank first: each takes consecutive values of one source."""

    source: NDArray[Any]  # contiguous, as values lie on the wire (UINT4: unpacked)
    positions: Int64 | None  # of the source's values in the slot; None: every entry of the slot
    channels: NDArray[np.uint8]  # [p] uint8, ascending
    starts: Int64  # [p] int64: first value, in the source
    counts: Int64  # [p] int64, at least 1


def cut(part: Unreliable, room: int) -> Pieces:
    """Cut one slot's part for datagrams with `room` bytes of payload."""
    if part.indices is None:
        starts = part.blocks * part.block_entries
        lengths = np.minimum(part.block_entries, part.size - starts)
        return _pieces(part, room, part.data, None, starts, lengths, part.channels)
    return _cut_sparse(part, part.indices, room)


def _cut_sparse(part: Unreliable, indices: Int64, room: int) -> Pieces:
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
    return _pieces(part, room, part.data[order], positions, starts, lengths, channels[starts])


def _pieces(
    part: Unreliable,
    room: int,
    source: NDArray[Any],
    positions: Int64 | None,
    starts: Int64,
    lengths: Int64,
    channels: NDArray[np.uint8],
) -> Pieces:
    """Cut runs of values, each into full datagrams and a rest."""
    full = form.most_values(part.encoding, positions is not None, room)
    parts = -(-lengths // full)
    run = np.repeat(np.arange(len(starts)), parts)
    within = (np.arange(len(run)) - (np.cumsum(parts) - parts)[run]) * full
    return Pieces(
        np.ascontiguousarray(source, form.VALUE_DTYPES[part.encoding]),
        positions,
        channels[run],
        starts[run] + within,
        np.minimum(full, lengths[run] - within),
    )

"""What an assembler counts; nothing of it is ever logged datagram by datagram."""

from __future__ import annotations

import dataclasses

from ops.datagram_counts import Counts

#: Why a datagram is dropped -> what that means.
REASONS = {
    "short": "fewer bytes than header and tag",
    "magic": "not one of ours",
    "version": "of another version",
    "session": "of another session or worker",
    "tag": "damaged, or made without the session's key",
    "encoding": "values coded in an unknown way, or unknown flags",
    "channel": "a channel that the run does not have",
    "bounds": "lengths, slot or entries that do not fit together or the shard",
    "block": "the block's number does not follow from the position",
    "gaps": "positions that do not ascend, or leave the slot",
    "not_finite": "a value that is NaN or infinite",
    "too_new": "more than one step ahead of the open one",
    "too_old": "of a step that is closed for too long",
    "abandoned": "of a step that ended without being closed, or was refused",
    "late": "after its step or tensor was closed, and --dgt_reception=drop",
    "unannounced": "a sequence number outside of what its step announced",
    "duplicate": "came before",
    "whole": "late for a slot that now travels as a product of matrices",
}
#: Reasons that a replayed datagram is dropped for.
_REPLAYED = ("too_new", "too_old", "abandoned", "unannounced", "duplicate")


@dataclasses.dataclass
class Books(Counts):
    """Counters since the session began; channels are numbered from 0, the stream.

    Attributes:
        dropped: Datagrams that were not used, by reason.
        num_datagrams: Authentic ones that fit the shard, duplicates and late ones included.
        num_bytes: Of those, with header and tag, without UDP and IP.
        num_announced: By the reliable parts of the steps that are closed.
        num_arrived: Of those, in time.
        num_late: Of those, after their step or tensor was closed, kept or not.
        num_closed: Steps.
        num_incomplete: End markers whose wait was over with something still missing.
        num_late_used: Late datagrams that a later step took in.
        sum_of_ages: Of these, in steps.
        blocks: Of the steps that are closed, by their reliable parts.
        blocks_skipped: Of those, zeros only: sent on no channel.
        blocks_reliable: Of those, in the stream.
        blocks_dropped: Of those, thrown away by the sender.
        sum_k: Of the steps' fractions of reliable blocks.
        sum_fresh: Of the steps' fresh ratios; see `ops.routing.assembled`.
        sum_fill: Of their fill ratios.
    """

    dropped: dict[str, int]
    num_datagrams: list[int]
    num_bytes: list[int]
    num_announced: list[int]
    num_arrived: list[int]
    num_late: list[int]
    num_closed: int = 0
    num_incomplete: int = 0
    num_late_used: int = 0
    sum_of_ages: int = 0
    blocks: int = 0
    blocks_skipped: int = 0
    blocks_reliable: int = 0
    blocks_dropped: int = 0
    sum_k: float = 0.0
    sum_fresh: float = 0.0
    sum_fill: float = 0.0

    @property
    def num_new(self) -> int:
        """Authentic datagrams that did not come before, of steps that take some."""
        return sum(self.num_datagrams) - sum(self.dropped[reason] for reason in _REPLAYED)


def empty(channels: int) -> Books:
    """Return the books of a session with this many channels beside the stream."""
    first, second, third, fourth, fifth = ([0] * (channels + 1) for _ in range(5))
    return Books(dict.fromkeys(REASONS, 0), first, second, third, fourth, fifth)

"""Counters of UDP datagrams for the reports of workers and shard servers.

Every counter of UDP datagrams is a total since the process started, so the counters of several
processes can be added.

`SentCounts` counts the gradient blocks and UDP datagrams that a worker has sent.
`ReassemblyCounters` counts the UDP datagrams that a shard server has received in one worker's
session. The field names of the classes of UDP datagram counters are also keys in reports and files.
Single UDP datagrams are never logged, only counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

#: Key of the UDP datagram counters in a run's status and summary.
BLOCK = "dgt"

_Counts = TypeVar("_Counts", bound="SummableCounts")


class SummableCounts:
    """Base class of dataclasses of counters, which are numbers, or lists or dicts of numbers."""

    def plus(self: _Counts, other: _Counts, sign: int = 1) -> _Counts:
        """Return the field-wise sums of two counter objects; shorter lists are zero-padded."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return type(self)(*(_sum(one, another, sign) for one, another in pairs))

    def minus(self: _Counts, other: _Counts) -> _Counts:
        """Return the field-wise increase of the counters since their earlier values `other`."""
        return self.plus(other, -1)


def total(counts: Iterable[_Counts], start: _Counts) -> _Counts:
    """Return the field-wise sum of `start` and all items of `counts`, which are not changed."""
    for summand in counts:
        start = start.plus(summand)
    return start


@dataclasses.dataclass(frozen=True)
class SentCounts(SummableCounts):
    """Counters of the gradient blocks and UDP datagrams that one worker has sent in the run.

    Each list of counters has one entry per channel; channel 0 is the gRPC stream.
    """

    pushes: int = 0  # number of pushed gradients; one push sends to all shard servers
    # sum over the pushes of k, the requested fraction of gradient blocks sent over gRPC
    sum_k: float = 0.0
    # number of gradient blocks sent, per channel
    blocks: list[int] = dataclasses.field(default_factory=list)
    skipped: int = 0  # number of all-zero gradient blocks, which are not sent
    # number of gradient blocks that the worker dropped instead of sending, for --dgt_send_drop
    dropped: int = 0
    non_finite: int = 0  # number of gradient blocks with NaN or infinity, which are sent over gRPC
    # number of UDP datagrams sent, per channel
    datagrams: list[int] = dataclasses.field(default_factory=list)
    # number of sent bytes per channel, with all headers
    num_bytes: list[int] = dataclasses.field(default_factory=list)
    # reason -> number of datagrams that were not sent for this reason
    unsent: dict[str, int] = dataclasses.field(default_factory=dict)
    # number of shard servers to which everything is sent over gRPC, because UDP does not work
    fallen_back: int = 0

    def after(self, before: SentCounts | None) -> SentCounts:
        """Return the counters plus `before`, the counters of the worker's earlier processes."""
        if before is None:
            return self
        return dataclasses.replace(before.plus(self), fallen_back=self.fallen_back)


#: Reason for which a shard server drops a UDP datagram -> explanation of the reason.
REASONS = {
    "short": "the datagram has fewer bytes than a header and a tag",
    "magic": "the datagram is not one of Thinwire",
    "version": "the datagram has another version of the datagram format",
    "session": "another session or worker",
    "tag": "damaged, or made without the session's key",
    "encoding": "unknown encoding of the values, or unknown flags",
    "channel": "the datagram names a channel that the run does not have",
    "bounds": "lengths, slot or entries that contradict each other or do not fit the shard",
    "block": "the block's number contradicts the block's position",
    "gaps": "positions that do not ascend, or are outside the slot",
    "not_finite": "a value that is NaN or infinite",
    "too_new": "the datagram is more than one step ahead of the open step",
    "too_old": "the datagram is late by more than --dgt_max_late steps",
    "abandoned": "the step was never closed, or was refused",
    "late": "arrived after its step or tensor was closed, with --dgt_reception=drop",
    "unannounced": "the datagram has a sequence number outside the ranges that the step announced",
    "duplicate": "the datagram has arrived before",
    "whole": "late for a slot that is now sent as a product of matrices",
}
#: Reasons for which a shard server drops a replayed copy of an authentic UDP datagram.
_REPLAYED = ("too_new", "too_old", "abandoned", "unannounced", "duplicate")


@dataclasses.dataclass
class ReassemblyCounters(SummableCounts):
    """Counters of UDP datagrams that a shard server has received in a worker's session.

    Each list of counters has one entry per channel; channel 0 is the gRPC stream.

    Attributes:
        dropped: Number of received UDP datagrams that were not used, by reason.
        num_datagrams: Number of authentic UDP datagrams that fit the shard's variables, including
            duplicates and late datagrams.
        num_bytes: Number of bytes of the datagrams that `num_datagrams` counts, with datagram
            header and tag, without UDP and IP headers.
        num_announced: Number of UDP datagrams that the worker announced over gRPC for closed steps
            (steps whose wait is over).
        num_arrived: Number of announced UDP datagrams that arrived before the end of the wait.
        num_late: Number of UDP datagrams that arrived, for the first time, after the end of the
            wait for their step or tensor, including dropped datagrams.
        num_closed: Number of pushed gradients for which the shard server has ended the wait for UDP
            datagrams.
        num_incomplete: Number of gRPC messages that announced UDP datagrams of which some were
            still missing at the end of the wait.
        num_late_used: Number of late UDP datagrams whose gradient values were added to a later
            step.
        sum_of_ages: Sum of the delays, in training steps, of the late datagrams that
            `num_late_used` counts.
        blocks: Number of gradient blocks in closed steps (steps whose wait is over), as the worker
            announced them over gRPC.
        blocks_skipped: Number of all-zero gradient blocks in closed steps (steps whose wait is
            over), which were not sent.
        blocks_reliable: Number of gradient blocks in closed steps (steps whose wait is over) that
            were sent over gRPC.
        blocks_dropped: Number of gradient blocks in closed steps (steps whose wait is over) that
            the worker dropped before sending.
        sum_k: Sum over the closed steps (steps whose wait is over) of k, the requested fraction of
            gradient blocks sent over gRPC.
        sum_fresh: Sum over the closed steps of `ReassembledStep.fresh`, the fraction of gradient
            blocks that arrived in time.
        sum_fill: Sum over the closed steps of `ReassembledStep.fill`, the fraction of gradient
            blocks with a timely or late value.
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

    @classmethod
    def zero(cls, channels: int) -> ReassemblyCounters:
        """Return counters of 0 for a new session with `channels` UDP datagram channels."""
        first, second, third, fourth, fifth = ([0] * (channels + 1) for _ in range(5))
        return cls(dict.fromkeys(REASONS, 0), first, second, third, fourth, fifth)

    @property
    def num_new(self) -> int:
        """Number of authentic UDP datagrams that arrived, without repeated datagrams."""
        return sum(self.num_datagrams) - sum(self.dropped[reason] for reason in _REPLAYED)


def rows_of(block: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the dicts in the list block[name] of a worker's or server's report."""
    rows = block.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _sum(one: Any, other: Any, sign: int) -> Any:
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *other])
        return {name: one.get(name, 0) + sign * other.get(name, 0) for name in names}
    if isinstance(one, list):
        return [a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + sign * other

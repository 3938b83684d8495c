"""Counters of datagrams for reports. Every counter is a total, so counters can be added.

`SentCounts` counts what a worker has sent, `ReassemblyCounters` what one session's reassembler has
received. Names of fields are keys of reports and files. Single datagrams are never logged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

#: Key of the block of datagram counters in a run's status and summary.
BLOCK = "dgt"

_Counts = TypeVar("_Counts", bound="SummableCounts")


class SummableCounts:
    """Base of a dataclass of counters: numbers, lists of numbers and tables of numbers."""

    def plus(self: _Counts, other: _Counts) -> _Counts:
        """Return the sums by field; the shorter of two lists is padded with zeros."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))

    def minus(self: _Counts, other: _Counts) -> _Counts:
        """Return the increase since the earlier counters `other`."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name), -1) for name in names))


def total(counts: Iterable[_Counts], start: _Counts) -> _Counts:
    """Return the sum of `counts` and `start`; the arguments are not changed."""
    for summand in counts:
        start = start.plus(summand)
    return start


@dataclasses.dataclass(frozen=True)
class SentCounts(SummableCounts):
    """Counters of everything that one worker has sent to all shards since it first joined.

    Lists have an entry for each channel; channel 0 is the reliable stream.
    """

    pushes: int = 0  # number of exchanges
    sum_k: float = 0.0  # sum over the exchanges of the fraction k of reliable blocks
    blocks: list[int] = dataclasses.field(default_factory=list)  # blocks sent
    skipped: int = 0  # blocks of zeros, which are not sent
    dropped: int = 0  # blocks that the worker dropped for --dgt_send_drop
    non_finite: int = 0  # blocks with NaN or infinity, which are reliable
    datagrams: list[int] = dataclasses.field(default_factory=list)  # passed to a socket or stream
    num_bytes: list[int] = dataclasses.field(default_factory=list)  # on the wire, with all headers
    unsent: dict[str, int] = dataclasses.field(default_factory=dict)  # datagrams, by reason
    fallen_back: int = 0  # number of shards that get everything in the stream

    def after(self, before: SentCounts | None) -> SentCounts:
        """Return the totals including the counters of earlier incarnations of the worker."""
        if before is None:
            return self
        return dataclasses.replace(before.plus(self), fallen_back=self.fallen_back)


#: Reason for dropping a datagram -> meaning of the reason.
REASONS = {
    "short": "fewer bytes than a header and a tag",
    "magic": "not a datagram of Thinwire",
    "version": "another version of the datagram format",
    "session": "another session or worker",
    "tag": "damaged, or made without the session's key",
    "encoding": "unknown encoding of the values, or unknown flags",
    "channel": "a channel that the run does not have",
    "bounds": "lengths, slot or entries that contradict each other or do not fit the shard",
    "block": "the block's number contradicts the position",
    "gaps": "positions that do not ascend, or are outside the slot",
    "not_finite": "a value that is NaN or infinite",
    "too_new": "more than one step ahead of the open step",
    "too_old": "late by more than --dgt_max_late steps",
    "abandoned": "the step was never closed, or was refused",
    "late": "arrived after its step or tensor was closed, with --dgt_reception=drop",
    "unannounced": "a sequence number outside the ranges that the step announced",
    "duplicate": "the datagram has arrived before",
    "whole": "late for a slot that is now sent as a product of matrices",
}
#: Reasons for dropping a replayed datagram.
_REPLAYED = ("too_new", "too_old", "abandoned", "unannounced", "duplicate")


@dataclasses.dataclass
class ReassemblyCounters(SummableCounts):
    """Counters since the start of the session.

    Lists have an entry for each channel; channel 0 is the stream.

    Attributes:
        dropped: Number of datagrams that were not used, by reason.
        num_datagrams: Number of authentic datagrams that fit the shard, including duplicates and
            late datagrams.
        num_bytes: Bytes of the datagrams in `num_datagrams`, with header and tag, without UDP and
            IP headers.
        num_announced: Number of datagrams announced by the reliable parts of closed steps.
        num_arrived: Number of announced datagrams that arrived in time.
        num_late: Number of new datagrams that arrived after their step or tensor was closed, kept
            or not.
        num_closed: Number of closed steps.
        num_incomplete: Number of end markers with announced datagrams missing at the end of their
            wait.
        num_late_used: Number of late datagrams that were added to a later step.
        sum_of_ages: Sum of the ages of the late datagrams that were added, in steps.
        blocks: Number of blocks in closed steps, as announced by the reliable parts.
        blocks_skipped: Number of blocks of zeros, which were not sent.
        blocks_reliable: Number of blocks sent in the stream.
        blocks_dropped: Number of blocks that the sender dropped.
        sum_k: Sum over the steps of the fraction of reliable blocks.
        sum_fresh: Sum over the steps of `ReassembledStep.fresh`.
        sum_fill: Sum over the steps of `ReassembledStep.fill`.
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
        """Return the counters of a new session with `channels` datagram channels."""
        first, second, third, fourth, fifth = ([0] * (channels + 1) for _ in range(5))
        return cls(dict.fromkeys(REASONS, 0), first, second, third, fourth, fifth)

    @property
    def num_new(self) -> int:
        """Number of new authentic datagrams for steps that accept datagrams."""
        return sum(self.num_datagrams) - sum(self.dropped[reason] for reason in _REPLAYED)


def rows_of(block: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the rows in a block that another program wrote; ignore values that are not rows."""
    rows = block.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _sum(one: Any, other: Any, sign: int = 1) -> Any:
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *other])
        return {name: one.get(name, 0) + sign * other.get(name, 0) for name in names}
    if isinstance(one, list):
        return [a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + sign * other

"""Counters of datagrams for reports. Every counter is a total, so counters can be added.

`SentCounts` counts the blocks and datagrams that a worker has sent. `ReassemblyCounters` counts the
datagrams that a shard has received in one worker's session. Names of fields are keys of reports and
files. Single datagrams are never logged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

#: Key of the datagram counters in a run's status and summary.
BLOCK = "dgt"

_Counts = TypeVar("_Counts", bound="SummableCounts")


class SummableCounts:
    """Base class of dataclasses of counters, which are numbers, or lists or dicts of numbers."""

    def plus(self: _Counts, other: _Counts) -> _Counts:
        """Return the field-wise sums of two counters; a shorter list is padded with zeros."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))

    def minus(self: _Counts, other: _Counts) -> _Counts:
        """Return the field-wise increase since the earlier counters `other`."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name), -1) for name in names))


def total(counts: Iterable[_Counts], start: _Counts) -> _Counts:
    """Return the field-wise sum of `counts` and `start`; the arguments are not changed."""
    for summand in counts:
        start = start.plus(summand)
    return start


@dataclasses.dataclass(frozen=True)
class SentCounts(SummableCounts):
    """Counters of the blocks and datagrams that one worker has sent since it first joined.

    Lists have an entry for each channel; channel 0 is the reliable stream.
    """

    pushes: int = 0  # number of pushes, each to all shards
    sum_k: float = 0.0  # sum over the pushes of the requested fraction k of reliable blocks
    blocks: list[int] = dataclasses.field(default_factory=list)  # number of blocks sent
    skipped: int = 0  # number of blocks of zeros, which are not sent
    dropped: int = 0  # number of blocks that the worker dropped for --dgt_send_drop
    non_finite: int = 0  # number of blocks with NaN or infinity, which are sent on the stream
    datagrams: list[int] = dataclasses.field(default_factory=list)  # number of datagrams sent
    num_bytes: list[int] = dataclasses.field(default_factory=list)  # sent bytes, with all headers
    unsent: dict[str, int] = dataclasses.field(default_factory=dict)  # reason -> unsent datagrams
    fallen_back: int = 0  # number of shards that get everything on the stream

    def after(self, before: SentCounts | None) -> SentCounts:
        """Return the totals of these counters and `before`, from the worker's earlier processes."""
        if before is None:
            return self
        return dataclasses.replace(before.plus(self), fallen_back=self.fallen_back)


#: Reason for which a shard drops a datagram -> explanation of the reason.
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
#: Reasons for which a shard drops a replayed copy of an authentic datagram.
_REPLAYED = ("too_new", "too_old", "abandoned", "unannounced", "duplicate")


@dataclasses.dataclass
class ReassemblyCounters(SummableCounts):
    """Counters of datagrams that a shard has received since the start of a worker's session.

    Lists have an entry for each channel; channel 0 is the reliable stream.

    Attributes:
        dropped: Reason -> number of datagrams that were not used.
        num_datagrams: Number of authentic datagrams that fit the shard, including duplicates and
            late datagrams.
        num_bytes: Number of bytes of the datagrams in `num_datagrams`, with header and tag, without
            UDP and IP headers.
        num_announced: Number of datagrams announced by the reliable parts of closed steps.
        num_arrived: Number of announced datagrams that arrived in time.
        num_late: Number of new datagrams that arrived after their step or tensor was closed. Late
            datagrams that were dropped are counted, too.
        num_closed: Number of steps (pushes) for which the shard does not wait for datagrams any
            more.
        num_incomplete: Number of reliable parts with announced datagrams that were still missing at
            the end of the wait.
        num_late_used: Number of late datagrams with values that were added to a later step.
        sum_of_ages: Sum of the ages of the late datagrams in `num_late_used`, in steps.
        blocks: Number of gradient blocks in closed steps, as announced by the reliable parts.
        blocks_skipped: Number of blocks of zeros in closed steps, which were not sent.
        blocks_reliable: Number of blocks in closed steps that were sent on the stream.
        blocks_dropped: Number of blocks in closed steps that the worker dropped before sending.
        sum_k: Sum over the closed steps of the requested fraction k of reliable blocks.
        sum_fresh: Sum over the closed steps of `ReassembledStep.fresh`.
        sum_fill: Sum over the closed steps of `ReassembledStep.fill`.
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
        """Return zero counters for a new session with `channels` datagram channels."""
        first, second, third, fourth, fifth = ([0] * (channels + 1) for _ in range(5))
        return cls(dict.fromkeys(REASONS, 0), first, second, third, fourth, fifth)

    @property
    def num_new(self) -> int:
        """Number of authentic datagrams that arrived for the first time, for an acceptable step."""
        return sum(self.num_datagrams) - sum(self.dropped[reason] for reason in _REPLAYED)


def rows_of(block: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the dicts in the list block[name], which another program wrote; ignore other items."""
    rows = block.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _sum(one: Any, other: Any, sign: int = 1) -> Any:
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *other])
        return {name: one.get(name, 0) + sign * other.get(name, 0) for name in names}
    if isinstance(one, list):
        return [a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + sign * other

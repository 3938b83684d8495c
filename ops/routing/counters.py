"""Counters of datagrams, which are reported and added up: totals, never last values.

`SentCounts` is what a worker has sent, `ReassemblyCounters` what one session's reassembler has
received. Names of fields are keys of reports and files. No datagram is ever logged by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

#: Name of the block in a run's status and summary that all of it ends up in.
BLOCK = "dgt"

_Counts = TypeVar("_Counts", bound="SummableCounts")


class SummableCounts:
    """Base of a dataclass of counters: numbers, lists of numbers and tables of numbers."""

    def plus(self: _Counts, other: _Counts) -> _Counts:
        """Return the sums of both, field by field; a list that ends earlier goes on with zeros."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))

    def minus(self: _Counts, other: _Counts) -> _Counts:
        """Return the increase since `other`, which was counted earlier."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name), -1) for name in names))


def total(counts: Iterable[_Counts], start: _Counts) -> _Counts:
    """Return the sum of `counts` and `start`; none of them is changed."""
    for each in counts:
        start = start.plus(each)
    return start


@dataclasses.dataclass(frozen=True)
class SentCounts(SummableCounts):
    """What one worker has sent to all shards since it first joined.

    Lists have an entry for each channel; 0 is the reliable stream.
    """

    pushes: int = 0  # exchanges
    sum_k: float = 0.0  # over these exchanges
    blocks: list[int] = dataclasses.field(default_factory=list)
    skipped: int = 0  # blocks of zeros only: sent on no channel
    dropped: int = 0  # blocks that the worker itself threw away
    non_finite: int = 0  # blocks with NaN or infinity: among the reliable ones
    datagrams: list[int] = dataclasses.field(default_factory=list)  # passed to a socket or stream
    num_bytes: list[int] = dataclasses.field(default_factory=list)  # on the wire, with all headers
    unsent: dict[str, int] = dataclasses.field(default_factory=dict)  # datagrams, by reason
    fallen_back: int = 0  # shards that now get everything in the stream

    def after(self, before: SentCounts | None) -> SentCounts:
        """Return the totals with those of earlier incarnations of the worker."""
        if before is None:
            return self
        return dataclasses.replace(before.plus(self), fallen_back=self.fallen_back)


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
class ReassemblyCounters(SummableCounts):
    """Counters since the session began; entry 0 of a list is the stream, then come the channels.

    Attributes:
        dropped: Datagrams that were not used, by reason.
        num_datagrams: Authentic ones that fit the shard, duplicates and late ones included.
        num_bytes: Of those, with header and tag, without UDP and IP.
        num_announced: By the reliable parts of the steps that are closed.
        num_arrived: Of those, in time.
        num_late: Of those, after their step or tensor was closed, kept or not.
        num_closed: Steps.
        num_incomplete: End markers whose wait was over with something still missing.
        num_late_used: Late datagrams that were added to a later step.
        sum_of_ages: Of these, in steps.
        blocks: Of the steps that are closed, by their reliable parts.
        blocks_skipped: Of those, zeros only: sent on no channel.
        blocks_reliable: Of those, in the stream.
        blocks_dropped: Of those, thrown away by the sender.
        sum_k: Of the steps' fractions of reliable blocks.
        sum_fresh: Of the steps' fresh ratios; see `thinwire.ops.routing.reassembler`.
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

    @classmethod
    def zero(cls, channels: int) -> ReassemblyCounters:
        """Return the counters of a new session with this many channels beside the stream."""
        first, second, third, fourth, fifth = ([0] * (channels + 1) for _ in range(5))
        return cls(dict.fromkeys(REASONS, 0), first, second, third, fourth, fifth)

    @property
    def num_new(self) -> int:
        """Authentic datagrams that did not come before, of steps that take some."""
        return sum(self.num_datagrams) - sum(self.dropped[reason] for reason in _REPLAYED)


def rows_of(block: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a list of rows from a block that another program wrote, without what is not a row."""
    rows = block.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _sum(one: Any, other: Any, sign: int = 1) -> Any:
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *other])
        return {name: one.get(name, 0) + sign * other.get(name, 0) for name in names}
    if isinstance(one, list):
        return [a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + sign * other

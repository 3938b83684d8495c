"""What is counted of datagrams, as documents that travel and add up: totals, never last values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ops.documents import Document

#: Name of the block in a run's status and summary that all of it ends up in.
BLOCK = "dgt"

_Counts = TypeVar("_Counts", bound="Counts")


class Counts(Document):
    """Base of a document of counters: numbers, lists of numbers and tables of numbers."""

    def plus(self: _Counts, other: _Counts) -> _Counts:
        """Return the sums of both, field by field; a list that ends earlier goes on with zeros."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))

    def minus(self: _Counts, other: _Counts) -> _Counts:
        """Return what has come since `other` was counted."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name), -1) for name in names))


def total(counts: Iterable[_Counts], start: _Counts) -> _Counts:
    """Return the sum of all of them and `start`; none of them is changed."""
    for each in counts:
        start = start.plus(each)
    return start


def rows_of(block: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a list of rows in the block that another program has written; what is none is not."""
    rows = block.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _sum(one: Any, other: Any, sign: int = 1) -> Any:
    if isinstance(one, dict):
        names = dict.fromkeys([*one, *other])
        return {name: one.get(name, 0) + sign * other.get(name, 0) for name in names}
    if isinstance(one, list):
        return [a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + sign * other


@dataclasses.dataclass(frozen=True)
class SentCounts(Counts):
    """What one worker has sent to all shards since it first joined.

    Lists have an entry for each channel; 0 is the reliable stream.
    """

    pushes: int = 0  # exchanges
    sum_k: float = 0.0  # over these
    blocks: list[int] = dataclasses.field(default_factory=list)
    skipped: int = 0  # blocks of zeros only: sent on no channel
    dropped: int = 0  # blocks that the worker itself threw away
    non_finite: int = 0  # blocks with NaN or infinity: among the reliable ones
    datagrams: list[int] = dataclasses.field(default_factory=list)  # handed over to be carried
    num_bytes: list[int] = dataclasses.field(default_factory=list)  # on the wire, with all headers
    unsent: dict[str, int] = dataclasses.field(default_factory=dict)  # datagrams, by reason
    fallen_back: int = 0  # shards that now get everything in the stream

    def after(self, before: SentCounts | None) -> SentCounts:
        """Return the totals with those of earlier lives of the worker."""
        if before is None:
            return self
        return dataclasses.replace(before.plus(self), fallen_back=self.fallen_back)

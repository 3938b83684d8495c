"""What shards have received in datagrams, and the block of the run's status that is made of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.ops.persistence.documents import Document
from thinwire.ops.routing import counters as bookkeeping
from thinwire.ops.routing.counters import ReassemblyCounters, SentCounts, total
from thinwire.ops.routing.reassembler import ReassembledStep

#: Why datagrams that are of no session are dropped, besides what `thinwire.ps.datagrams.receiver`
#: finds.
BY_THE_KERNEL = "kept out by the kernel"
EMPTY = "empty"
#: A report of a following shard has room for so many workers, each apart.
_MOST_WORKERS_TOLD = 200
_TOGETHER = 0  # no worker has this id


@dataclasses.dataclass(frozen=True)
class DatagramCounts(Document):
    """What one shard has received since the run began.

    Attributes:
        workers: Books of each worker's sessions, added up.
        dropped: Datagrams of no session, by reason.
    """

    workers: dict[int, ReassemblyCounters] = dataclasses.field(default_factory=dict)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    def beside(self, reason: str, count: int) -> DatagramCounts:
        """Return this with so many more datagrams dropped."""
        dropped = self.dropped | {reason: self.dropped.get(reason, 0) + count}
        return DatagramCounts(self.workers, _known(dropped))

    def in_short(self) -> DatagramCounts:
        """Return this for another shard; with very many workers only their sum, as worker 0."""
        if len(self.workers) <= _MOST_WORKERS_TOLD:
            return self
        return DatagramCounts({_TOGETHER: _sum(self.workers.values())}, self.dropped)

    def whole(self) -> ReassemblyCounters:
        """Return the books of all workers in one."""
        return _sum(self.workers.values())


def received(
    sessions: Iterable[tuple[int, ReassemblyCounters]], dropped: Mapping[str, int]
) -> DatagramCounts:
    """Add up sessions (worker, books); books may be written to afterwards."""
    of: dict[int, list[ReassemblyCounters]] = {}
    for worker, books in sessions:
        of.setdefault(worker, []).append(books)
    workers = {worker: _sum(of[worker]) for worker in sorted(of)}
    return DatagramCounts(workers, _known(dropped))


def _sum(books: Iterable[ReassemblyCounters]) -> ReassemblyCounters:
    whole = total(books, bookkeeping.empty(0))
    return dataclasses.replace(whole, dropped=_known(whole.dropped))


def _known(dropped: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in dropped.items() if count}


# -- the block -------------------------------------------------------------------------------


def block(
    shards: Sequence[DatagramCounts], sent: Mapping[int, SentCounts], channels: int
) -> dict[str, Any]:
    """Return the figures of the whole run, as docs/FIGURES.md explains them.

    Args:
        shards: What each has received.
        sent: Worker -> what it has sent.
        channels: How many there are beside the stream.
    """
    books = _sum(each.whole() for each in shards)
    of_workers = total(sent.values(), SentCounts())
    dropped = collections.Counter(books.dropped)
    for each in shards:
        dropped.update(each.dropped)
    by_worker: dict[int, list[ReassemblyCounters]] = {}
    for shard in shards:
        for worker, each in shard.workers.items():
            by_worker.setdefault(worker, []).append(each)
    known = sorted(({*by_worker} | {*sent}) - {_TOGETHER})
    return {
        **_ratios(books),
        **_losses(books),
        "incomplete": books.num_incomplete,
        "late_used": books.num_late_used,
        "blocks": {
            "all": books.blocks,
            "reliable": books.blocks_reliable,
            "skipped": books.blocks_skipped,
            "dropped": books.blocks_dropped,
            "non_finite": of_workers.non_finite,
        },
        "channels": [_channel(number, books, of_workers) for number in range(channels + 1)],
        "dropped": _known(dropped),
        "unsent": _known(of_workers.unsent),
        "fallen_back": [worker for worker in sorted(sent) if sent[worker].fallen_back],
        "workers": [
            _worker(worker, _sum(by_worker.get(worker, ())), sent.get(worker, SentCounts()))
            for worker in known
        ],
    }


def _ratios(books: ReassemblyCounters) -> dict[str, Any]:
    pushes, used = books.num_closed, books.num_late_used
    return {
        "pushes": pushes,
        "k": _mean(books.sum_k, pushes),
        "fresh": _mean(books.sum_fresh, pushes),
        "fill": _mean(books.sum_fill, pushes),
        "lateness": _mean(books.sum_of_ages, used),
    }


def _losses(books: ReassemblyCounters) -> dict[str, int]:
    numbers = range(len(books.num_announced))
    return {
        "announced": sum(books.num_announced),
        "arrived": sum(books.num_arrived),
        "late": sum(books.num_late),
        "lost": sum(_lost(books, number) for number in numbers),
    }


def _channel(number: int, books: ReassemblyCounters, sent: SentCounts) -> dict[str, int]:
    stream = {
        "channel": number,
        "blocks": _at(sent.blocks, number),
        "bytes_sent": _at(sent.num_bytes, number),
    }
    if not number:
        return stream
    return stream | {
        "datagrams_sent": _at(sent.datagrams, number),
        "datagrams_received": _at(books.num_datagrams, number),
        "bytes_received": _at(books.num_bytes, number),
        "announced": _at(books.num_announced, number),
        "arrived": _at(books.num_arrived, number),
        "late": _at(books.num_late, number),
        "lost": _lost(books, number),
    }


def _worker(worker: int, books: ReassemblyCounters, sent: SentCounts) -> dict[str, Any]:
    return {
        "id": worker,
        **_ratios(books),
        **_losses(books),
        "datagrams_sent": sum(sent.datagrams),
        "fallen_back": sent.fallen_back > 0,
    }


def lost(books: ReassemblyCounters) -> int:
    """Return how many datagrams were announced and never came."""
    return _losses(books)["lost"]


def _lost(books: ReassemblyCounters, channel: int) -> int:
    came = _at(books.num_arrived, channel) + _at(books.num_late, channel)
    return max(0, _at(books.num_announced, channel) - came)


def _at(counts: Sequence[int], channel: int) -> int:
    """Return one entry of a list that another process made; what it leaves out is 0."""
    return counts[channel] if channel < len(counts) else 0


def _mean(sum_of: float, count: int) -> float | None:
    return sum_of / count if count else None


# -- a line a step ---------------------------------------------------------------------------


def tell(worker: int, assembled: ReassembledStep, books: ReassemblyCounters) -> None:
    """Log a closed step, as --dgt_info asks."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in _known(books.dropped).items())
    logging.info(
        "worker %d, step %d: fresh %.3f, fill %.3f, %d of %d datagrams in time, %d late ones used "
        "(%.2f steps late); dropped so far: %s",
        worker,
        assembled.step,
        assembled.fresh,
        assembled.fill,
        assembled.arrived,
        assembled.announced,
        assembled.num_late,
        assembled.mean_lateness,
        dropped or "none",
    )

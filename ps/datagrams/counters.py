"""Counters of the UDP datagrams that shards received, and their block in the run's status.

`DatagramCounts` holds the UDP datagram counters of one shard. The datagram counters are saved in
the shard's checkpoint and reported to shard 0, the leader. `summary_block` joins the datagram
counters of all shards with the workers' counts of sent datagrams. The names of the datagram
counters appear in checkpoint files and in the run's summary. The page docs/reference/figures.md
explains the names of the datagram counters.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from thinwire.ops.routing.counters import ReassemblyCounters, SentCounts, total
from thinwire.runtime.persistence.documents import Document

if TYPE_CHECKING:
    from thinwire.ops.routing.reassembler import ReassembledStep

#: Reasons for which a datagram without a known worker session is dropped.
#: `thinwire.ps.datagrams.receiver` counts datagrams dropped for further reasons.
BY_THE_KERNEL = "kept out by the kernel"
EMPTY = "empty"
#: A following shard (id 1 and up) reports datagram counters of at most this many workers; with more
#: workers, the report contains only the sum.
_MOST_WORKERS_LISTED = 200
_ALL_WORKERS = 0  # key of the sum over all workers, because no worker has the id 0


@dataclasses.dataclass(frozen=True)
class DatagramCounts(Document):
    """Counts of the UDP datagrams that one shard received since the run began.

    Attributes:
        workers: Worker id -> sum of the counters of all datagram sessions of the worker's
            processes.
        dropped: Drop reason -> number of dropped datagrams that belong to no worker's session.
    """

    workers: dict[int, ReassemblyCounters] = dataclasses.field(default_factory=dict)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_sessions(
        cls, sessions: Iterable[tuple[int, ReassemblyCounters]], dropped: Mapping[str, int]
    ) -> DatagramCounts:
        """Add up the datagram counters in (worker id, counters) pairs, by worker.

        Later changes of the given datagram counters do not change the returned sum.
        """
        by_worker: dict[int, list[ReassemblyCounters]] = {}
        for worker, counters in sessions:
            by_worker.setdefault(worker, []).append(counters)
        workers = {worker: _sum(by_worker[worker]) for worker in sorted(by_worker)}
        return cls(workers, _nonzero(dropped))

    def with_dropped(self, reason: str, count: int) -> DatagramCounts:
        """Return a copy with `count` more datagrams counted as dropped for `reason`."""
        dropped = self.dropped | {reason: self.dropped.get(reason, 0) + count}
        return DatagramCounts(self.workers, _nonzero(dropped))

    def summarized(self) -> DatagramCounts:
        """Return the datagram counts to report to shard 0.

        If there are many workers, the report to shard 0 holds only the sum of their datagram
        counts.
        """
        if len(self.workers) <= _MOST_WORKERS_LISTED:
            return self
        return DatagramCounts({_ALL_WORKERS: self.total()}, self.dropped)

    def total(self) -> ReassemblyCounters:
        """Return the sum of the datagram counters over all workers."""
        return _sum(self.workers.values())


def num_lost(counters: ReassemblyCounters) -> int:
    """Return the number of datagrams that workers announced in pushes and that never arrived."""
    return sum(_lost(counters, channel) for channel in range(len(counters.num_announced)))


def log_step(worker: int, assembled: ReassembledStep, counters: ReassemblyCounters) -> None:
    """Log the datagram counts of one completed step of a worker (--dgt_info)."""
    dropped = _nonzero(counters.dropped)
    logging.info(
        "worker %d, step %d: fraction of blocks in time %.3f, with late blocks %.3f; %d of %d "
        "datagrams in time, %d late datagrams used (%.2f steps late); datagrams dropped so far: %s",
        worker,
        assembled.step,
        assembled.fresh,
        assembled.fill,
        assembled.arrived,
        assembled.announced,
        assembled.num_late,
        assembled.mean_lateness,
        ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "none",
    )


def summary_block(
    shards: Sequence[DatagramCounts], sent: Mapping[int, SentCounts], channels: int
) -> dict[str, Any]:
    """Return the datagram counts of the whole run for the run's status document.

    Args:
        shards: Counts of the datagrams that a shard received, one entry for each shard.
        sent: Worker id -> counts of the datagrams that the worker sent.
        channels: Number of UDP datagram channels (priority classes) between a worker and a shard,
            without the gRPC stream.
    """
    received = _sum(shard.total() for shard in shards)
    of_workers = total(sent.values(), SentCounts())
    dropped = collections.Counter(received.dropped)
    by_worker: dict[int, list[ReassemblyCounters]] = {}
    for shard in shards:
        dropped.update(shard.dropped)
        for worker, counters in shard.workers.items():
            by_worker.setdefault(worker, []).append(counters)
    listed = sorted(({*by_worker} | {*sent}) - {_ALL_WORKERS})
    return {
        **_ratios(received),
        **_losses(received),
        "incomplete": received.num_incomplete,
        "late_used": received.num_late_used,
        "blocks": {
            "all": received.blocks,
            "reliable": received.blocks_reliable,
            "skipped": received.blocks_skipped,
            "dropped": received.blocks_dropped,
            "non_finite": of_workers.non_finite,
        },
        "channels": [_channel(number, received, of_workers) for number in range(channels + 1)],
        "dropped": _nonzero(dropped),
        "unsent": _nonzero(of_workers.unsent),
        "fallen_back": [worker for worker in sorted(sent) if sent[worker].fallen_back],
        "workers": [
            _worker(worker, _sum(by_worker.get(worker, ())), sent.get(worker, SentCounts()))
            for worker in listed
        ],
    }


def _ratios(counters: ReassemblyCounters) -> dict[str, Any]:
    pushes, used = counters.num_closed, counters.num_late_used
    return {
        "pushes": pushes,
        "k": _mean(counters.sum_k, pushes),
        "fresh": _mean(counters.sum_fresh, pushes),
        "fill": _mean(counters.sum_fill, pushes),
        "lateness": _mean(counters.sum_of_ages, used),
    }


def _losses(counters: ReassemblyCounters) -> dict[str, int]:
    return {
        "announced": sum(counters.num_announced),
        "arrived": sum(counters.num_arrived),
        "late": sum(counters.num_late),
        "lost": num_lost(counters),
    }


def _channel(number: int, counters: ReassemblyCounters, sent: SentCounts) -> dict[str, int]:
    stream = {
        "channel": number,
        "blocks": _at(sent.blocks, number),
        "bytes_sent": _at(sent.num_bytes, number),
    }
    if not number:
        return stream
    return stream | {
        "datagrams_sent": _at(sent.datagrams, number),
        "datagrams_received": _at(counters.num_datagrams, number),
        "bytes_received": _at(counters.num_bytes, number),
        "announced": _at(counters.num_announced, number),
        "arrived": _at(counters.num_arrived, number),
        "late": _at(counters.num_late, number),
        "lost": _lost(counters, number),
    }


def _worker(worker: int, counters: ReassemblyCounters, sent: SentCounts) -> dict[str, Any]:
    return {
        "id": worker,
        **_ratios(counters),
        **_losses(counters),
        "datagrams_sent": sum(sent.datagrams),
        "fallen_back": sent.fallen_back > 0,
    }


def _lost(counters: ReassemblyCounters, channel: int) -> int:
    received = _at(counters.num_arrived, channel) + _at(counters.num_late, channel)
    return max(0, _at(counters.num_announced, channel) - received)


def _at(counts: Sequence[int], channel: int) -> int:
    """Return the count of one UDP channel from a list of datagram counts by channel.

    The datagram count is 0 if the list of counts, which another process sent, is too short.
    """
    return counts[channel] if channel < len(counts) else 0


def _mean(sum_of: float, count: int) -> float | None:
    return sum_of / count if count else None


def _sum(parts: Iterable[ReassemblyCounters]) -> ReassemblyCounters:
    added = total(parts, ReassemblyCounters.zero(0))
    return dataclasses.replace(added, dropped=_nonzero(added.dropped))


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}

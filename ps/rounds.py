"""Rounds on their way from workers to the Supervisor; the newest ones wait for one that is away."""

from __future__ import annotations

import collections

from proto import thinwire_pb2 as pb
from ps.connections import Connection

#: Characters of rounds kept of each worker for a Supervisor that comes, or comes back.
KEPT_PER_WORKER = 512 << 10


class RoundsRelay:
    """Passes batches of rounds on (writer thread). Whoever gets one twice knows its numbers."""

    def __init__(self, kept_per_worker: int = KEPT_PER_WORKER) -> None:
        self._limit = kept_per_worker
        self._kept: dict[int, collections.deque[str]] = {}

    def take(self, worker: int, batch: str, listeners: list[Connection]) -> None:
        """Send a worker's batch to everybody who listens, and keep it for a while."""
        kept = self._kept.setdefault(worker, collections.deque())
        kept.append(batch)
        size = sum(map(len, kept))
        while size > self._limit and len(kept) > 1:
            size -= len(kept.popleft())
        for listener in listeners:
            _send(listener, worker, batch)

    def repeat(self, listener: Connection) -> None:
        """Send all that is kept to one who has just come."""
        for worker, kept in self._kept.items():
            for batch in kept:
                _send(listener, worker, batch)


def _send(listener: Connection, worker: int, batch: str) -> None:
    listener.say(pb.ToClient(report=pb.Report(rounds=batch, worker=worker)))

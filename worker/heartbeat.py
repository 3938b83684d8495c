"""What a worker says now and then, whatever its training thread is doing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from proto import thinwire_pb2 as pb
from worker.exchange import Exchange


class Heartbeat:
    """Keeps the leases alive and reports, whatever the training thread is doing."""

    def __init__(
        self,
        exchange: Exchange,
        lease_seconds: float,
        report: Callable[[], str],
        rounds: Callable[[], list[str]],
    ) -> None:
        """Start the thread; `report` makes the metrics document, `rounds` those of new rounds."""
        self._exchange, self._report, self._rounds = exchange, report, rounds
        self._interval_seconds = min(1.0, lease_seconds / 3)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last report and end."""
        self._stop.set()
        self._thread.join()
        self._beat()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._beat()

    def _beat(self) -> None:
        first, *others = self._exchange.shards
        first.say(pb.ToServer(report=pb.Report(document=self._report())))
        if first.connected:  # else they are kept
            for document in self._rounds():
                first.say(pb.ToServer(report=pb.Report(rounds=document)))
        for shard in others:
            shard.say(pb.ToServer(heartbeat=pb.Heartbeat()))
        if not self._stop.is_set():
            self._exchange.attend()

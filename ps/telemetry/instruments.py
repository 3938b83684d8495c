"""What one shard tells those who watch it from outside: its own counts, not the run's."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.run.settings import Run
from thinwire.ops.telemetry.instruments import Instrument, counter, gauge, histogram
from thinwire.proto import metrics_server
from thinwire.proto.metrics_server import MetricsPort
from thinwire.ps.datagrams.counters import DatagramCounts

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore
    from thinwire.ps.service.server import ShardServer
    from thinwire.ps.telemetry.status import StatusReporter

#: Whoever asks again so soon gets the same meters: the writer thread has other work.
_FRESH_SECONDS = 1.0
#: A writer thread that is busy for longer lets readers have what it told last.
_PATIENCE_SECONDS = 2.0


class ShardMeters:
    """Asks the writer thread, which alone may look, but never keeps it waiting.

    Args:
        server: The shard's.
        board: Its status.
        received: What has come in datagrams, if any can.
        clock: For tests.
    """

    def __init__(
        self,
        server: ShardServer,
        board: StatusReporter,
        received: Callable[[], DatagramCounts | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._board, self._received, self._clock = server, board, received, clock
        self._asked: threading.Event | None = None
        self._lock = threading.Lock()
        self._told, self._told_at = self._look(), clock()

    def open_port(self, run: Run, node: str) -> MetricsPort | None:
        """Let them be read, if the run has a port for that; see `thinwire.proto.metrics_server`."""
        return metrics_server.open_port(run, node, self.read)

    def read(self) -> list[Instrument]:
        """Return the meters of this moment, or the last ones if the writer has no time."""
        with self._lock:
            asked = self._asked
            if asked is None and self._clock() - self._told_at >= _FRESH_SECONDS:
                asked = self._asked = threading.Event()
                self._server.queue.put(self._look_again)
        if asked is not None:
            asked.wait(_PATIENCE_SECONDS)
        age = self._clock() - self._told_at
        text = "Since the writer thread told these figures; long where it is stuck, or done."
        return [*self._told, gauge("figures_age_seconds", text, age)]

    def _look_again(self) -> None:
        """Take the meters down (writer thread); whatever goes wrong, the run goes on."""
        try:
            self._told = self._look()
            self._told_at = self._clock()
        except Exception:  # noqa: BLE001 - who watches must not end what he watches
            logging.log_every_n_seconds(
                logging.ERROR, "metrics: no figures could be told", 60, exc_info=True
            )
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set()

    def _look(self) -> list[Instrument]:
        core, server = self._server.core, self._server
        return [
            *_model_meters(core),
            *_membership_meters(core, self._board.states()),
            *_server_meters(server),
            *_journal_meters(server),
            *_datagram_meters(self._received()),
        ]


def _model_meters(core: PsCore) -> list[Instrument]:
    accounts = core.accounts
    pushes = sum(account.pushes for account in accounts.workers.values())
    return [
        gauge("model_version", "Updates that are in this shard's weights.", core.version),
        counter("updates", "Updates applied by this process.", core.version),
        counter("pushes", "Pushes of workers merged into these.", pushes),
        counter("samples", "Examples behind these.", core.samples),
        counter(
            "rejected_pushes",
            "Pushes that never reached the model.",
            dict(accounts.rejected),
            "reason",
        ),
        counter("replies", "Replies that carried weights.", accounts.num_replies),
        counter(
            "lost_updates", "Updates of this shard that restarts undid.", accounts.lost_updates
        ),
        histogram(
            "staleness", "Updates between a push's base and its merging.", accounts.staleness
        ),
        counter(
            "held_seconds",
            "How long replies were held back, all together.",
            accounts.groups.wait_seconds,
        ),
        gauge("learning_rate", "Scheduled learning rate.", core.model.learning_rate),
        gauge("generation", "Restarts of this shard.", core.config.generation),
        gauge("run_ended", "1 once the run has ended.", core.stop_reason is not None),
    ]


def _membership_meters(core: PsCore, states: dict[int, str]) -> list[Instrument]:
    membership = core.membership
    known = dict.fromkeys(("waiting", "training", "suspect", "left", "done"), 0)
    return [
        gauge(
            "workers",
            "Workers that have been here, by state.",
            known | collections.Counter(states.values()),
            "state",
        ),
        gauge("workers_expected", "Workers that this run may have.", core.config.nb_workers),
        gauge("membership_epoch", "Number of the membership.", membership.epoch),
        counter("workers_lost", "Workers whose lease ran out.", membership.num_left),
        counter("workers_returned", "Workers that joined again.", membership.num_returned),
    ]


def _server_meters(server: ShardServer) -> list[Instrument]:
    connections = server.connections
    everyone = connections.everyone()
    workers = len(connections.workers)
    sent = {"down": sum(connections.bytes_down().values())}
    queues = {
        "events": server.queue.qsize(),
        "replies": sum(each.stream.num_waiting for each in everyone),
    }
    streams = {"workers": workers, "others": len(everyone) - workers}
    return [
        counter("bytes_sent", "Training bytes on the wire, framing included.", sent, "direction"),
        gauge(
            "queue_length",
            "What waits: events for the writer thread, replies for clients.",
            queues,
            "queue",
        ),
        gauge("streams", "Open streams of clients.", streams, "of"),
        counter("refused_peers", "Clients refused or cut off.", server.guard.refused, "reason"),
    ]


def _journal_meters(server: ShardServer) -> list[Instrument]:
    journaled = server.journaled
    meters = [gauge("journal_on", "1 where a journal is kept.", journaled.journal is not None)]
    if (journal := journaled.journal) is not None:
        meters += [
            counter("journal_events", "Events written down.", journal.num_records),
            counter("journal_bytes", "Bytes written down.", journal.num_bytes),
            gauge(
                "journal_lag_bytes",
                "Bytes since the last snapshot, to be replayed if the PS died now.",
                journal.bytes_since_snapshot,
            ),
        ]
    return meters


def _datagram_meters(received: DatagramCounts | None) -> list[Instrument]:
    if received is None:
        return []
    books = received.whole()
    fates = {
        "announced": sum(books.num_announced),
        "arrived": sum(books.num_arrived),
        "late": sum(books.num_late),
        "late_used": books.num_late_used,
    }
    dropped = collections.Counter(books.dropped) + collections.Counter(received.dropped)
    return [
        counter(
            "datagrams",
            "Datagrams of closed pushes; lost is announced less arrived and late.",
            fates,
            "fate",
        ),
        counter(
            "datagrams_dropped", "Datagrams that came and were not used.", dict(dropped), "reason"
        ),
    ]

"""Prometheus metrics of one parameter server shard, which describe the shard, not the whole run."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.proto import metrics_server
from thinwire.proto.metrics_server import MetricsPort
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.instruments import Instrument, counter, gauge, histogram

if TYPE_CHECKING:
    from thinwire.ps.service.server import ShardServer
    from thinwire.ps.telemetry.status import StatusReporter

#: Seconds within which all scrapes of the metrics port return equal values, so that frequent
#: scrapes do not load the writer thread.
_FRESH_SECONDS = 1.0
#: Seconds for which a scrape of the metrics port waits for the writer thread, before it returns the
#: last values.
_PATIENCE_SECONDS = 2.0


class ShardInstruments:
    """Exporter of a PS shard's metrics (for Prometheus). The shard's writer thread collects the
    metrics and never waits for a scrape.

    Only the shard's writer thread may read the state machine's counters. A scrape of the metrics
    port queues a request for the writer thread, and the scraping thread waits for the collected
    metrics.

    Args:
        server: Network server of the shard.
        reporter: Object that returns the shard's status counters.
        received: Function that returns the counts of received datagrams, or None if the training
            method sends no datagrams.
        clock: Function that returns monotonic time in seconds; tests replace the function.
    """

    def __init__(
        self,
        server: ShardServer,
        reporter: StatusReporter,
        received: Callable[[], DatagramCounts | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._reporter = server, reporter
        self._received, self._clock = received, clock
        self._requested: threading.Event | None = None
        self._lock = threading.Lock()
        self._latest, self._latest_at = self._read(), clock()

    def open_port(self, run: Run, node: str) -> MetricsPort | None:
        """Open the metrics port of the shard; return None if the run has no metrics ports."""
        return metrics_server.open_port(run, node, self.collect)

    def collect(self) -> list[Instrument]:
        """Return new metrics, or the last collected metrics if the shard's writer thread is
        busy.
        """
        with self._lock:
            request = self._requested
            if request is None and self._clock() - self._latest_at >= _FRESH_SECONDS:
                request = self._requested = threading.Event()
                self._server.queue.put(self._refresh)
        if request is not None:
            request.wait(_PATIENCE_SECONDS)
        age = self._clock() - self._latest_at
        text = (
            "Seconds since the writer thread collected these figures; grows if it is stuck or done."
        )
        return [*self._latest, gauge("figures_age_seconds", text, age)]

    def _refresh(self) -> None:
        """Collect the shard's metrics (called on the writer thread).

        An error during the collection of the shard's metrics is logged and does not end the run.
        """
        try:
            self._latest = self._read()
            self._latest_at = self._clock()
        except Exception:  # noqa: BLE001 - an error in monitoring must not end the run
            logging.log_every_n_seconds(
                logging.ERROR, "metrics: the figures could not be collected", 60, exc_info=True
            )
        with self._lock:
            request, self._requested = self._requested, None
        if request is not None:
            request.set()

    def _read(self) -> list[Instrument]:
        server = self._server
        return [
            *self._of_model(),
            *self._of_membership(),
            *_server_instruments(server),
            *_journal_instruments(server),
            *_datagram_instruments(self._received()),
        ]

    def _of_model(self) -> list[Instrument]:
        core = self._server.core
        accounts = core.counters
        pushes = sum(account.pushes for account in accounts.workers.values())
        return [
            gauge(
                "model_version",
                "Updates applied to this shard's weights since the run began.",
                core.version,
            ),
            counter("updates", "Updates of the weights that this process applied.", core.version),
            counter("pushes", "Pushes of workers merged into updates by this process.", pushes),
            counter("samples", "Training examples behind this process's updates.", core.samples),
            counter(
                "rejected_pushes",
                "Pushes that were rejected and never reached the model.",
                dict(accounts.rejected),
                "reason",
            ),
            counter("replies", "Replies that carried weights.", accounts.num_replies),
            counter(
                "lost_updates",
                "Updates of this shard that restarts have undone.",
                accounts.lost_updates,
            ),
            histogram(
                "staleness",
                "Updates between the base version of a push and the version that merged the push.",
                accounts.staleness,
            ),
            counter(
                "held_seconds",
                "Seconds that the synchronization rule held replies back, summed over all replies.",
                accounts.groups.wait_seconds,
            ),
            gauge(
                "learning_rate",
                "Scheduled learning rate of the next update.",
                core.model.learning_rate,
            ),
            gauge("generation", "Number of restarts of this shard.", core.config.generation),
            gauge("run_ended", "1 once the run has ended.", core.stop_reason is not None),
        ]

    def _of_membership(self) -> list[Instrument]:
        core, states = self._server.core, self._reporter.states()
        membership = core.membership
        known = dict.fromkeys(("waiting", "training", "suspect", "left", "done"), 0)
        return [
            gauge(
                "workers",
                "Workers that have joined at least once, by state.",
                known | collections.Counter(states.values()),
                "state",
            ),
            gauge(
                "workers_expected",
                "Workers that the run is configured for.",
                core.config.nb_workers,
            ),
            gauge(
                "membership_epoch",
                "Epoch of the membership; it grows with every change.",
                membership.epoch,
            ),
            counter("workers_lost", "Workers whose lease expired.", membership.num_left),
            counter("workers_returned", "Workers that rejoined.", membership.num_returned),
        ]


def _server_instruments(server: ShardServer) -> list[Instrument]:
    connections = server.connections
    everyone = connections.everyone()
    workers = len(connections.workers)
    sent = {"down": sum(connections.bytes_down().values())}
    queues = {
        "events": server.queue.qsize(),
        "replies": sum(connection.stream.num_waiting for connection in everyone),
    }
    streams = {"workers": workers, "others": len(everyone) - workers}
    return [
        counter(
            "bytes_sent", "Training bytes this shard sent, framing included.", sent, "direction"
        ),
        gauge(
            "queue_length",
            "Queued events for the writer thread, and queued replies for clients.",
            queues,
            "queue",
        ),
        counter(
            "dropped_reports",
            "Reports that were dropped because a Supervisor did not read its stream.",
            server.observers.num_dropped,
        ),
        gauge("streams", "Open streams of clients.", streams, "of"),
        counter(
            "refused_peers",
            "Clients whose connection was refused or closed, by reason.",
            server.guard.refused,
            "reason",
        ),
    ]


def _journal_instruments(server: ShardServer) -> list[Instrument]:
    journaled = server.journaled
    is_on = journaled.journal is not None
    instruments = [gauge("journal_on", "1 if this shard writes an event journal, else 0.", is_on)]
    if (journal := journaled.journal) is not None:
        instruments += [
            counter("journal_events", "Events written to the journal.", journal.num_records),
            counter("journal_bytes", "Bytes written to the journal.", journal.num_bytes),
            gauge(
                "journal_lag_bytes",
                "Journal bytes since the last snapshot, which a restarted shard would replay.",
                journal.bytes_since_snapshot,
            ),
        ]
    return instruments


def _datagram_instruments(received: DatagramCounts | None) -> list[Instrument]:
    if received is None:
        return []
    counters = received.total()
    fates = {
        "announced": sum(counters.num_announced),
        "arrived": sum(counters.num_arrived),
        "late": sum(counters.num_late),
        "late_used": counters.num_late_used,
    }
    dropped = collections.Counter(counters.dropped) + collections.Counter(received.dropped)
    return [
        counter(
            "datagrams",
            "Datagrams of finished pushes; lost datagrams are announced minus arrived minus late.",
            fates,
            "fate",
        ),
        counter(
            "datagrams_dropped",
            "Datagrams that were received and not used, by reason.",
            dict(dropped),
            "reason",
        ),
    ]

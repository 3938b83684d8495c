"""Monitoring instruments (counters and gauges) of one worker, for the /metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.runtime.telemetry.instruments import Instrument, counter, gauge

if TYPE_CHECKING:
    from thinwire.worker.trainer import WorkerSession


def collect(session: WorkerSession) -> list[Instrument]:
    """Return the instruments of this process with their current values (any thread)."""
    exchange, core, spent = session.exchange, session.core, session.stopwatch.seconds
    seconds = spent | {"send": exchange.send_seconds}
    seconds["wait"] = max(0.0, spent["wait"] - exchange.send_seconds)
    datagrams = exchange.datagrams
    found = [
        counter(
            "steps", "Local steps of this worker, one mini-batch each.", session.steps.num_steps
        ),
        counter(
            "exchanges", "Pushes that every shard has answered.", core.step - session.joined_at_step
        ),
        counter("seconds", "Seconds that the worker spent in each phase.", seconds, "phase"),
        gauge(
            "step_seconds", "Duration of the newest local step, in seconds.", session.step_seconds
        ),
        gauge(
            "loss",
            "Training loss of the newest mini-batch.",
            float("nan") if session.steps.loss is None else session.steps.loss,
        ),
        gauge("learning_rate", "Scheduled learning rate.", core.learning_rate),
        gauge(
            "model_version", "Version of shard 0's weights that this worker has.", core.versions[0]
        ),
        counter(
            "non_finite_batches",
            "Mini-batches that this worker skipped because of NaN or infinity.",
            session.steps.num_non_finite,
        ),
        counter(
            "bytes_sent",
            "Training bytes that this worker sent on the network, framing included.",
            {"up": exchange.bytes_up},
            "direction",
        ),
        counter(
            "bytes_received",
            "Bytes that this worker received from shards and peers, framing included.",
            {"down": exchange.bytes_down},
            "direction",
        ),
        gauge(
            "shards_connected",
            "Shards with an open stream to this worker.",
            sum(shard.connected for shard in exchange.shards),
        ),
        counter(
            "refused_peers",
            "Streams of other workers that were refused or closed, by reason.",
            exchange.refused_peers,
            "reason",
        ),
    ]
    if datagrams is not None:
        found += [
            counter(
                "datagrams_sent",
                "Datagrams sent to the network, by channel.",
                {str(number): count for number, count in enumerate(datagrams.datagrams)},
                "channel",
            ),
            counter(
                "datagrams_unsent",
                "Datagrams that were not sent, by reason.",
                datagrams.unsent,
                "reason",
            ),
        ]
    return found

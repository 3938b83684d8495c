"""What one worker tells those who watch it from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.meters import Meter, counter, gauge

if TYPE_CHECKING:
    from worker.participant import Participant


def meters_of(part: Participant) -> list[Meter]:
    """Return the meters of this moment and of this process (any thread)."""
    exchange, core, spent = part.exchange, part.core, part.stopwatch.seconds
    seconds = spent | {"send": exchange.send_seconds}
    seconds["wait"] = max(0.0, spent["wait"] - exchange.send_seconds)
    datagrams = exchange.datagrams
    return [
        counter("steps", "Local steps (mini-batches).", part.num_steps),
        counter("exchanges", "Pushes that were answered.", core.step - part.joined_at_step),
        counter("seconds", "Where the worker's time went.", seconds, "phase"),
        gauge("step_seconds", "What the newest local step took.", part.step_seconds),
        gauge("loss", "Of the newest mini-batch.", float("nan") if part.loss is None
              else part.loss),
        gauge("learning_rate", "Scheduled learning rate.", core.learning_rate),
        gauge("model_version", "Of shard 0's weights that this worker has.", core.versions[0]),
        counter("non_finite_batches", "Mini-batches left out for NaN or infinity.",
                part.num_non_finite),
        counter("bytes_sent", "Training bytes on the wire, framing included.",
                {"up": exchange.bytes_up}, "direction"),
        counter("bytes_received", "Bytes from shards and peers, framing included.",
                {"down": exchange.bytes_down}, "direction"),
        gauge("shards_connected", "Shards to which the stream stands.",
              sum(shard.connected for shard in exchange.shards)),
        counter("refused_peers", "Other workers' streams refused or cut off.",
                exchange.refused_peers, "reason"),
        *([] if datagrams is None else [
            counter("datagrams_sent", "Datagrams handed over to be carried.",
                    {str(number): count for number, count in enumerate(datagrams.datagrams)},
                    "channel"),
            counter("datagrams_unsent", "Datagrams that were not.", datagrams.unsent, "reason"),
        ]),
    ]  # fmt: skip

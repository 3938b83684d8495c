"""Prometheus instruments of a node that evaluates a run: the Supervisor or Standalone."""

from __future__ import annotations

import math

from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry import run_status
from thinwire.runtime.telemetry.evaluation import Evaluation, latest, ranges
from thinwire.runtime.telemetry.instruments import Instrument, counter, gauge


def collect(status: run_status.RunStatus | None, evaluations: list[Evaluation]) -> list[Instrument]:
    """Return a run's Prometheus instruments with current values; callable from any thread.

    Args:
        status: Newest status from shard 0; None before the first status.
        evaluations: All evaluations of the run, the newest last. The thread that evaluates may
            append to this list during the call.
    """
    snapshot = evaluations.copy()
    newest = latest(snapshot)
    metrics = {name: _number(bounds["last"]) for name, bounds in ranges(snapshot).items()}
    best = ranges(snapshot).get(ACCURACY, {}).get("max")
    return [
        counter("evaluations", "Evaluations of the central model.", len(snapshot)),
        gauge(
            "test_accuracy",
            "Test accuracy of the newest evaluation; 0 to 1.",
            metrics.get(ACCURACY, math.nan),
        ),
        gauge(
            "best_test_accuracy",
            "Highest test accuracy of all evaluations; 0 to 1.",
            _number(best),
        ),
        gauge("test_loss", "Test loss of the newest evaluation.", metrics.get("loss", math.nan)),
        gauge("test_metric", "Newest value of each test metric.", metrics, "metric"),
        gauge(
            "evaluated_version",
            "Updates applied to the model that was evaluated last.",
            newest.version if newest is not None else 0,
        ),
        *([] if status is None else _of_run(status)),
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _of_run(status: run_status.RunStatus) -> list[Instrument]:
    """Return the totals of the whole run, over all restarts of its nodes."""
    moved = {"up": status.bytes_up, "down": status.bytes_down}
    return [
        gauge("run_updates", "Updates applied to the model.", status.version),
        gauge("run_samples", "Training examples in the applied updates.", status.samples),
        gauge("run_seconds", "Seconds from the first pull to the last update.", status.seconds),
        gauge("run_bytes", "Training bytes that all nodes sent, by direction.", moved, "direction"),
        gauge(
            "run_lost_updates",
            "Applied updates that a restart has undone.",
            status.membership.lost_updates,
        ),
        gauge(
            "run_ended", "1 after the run has ended, otherwise 0.", status.stop_reason is not None
        ),
    ]

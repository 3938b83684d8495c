"""Prometheus instruments of a node that evaluates a run: Supervisor or Standalone."""

from __future__ import annotations

import math

from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry import run_status
from thinwire.runtime.telemetry.evaluation import Evaluation, latest, ranges
from thinwire.runtime.telemetry.instruments import Instrument, counter, gauge


def collect(status: run_status.RunStatus | None, evaluations: list[Evaluation]) -> list[Instrument]:
    """Return the instruments of this moment (any thread).

    Args:
        status: The run's newest status from shard 0; None: there is none.
        evaluations: All, the newest last; may grow meanwhile.
    """
    kept = evaluations.copy()
    newest = latest(kept)
    metrics = {name: _number(each["last"]) for name, each in ranges(kept).items()}
    best = ranges(kept).get(ACCURACY, {}).get("max")
    return [
        counter("evaluations", "Evaluations of the central model.", len(kept)),
        gauge(
            "test_accuracy",
            "Of the newest evaluation; 0 to 1.",
            metrics.get(ACCURACY, math.nan),
        ),
        gauge(
            "best_test_accuracy",
            "Of the best one.",
            _number(best),
        ),
        gauge("test_loss", "Of the newest evaluation.", metrics.get("loss", math.nan)),
        gauge("test_metric", "Of the newest evaluation that has it.", metrics, "metric"),
        gauge(
            "evaluated_version",
            "Updates in the model that was evaluated last.",
            newest.version if newest is not None else 0,
        ),
        *([] if status is None else _of_run(status)),
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _of_run(status: run_status.RunStatus) -> list[Instrument]:
    """Return the totals of the whole run, over all incarnations of its nodes."""
    moved = {"up": status.bytes_up, "down": status.bytes_down}
    return [
        gauge("run_updates", "Updates that are in the model.", status.version),
        gauge("run_samples", "Examples behind these.", status.samples),
        gauge("run_seconds", "From the first pull to the last update.", status.seconds),
        gauge("run_bytes", "Training bytes of all nodes.", moved, "direction"),
        gauge("run_lost_updates", "Updates that restarts undid.", status.membership.lost_updates),
        gauge("run_ended", "1 once the run has ended.", status.stop_reason is not None),
    ]

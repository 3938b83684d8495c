"""Status document of a run, and the run's summary (summary.json) from status and evaluations.

PS shard 0 makes a `RunStatus` and sends it to the Supervisor. The node that ends the run calls
`summarise` to write summary.json. In names of status fields, "up" means from worker to PS. The
status counts sent bytes with message headers, without pulls of the model for evaluations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from thinwire.ops.routing.counters import SentCounts
from thinwire.runtime.persistence.documents import Document
from thinwire.runtime.run.target import ACCURACY, ACCURACY_REACHED, Target
from thinwire.runtime.telemetry.evaluation import Evaluation, ranges, standing

SUMMARY_SCHEMA = 1
ACCURACY_MARKS = (0.50, 0.60, 0.70, 0.75, 0.80, 0.85, 0.88, 0.90)
_SUMMARY_WORKER_FIELDS = (
    "id",
    "state",
    "pushes",
    "samples",
    "bytes_up",
    "bytes_down",
    "compute_seconds",
    "encode_seconds",
    "send_seconds",
    "wait_seconds",
)


@dataclasses.dataclass(frozen=True)
class Histogram(Document):
    """Histogram: how often each whole number occurred, without bins.

    >>> Histogram({0: 18, 3: 1, 7: 1}).p95
    3
    """

    counts: dict[int, int] = dataclasses.field(default_factory=dict)

    def add(self, value: int, times: int = 1) -> None:
        """Add ``times`` occurrences of the number ``value`` to this histogram."""
        self.counts[value] = self.counts.get(value, 0) + times

    def merge(self, other: Histogram) -> Histogram:
        """Return a new histogram with the sums of the counts of two histograms."""
        merged = Histogram(dict(self.counts))
        for value, times in other.counts.items():
            merged.add(value, times)
        return merged

    @property
    def total(self) -> int:
        """Number of all values that the histogram has counted."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Mean of the values that the histogram has counted; 0 if it is empty."""
        weighted = sum(value * times for value, times in self.counts.items())
        return weighted / self.total if self.total else 0.0

    @property
    def p95(self) -> int:
        """Smallest value that 95 % or more of the histogram's values do not exceed; 0 if empty."""
        seen, total = 0, self.total
        for value in sorted(self.counts):
            seen += self.counts[value]
            if 100 * seen >= 95 * total:
                return value
        return 0

    @property
    def max(self) -> int:
        """Largest value that the histogram has counted; 0 if the histogram is empty."""
        return max((value for value, times in self.counts.items() if times), default=0)


@dataclasses.dataclass(frozen=True)
class WorkerMetrics(Document):
    """Counts and times of one worker; seconds and bytes are totals since the first connection."""

    id: int  # worker id, from 1
    state: Literal["waiting", "training", "suspect", "between fits", "left", "done"] = "waiting"
    clock: int = 0  # number of exchanges that the worker has finished
    lag: int = 0  # number of exchanges by which the worker is behind the fastest worker
    pushes: int = 0
    samples: int = 0
    local_steps: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    compute_seconds: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    wait_seconds: float = 0.0
    loss: float | None = None  # mean training loss in the worker's last push; None: no push yet
    refused: int = 0  # number of the worker's pushes that the PS did not apply to the model
    non_finite: int = 0  # number of mini-batches not pushed because of a non-finite gradient
    restarts: int = 0  # number of times that a Cluster has restarted the worker
    steps_per_second: float = 0.0  # recent rate of the worker's local steps
    # Class -> number of the worker's training examples of the class.
    labels: dict[int, int] = dataclasses.field(default_factory=dict)
    datagrams: SentCounts | None = None  # counts of sent datagrams; None: no datagrams


@dataclasses.dataclass(frozen=True)
class MembershipCounts(Document):
    """Numbers of changes in the set of connected workers, and of lost updates."""

    epochs: int = 0  # number of the membership epoch, which every join or departure increases
    left: int = 0  # number of departures of workers from the run
    returned: int = 0  # number of returns of workers to the run
    lost_updates: int = 0  # number of updates that restarts of PS shard 0 have undone


@dataclasses.dataclass(frozen=True)
class RunStatus(Document):
    """Status of a training run at one moment, from the figures of PS shard 0."""

    run_id: str
    method: str
    seams: dict[str, str]  # policy interface -> policy, for example codec -> topk
    nb_workers: int
    nb_ps: int
    num_parameters: int
    seed: int
    iter_max: int  # number of updates at which the run ends; 0: no limit
    version: int = 0  # number of updates applied to the model
    generation: int = 0  # number of times that PS shard 0 has restarted
    samples: int = 0  # number of training examples that the applied updates consumed
    seconds: float = 0.0  # seconds from the first pull to the last applied update
    learning_rate: float = 0.0  # learning rate of the next update
    staleness: Histogram = dataclasses.field(default_factory=Histogram)
    rejected_pushes: dict[str, int] = dataclasses.field(default_factory=dict)  # reason -> count
    bytes_up: int = 0
    bytes_down: int = 0
    pushes: int = 0
    pulls: int = 0  # number of replies with weights to workers
    membership: MembershipCounts = dataclasses.field(default_factory=MembershipCounts)
    workers: list[WorkerMetrics] = dataclasses.field(default_factory=list)
    policies: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # name -> report
    stop_reason: str | None = None  # reason why the run ended; None while the run trains

    @property
    def loss(self) -> float | None:
        """Mean of all workers' last training losses; None if no worker has reported a loss."""
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        return sum(losses) / len(losses) if losses else None


def summarise(
    status: RunStatus,
    evaluations: Sequence[Evaluation],
    target: Target | None = None,
) -> dict[str, Any]:
    """Return the content of summary.json for a training run that has ended.

    Args:
        status: Last status of the run.
        evaluations: Evaluations of the run in the order in which they were made. Without
            evaluations, the summary has no metrics.
        target: Target of the run (a bound of a metric); None if the run has no target. An accuracy
            as target is added to the summary's ``time_to_accuracy``.

    Raises:
        ValueError: A policy reports figures under a name that is another key of summary.json.
    """
    valid = standing(evaluations)
    metrics = ranges(valid)
    accuracy, loss, top5 = (metrics.get(name, {}) for name in (ACCURACY, "loss", "top5_accuracy"))
    marks = [Target.of_accuracy(mark) for mark in ACCURACY_MARKS]
    if target is not None and target not in marks and target.stop_reason == ACCURACY_REACHED:
        marks = sorted([*marks, target], key=lambda mark: mark.bound)
    staleness = status.staleness
    summary: dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "method": status.method,
        "seams": dict(status.seams),
        "nb_workers": status.nb_workers,
        "nb_ps": status.nb_ps,
        "num_parameters": status.num_parameters,
        "seed": status.seed,
        "updates": status.version,
        "samples": status.samples,
        "seconds": status.seconds,
        "test_accuracy": accuracy.get("last"),
        "test_loss": loss.get("last"),
        "best_test_accuracy": accuracy.get("max"),
        "time_to_accuracy": {_mark_name(mark.bound): _first_at(mark, valid) for mark in marks},
        "metrics": metrics,
        **_traffic(status),
        "updates_per_second": _ratio(status.version, status.seconds),
        "samples_per_second": _ratio(status.samples, status.seconds),
        "staleness": {"mean": staleness.mean, "p95": staleness.p95, "max": staleness.max},
        "rejected_pushes": dict(status.rejected_pushes),
        "workers": [_worker_row(worker) for worker in status.workers],
        "membership": status.membership.to_dict(),
        "stop_reason": status.stop_reason,
    }
    if top5:
        summary["test_top5_accuracy"] = top5["last"]
        summary["best_test_top5_accuracy"] = top5["max"]
    if target is not None:
        summary["target"] = {"text": str(target), "reached": _first_at(target, valid)}
    for name, block in status.policies.items():
        if name in summary:
            raise ValueError(f"a policy reports as {name!r}, which is another key of summary.json")
        summary[name] = block
    return summary


def _traffic(status: RunStatus) -> dict[str, Any]:
    """Return a run's sent bytes in total and per exchange with the PS, and compression ratios."""
    dense_bytes = 4 * status.num_parameters  # size of all parameters of the model as float32
    return {
        "bytes_up": status.bytes_up,
        "bytes_down": status.bytes_down,
        "bytes_up_per_push": _ratio(status.bytes_up, status.pushes),
        "bytes_down_per_pull": _ratio(status.bytes_down, status.pulls),
        "compression_up": _ratio(dense_bytes * status.pushes, status.bytes_up),
        "compression_down": _ratio(dense_bytes * status.pulls, status.bytes_down),
    }


def _first_at(mark: Target, evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    """Return the training cost until the first evaluation that reached a target, or None."""
    for evaluation in evaluations:
        if mark.is_reached(evaluation.metrics):
            return {
                "seconds": evaluation.seconds,
                "updates": evaluation.version,
                "samples": evaluation.samples,
                "bytes_up": evaluation.bytes_up,
                "bytes_down": evaluation.bytes_down,
            }
    return None


def _mark_name(mark: float) -> str:
    """Format an accuracy as a key of ``time_to_accuracy``: 0.8 -> "0.80", 0.875 -> "0.875"."""
    text = f"{mark:.2f}"
    return text if float(text) == mark else repr(mark)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _worker_row(worker: WorkerMetrics) -> dict[str, Any]:
    values = worker.to_dict()
    row = {name: values[name] for name in _SUMMARY_WORKER_FIELDS}
    return row | {"labels": values["labels"]} if worker.labels else row

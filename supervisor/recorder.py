"""Recorder of a run: writes evaluations, the best model, the summary and the report."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from thinwire.runtime.persistence.documents import LARGEST_NUMBER, write_json_atomically
from thinwire.runtime.run.directory import METRICS_FILE, SUMMARY_FILE, clear_records, launched_with
from thinwire.runtime.run.finished import SETTINGS, deciding_settings
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.target import Target, find, find_name
from thinwire.runtime.telemetry import predictions, run_status
from thinwire.runtime.telemetry.evaluation import Evaluation, latest, names_in
from thinwire.supervisor import metrics_hook
from thinwire.supervisor.dashboard import format_metric
from thinwire.supervisor.metrics_log import (
    EVALUATION_KIND,
    STATUS_KIND,
    MetricsLog,
    RoundsLog,
)
from thinwire.supervisor.report.writer import write_report

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.supervisor.publisher import Publisher
    from thinwire.supervisor.scorer import ModelScorer

_BEST = "best.keras"


def about(run: Run) -> dict[str, Any]:
    """Return the run's settings that summary.json lists in addition to the measurements."""
    if run.model_is_offered:
        return launched_with(run.run_dir)
    return {
        "network": run.model.path or run.model.network,
        "dataset": run.data.dataset,
        "partition": run.data.partition,
        "task": run.model.task,
    }


class Recorder:
    """Writes the evaluations, statuses and summary of a run into the run directory."""

    def __init__(
        self, run: Run, scorer: ModelScorer | None, publisher: Publisher | None = None
    ) -> None:
        """Open the files of the run's records; append to the files that an earlier Supervisor
        wrote.

        Args:
            run: Settings of the training run.
            scorer: Object that evaluates the model in this process; None if `evaluate` is not used.
            publisher: Object that copies the records to --report_dir; None without that flag.

        Raises:
            ConfigurationError: The records or the Advisor's file have another version's format, or
                the function of --on_metrics cannot be loaded.
        """
        self._run, self._scorer, self._publisher = run, scorer, publisher
        self._advice = predictions.of_run(run)
        if run.overwrite:
            clear_records(run.run_dir)
        self._hook = None if run.on_metrics is None else _hook_of(run, run.on_metrics)
        self._log = MetricsLog(run.run_dir, resume=not run.overwrite)
        self.evaluations = self._log.evaluations
        self._rounds = RoundsLog(run.run_dir)
        self._warned = False

    @property
    def latest(self) -> Evaluation | None:
        """The run's newest evaluation; None before the first evaluation."""
        return latest(self.evaluations)

    def status(self, status: run_status.RunStatus) -> None:
        """Write a status of the run to metrics.jsonl, TensorBoard and the user's function."""
        self._log.add_status(status)
        self._publish({"kind": STATUS_KIND, **status.to_dict()})

    def rounds(self, worker: int, batch: str) -> None:
        """Write a batch of a worker's measured rounds to the records."""
        self._rounds.add(worker, batch)

    def evaluate(
        self,
        status: run_status.RunStatus,
        weights: Float32,
        versions: Sequence[int],
        final: bool,
        statistics: Float32 | None = None,
    ) -> Evaluation:
        """Evaluate the model with given weights on the whole test set; record metrics, save the
        best model.

        Args:
            status: Current status of the training run.
            weights: Weights of the central model, [num_parameters] float32.
            versions: Version (number of updates) of each shard that the weights came from.
            final: True if the run has ended, so that this is the last evaluation of the model.
            statistics: Moving statistics of the model, [m] float32; None to keep the present
                statistics.
        """
        if self._scorer is None:
            raise RuntimeError("the run of this Supervisor has no model that it could evaluate")
        metrics = self._scorer.score(weights, statistics)
        target = self._run.target
        is_scored = target is not None and find_name(metrics, target.metric)
        goal = target if target is not None and is_scored else self._scorer.goal
        before = self._best(goal)
        evaluation = self.record(status, metrics, versions, final)
        if self._best(goal) != before:
            self._scorer.save(self._run.run_dir / _BEST)
            self._copy(_BEST)
        return evaluation

    def record(
        self,
        status: run_status.RunStatus,
        metrics: Mapping[str, float],
        versions: Sequence[int],
        final: bool = False,
    ) -> Evaluation:
        """Record metrics of the central model and return the evaluation.

        Args:
            status: Current status of the training run.
            metrics: Metric name -> value of the metric; at least one metric.
            versions: Version (number of updates) of each shard's weights in the evaluated model.
            final: True if the run has ended, so that this is the last evaluation of the model.
        """
        evaluation = Evaluation(
            version=versions[0],
            samples=status.samples,
            seconds=status.seconds,
            metrics={
                name: float(value) if abs(value) <= LARGEST_NUMBER else None
                for name, value in metrics.items()
            },
            bytes_up=status.bytes_up,
            bytes_down=status.bytes_down,
            versions=list(versions),
            final=final,
        )
        self._log.add_evaluation(evaluation)
        self._publish({"kind": EVALUATION_KIND, "run_id": status.run_id, **evaluation.to_dict()})
        logging.info(
            "evaluated model version %d on the test set: %s%s",
            evaluation.version,
            ", ".join(f"{name} {format_metric(v)}" for name, v in evaluation.metrics.items()),
            " (final)" if final else "",
        )
        self._copy(METRICS_FILE)
        # Several evaluations of one model version may arrive, each with different metrics. The
        # run's target is checked from the second version on, when all metrics of the first version
        # are recorded.
        if self.evaluations[0].version != evaluation.version:
            self._check_target()
        return evaluation

    def has_reached_target(self) -> bool:
        """Return whether the newest evaluation has reached the run's target metric value; log if
        so.
        """
        target, newest = self._run.target, self.latest
        if target is None or newest is None or not target.is_reached(newest.metrics):
            return False
        value = format_metric(find(newest.metrics, target.metric))
        logging.info("test metric %s is %s: the target %s is reached", target.metric, value, target)
        return True

    def _check_target(self) -> None:
        """Warn once if the run's evaluations do not contain the metric of the run's target."""
        target, names = self._run.target, names_in(self.evaluations)
        if target is None or not names or self._warned or find_name(names, target.metric):
            return
        self._warned = True
        logging.warning(
            "--target=%s: the evaluations have no %s, so the target does not end the run; the "
            "evaluations have %s. Name one of these, or compile the model with that metric.",
            *(target, target.metric, ", ".join(names)),
        )

    def _best(self, goal: Target) -> float | None:
        """Return the best value so far of the run's target metric; None if it was never
        evaluated.
        """
        values = (find(evaluation.metrics, goal.metric) for evaluation in self.evaluations)
        return goal.best((value for value in values if value is not None), default=None)

    def finish(self, status: run_status.RunStatus) -> None:
        """Write the file summary.json and the report of the run.

        Raises:
            ConfigurationError: The records of the run could not be copied to --report_dir.
        """
        self._check_target()
        self.status(status)
        summary = run_status.summarise(status, self.evaluations, self._run.target)
        summary |= about(self._run) | {SETTINGS: deciding_settings(self._run)}
        if self._advice is not None:
            path, prediction = self._advice
            block = predictions.outcome(prediction, self._run, status, summary)
            summary["advice"] = {"file": str(path), **block}
            logging.info(
                "the run compared with the prediction in %s: %s", path, predictions.in_words(block)
            )
        write_json_atomically(self._run.run_dir / "summary.json", summary)
        self._publish({"kind": metrics_hook.END_KIND, "run_id": status.run_id, **summary})
        self.close()
        page = write_report(self._run.run_dir)
        if self._publisher is not None:
            report = [f"{page.parent.name}/{path.name}" for path in page.parent.iterdir()]
            self._copy(METRICS_FILE, _BEST, *sorted(report), SUMMARY_FILE)
            self._publisher.flush()

    def close(self) -> None:
        """Close the files of the records and stop the thread of --on_metrics."""
        self._log.close()
        self._rounds.close()
        if self._hook is not None:
            self._hook.close()

    def _copy(self, *names: str) -> None:
        """Copy files of the run directory to the storage that --report_dir names, if it is set."""
        if self._publisher is not None:
            self._publisher.put(names)

    def _publish(self, record: Mapping[str, Any]) -> None:
        """Pass a record to the user function of --on_metrics if the flag is set."""
        if self._hook is not None:
            self._hook.put(record)


def _hook_of(run: Run, text: str) -> metrics_hook.MetricsHook:
    """Return the hook for --on_metrics; raise ConfigurationError if the function is missing."""
    script = launched_with(run.run_dir).get("script", {}).get("path")
    folders = [pathlib.Path(script).parent] if script else []
    function = metrics_hook.load(text, folders)
    return metrics_hook.MetricsHook(f"--on_metrics={text}", function, {"run_dir": str(run.run_dir)})

"""The records of a run: evaluations, best model, summary, report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from absl import logging

from thinwire.ops.persistence.documents import write_json_atomically
from thinwire.ops.run.directory import clear_records, launched_with
from thinwire.ops.run.settings import Run
from thinwire.ops.telemetry import predictions, run_status
from thinwire.supervisor.dashboard import format_loss
from thinwire.supervisor.metrics_log import MetricsLog, RoundsLog
from thinwire.supervisor.report.writer import write_report

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.supervisor.scorer import ModelScorer


def about(run: Run) -> dict[str, Any]:
    """Return the settings that summary.json has besides a run's figures."""
    if run.model_is_offered:
        return launched_with(run.run_dir)
    return {
        "network": run.model.path or run.model.network,
        "dataset": run.data.dataset,
        "partition": run.data.partition,
    }


class Recorder:
    """Writes the records of one run directory."""

    def __init__(self, run: Run, scorer: ModelScorer | None) -> None:
        """Open the records, continuing those of an earlier process.

        Args:
            run: The run's settings.
            scorer: Evaluates the model; None: nobody does, and `evaluate` is never called.

        Raises:
            ConfigurationError: Records, or an Advisor's file, that are none of this version.
        """
        self._run, self._scorer = run, scorer
        self._advice = predictions.of_run(run)
        if run.overwrite:
            clear_records(run.run_dir)
        self._log = MetricsLog(run.run_dir, resume=not run.overwrite)
        self.evaluations = self._log.evaluations
        self._rounds = RoundsLog(run.run_dir)
        self._best = max((e.accuracy for e in self.evaluations), default=-1.0)

    @property
    def latest(self) -> run_status.Evaluation | None:
        """The newest evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def status(self, status: run_status.RunStatus) -> None:
        """Log a status document."""
        self._log.add_status(status)

    def rounds(self, worker: int, batch: str) -> None:
        """Log a batch of a worker's rounds."""
        self._rounds.add(worker, batch)

    def evaluate(
        self,
        status: run_status.RunStatus,
        weights: Float32,
        versions: list[int],
        final: bool,
        statistics: Float32 | None = None,
    ) -> run_status.Evaluation:
        """Evaluate on the whole test set and log the result.

        Args:
            status: Of the run at this moment.
            weights: [num_parameters] float32.
            versions: Of each shard.
            final: The run is over.
            statistics: [m] float32 moving statistics; None leaves the model's as they are.
        """
        if self._scorer is None:
            raise RuntimeError("this run has no model to evaluate")
        accuracy, raw_loss, top5_accuracy = self._scorer.score(weights, statistics)
        loss = raw_loss if math.isfinite(raw_loss) else None
        evaluation = run_status.Evaluation(
            version=versions[0],
            samples=status.samples,
            seconds=status.seconds,
            accuracy=accuracy,
            loss=loss,
            bytes_up=status.bytes_up,
            bytes_down=status.bytes_down,
            versions=versions,
            final=final,
            top5_accuracy=top5_accuracy,
        )
        self._log.add_evaluation(evaluation)
        if accuracy > self._best:
            self._best = accuracy
            self._scorer.save(self._run.run_dir / "best.keras")
        logging.info(
            "version %d: test accuracy %.4f%s, loss %s%s",
            evaluation.version,
            accuracy,
            "" if top5_accuracy is None else f", top-5 {top5_accuracy:.4f}",
            "not finite" if loss is None else format_loss(loss),
            " (final)" if final else "",
        )
        return evaluation

    def finish(self, status: run_status.RunStatus) -> None:
        """Write summary.json and the report."""
        self._log.add_status(status)
        summary = run_status.summarise(status, self.evaluations, self._run.target_accuracy)
        summary |= about(self._run)
        if self._advice is not None:
            path, found = self._advice
            block = predictions.outcome(found, self._run, status, summary)
            summary["advice"] = {"file": str(path), **block}
            logging.info("beside %s: %s", path, predictions.in_words(block))
        write_json_atomically(self._run.run_dir / "summary.json", summary)
        self.close()
        write_report(self._run.run_dir)

    def close(self) -> None:
        """Flush the logs."""
        self._log.close()
        self._rounds.close()

"""The Standalone role: trains in one process without a network, and writes records of the run.

A Standalone run is the reference to which accuracy and speed of distributed runs are compared.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import Any

import numpy as np
from absl import logging

from thinwire.data.loading import load_dataset, whole_shard
from thinwire.data.registry import Dataset
from thinwire.models.fitting import check_examples
from thinwire.models.flat_model import SharedModel
from thinwire.proto.metrics_server import open_port
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of, clear_node
from thinwire.runtime.run.finished import SETTINGS, finished_summary, resumed_settings
from thinwire.runtime.run.resuming import OtherRun, first_setting, refusal
from thinwire.runtime.run.settings import EXIT_DONE, EXIT_OF_STOP, Diverged, Run
from thinwire.runtime.run.signals import handle_signals
from thinwire.runtime.telemetry import run_status
from thinwire.supervisor import flags as supervisor_flags
from thinwire.supervisor.dashboard import Dashboard
from thinwire.supervisor.instruments import collect
from thinwire.supervisor.recorder import Recorder
from thinwire.supervisor.scorer import ModelScorer
from thinwire.worker import flags as worker_flags
from thinwire.worker.role import limit_threads
from thinwire.worker.standalone import LocalTrainer

_NAME = "standalone-0"
_STATUS_SECONDS = 1.0
_PLAIN_LINE_SECONDS = 10.0


def main(run: Run) -> int:
    """Train the model in this process until the run ends; return the exit code.

    Raises:
        ConfigurationError: The data set, the model and the batch size contradict each other.
        Diverged: The loss of a training step is not finite.
    """
    settings = worker_flags.read(run.nb_workers)
    limit_threads(settings.threads)
    if run.overwrite:
        clear_node(run.run_dir, _NAME)
    if not run.overwrite and (finished := finished_summary(run)):
        logging.info("this run is finished (%s); results in %s", finished, run.run_dir / "report")
        return EXIT_DONE
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed)
    check_examples(shared.model, dataset.train_images, dataset.train_labels)
    check_examples(shared.model, dataset.test_images, dataset.test_labels, "test")
    evaluated = dataclasses.replace(run, batch_size=max(run.batch_size, 500))
    scorer = ModelScorer(evaluated, shared, dataset.test_images, dataset.test_labels)
    recorder = Recorder(evaluated, scorer)
    trainer = LocalTrainer(shared, run.method, settings.clip_norm, settings.weight_decay)
    return _Standalone(run, trainer, dataset, recorder).train()


class _Standalone:
    """One run of the Standalone role, which trains in one process without a network."""

    def __init__(
        self, run: Run, trainer: LocalTrainer, dataset: Dataset, recorder: Recorder
    ) -> None:
        self.run, self.trainer, self.recorder = run, trainer, recorder
        self.shard = whole_shard(run, dataset)
        self.own = supervisor_flags.read()
        self.budget = run.budget(len(self.shard.labels))
        directory = checkpoints_of(run.run_dir, _NAME)
        self.checkpoints = Checkpoints.in_folder(directory, run.keep_checkpoints)
        self.num_parameters = len(trainer.flat())
        self.version = 0
        self.seconds = 0.0  # training time in seconds, without evaluations and compilation
        self.loss: float | None = None
        self.interrupted = False
        self.dashboard = Dashboard()

    def train(self) -> int:
        """Train until the run's limit of updates, epochs or seconds; return the exit code."""
        port = open_port(
            self.run, _NAME, lambda: collect(self._status(None), self.recorder.evaluations)
        )
        with handle_signals(self._interrupt):
            self._resume()
            self._compile()
            with self.dashboard:
                reason = self._loop()
        self._save()
        self._evaluate(final=reason != "interrupted")
        self.recorder.finish(self._status(reason))
        logging.info("report: %s", self.run.run_dir / "report" / "index.html")
        if port is not None:
            port.close()
        return EXIT_OF_STOP.get(reason, EXIT_DONE)

    def _loop(self) -> str:
        next_save = next_status = time.monotonic()
        evaluated, evaluated_at = -1, float("-inf")
        while True:
            reason = self._stop_reason()
            if reason is not None:
                return reason
            start = time.monotonic()
            if start - evaluated_at >= self.own.eval_interval_seconds or self._due(evaluated):
                evaluated, evaluated_at = self.version, start
                if self._evaluate(final=False) and self.run.target is not None:
                    return self.run.target.stop_reason
            if start >= next_save:
                self._save()
                next_save = start + self.run.checkpoint_interval_seconds
            if start >= next_status:
                pause = _STATUS_SECONDS if self.dashboard.live else _PLAIN_LINE_SECONDS
                self.dashboard.update(self._status(None), self.recorder.latest)
                next_status = start + pause
            self._step()

    def _step(self) -> None:
        start = time.monotonic()
        rate = self.run.schedule.rate(
            self.budget.fraction(self.version, self.version * self.run.batch_size)
        )
        self.loss = self.trainer.train(*self.shard.next(), rate)
        if not np.isfinite(self.loss):
            raise Diverged(
                f"the loss is {self.loss} at step {self.version + 1}: the model has diverged. "
                f"Lower --learning_rate (now {rate:g})."
            )
        self.version += 1
        self.seconds += time.monotonic() - start

    def _due(self, evaluated: int) -> bool:
        interval = self.own.eval_interval_updates
        return interval > 0 and self.version - max(0, evaluated) >= interval

    def _stop_reason(self) -> str | None:
        if self.interrupted:
            return "interrupted"
        if self.run.max_seconds and self.seconds >= self.run.max_seconds:
            return "max_seconds"
        return self.budget.end(self.version, self.version * self.run.batch_size)

    def _evaluate(self, final: bool) -> bool:
        """Evaluate the model; return whether the metric has reached the target of --target."""
        weights = self.trainer.flat()
        self.recorder.evaluate(self._status(None), weights, [self.version], final)
        return self.recorder.has_reached_target()

    def _status(self, reason: str | None) -> run_status.RunStatus:
        run = self.run
        samples = self.version * run.batch_size
        worker = run_status.WorkerMetrics(
            id=1,
            state="done" if reason else "training",
            clock=self.version,
            pushes=self.version,
            samples=samples,
            local_steps=self.version,
            compute_seconds=self.seconds,
            loss=self.loss,
            steps_per_second=self.version / self.seconds if self.seconds else 0.0,
            labels=self.shard.label_counts,
        )
        return run_status.RunStatus(
            run_id="standalone",
            method="standalone",
            seams={"server_optimizer": run.method.choices["server_optimizer"]},
            nb_workers=1,
            nb_ps=0,
            num_parameters=self.num_parameters,
            seed=run.seed,
            iter_max=run.iter_max or 0,
            version=self.version,
            samples=samples,
            seconds=self.seconds,
            learning_rate=run.schedule.rate(self.budget.fraction(self.version, samples)),
            workers=[worker],
            stop_reason=reason,
        )

    def _compile(self) -> None:
        """Compile the training step on the first batch, then restore the trainer's state.

        Compilation before the first counted training step keeps the compilation time out of the
        measured `seconds`.
        """
        state = self.trainer.save()
        batch = slice(0, self.run.batch_size)
        self.trainer.train(self.shard.images[batch], self.shard.labels[batch], 0.0)
        self.trainer.restore(state)

    def _save(self) -> None:
        state = {
            SETTINGS: resumed_settings(self.run),
            "trainer": self.trainer.save(),
            "cursor": self.shard.cursor.state(),
            "version": self.version,
            "seconds": self.seconds,
        }
        self.checkpoints.save(self.version, state)

    def _resume(self) -> None:
        checkpoint = self.checkpoints.load_latest()
        if checkpoint is None:
            logging.info("run %s: begins", self.run.run_dir)
            return
        state = checkpoint[1]
        change = first_setting(state.get(SETTINGS, {}), resumed_settings(self.run))
        if change is not None and not self.run.resume:
            place = f"--run_dir={self.run.run_dir}"
            raise OtherRun(refusal(place, change, state["version"]))
        self.shard.cursor.restore(state["cursor"])
        self.trainer.restore(state["trainer"])
        self.version, self.seconds = state["version"], state["seconds"]
        logging.info("run %s: resumes from update %d", self.run.run_dir, self.version)

    def _interrupt(self, number: int, frame: Any) -> None:
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupted = True

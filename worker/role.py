"""The worker process, which loads data and exchanges gradients with the PS until the run ends."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from thinwire.data.loading import TrainingShard, load_shard
from thinwire.models.fitting import check_examples
from thinwire.models.flat_model import SharedModel, has_gpu
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.types import ConfigurationError, State
from thinwire.proto.grpc import Unreachable
from thinwire.proto.metrics_server import open_port
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of, clear_node, scalars_of
from thinwire.runtime.run.finished import SETTINGS, resumed_settings
from thinwire.runtime.run.resuming import OtherRun, first_setting, refusal
from thinwire.runtime.run.settings import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_OF_STOP,
    Diverged,
    Run,
    is_finished,
    limit_of,
)
from thinwire.runtime.run.signals import handle_signals
from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker import flags as worker_flags
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.core.worker_round import Action, MiniBatch, Restore, RoundAction, SendPush
from thinwire.worker.flags import WorkerFlags
from thinwire.worker.gradients import clip, decay
from thinwire.worker.personal import PersonalLayers
from thinwire.worker.telemetry import instruments
from thinwire.worker.telemetry.tensorboard import WorkerScalars
from thinwire.worker.train_step import TrainStep
from thinwire.worker.trainer import WorkerSession

_CALIBRATION_STEPS = 5  # number of steps that are measured before training, for the flag --slowdown
_PROBE_SECONDS = 2.0  # longest time to reach the PS of a finished run, in seconds


def main(run: Run) -> int:
    """Train as a worker until the run ends; return the process's exit code.

    Raises:
        ConfigurationError, Unreachable, RequestRejected, Diverged: Training failed. The process
            exits with a different code for each type of error.
    """
    settings = worker_flags.read(run.nb_workers)
    limit_threads(settings.threads)
    if run.overwrite:
        clear_node(run.run_dir, _name(settings.id_worker))
    worker = Worker(run, settings)
    with handle_signals(worker.interrupt):
        return worker.train()


def limit_threads(threads: int, together: int = 1) -> None:
    """Limit the number of TensorFlow's threads.

    Args:
        threads: Number of TensorFlow threads for each concurrent call; 0 lets TensorFlow choose.
        together: Number of TensorFlow calls that run concurrently in this process.
    """
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads * together)


def _name(id_worker: int) -> str:
    return f"worker-{id_worker}"


class Worker:
    """One worker process, with its data, model and checkpoints.

    Args:
        run: Settings of the training run.
        own: Settings that only this worker reads from its flags.
        shared: Keras model to train; None: build the model that the run's settings name.
        shard: Training examples of this worker; None: load the data set that the run's settings
            name.
    """

    def __init__(
        self,
        run: Run,
        own: WorkerFlags,
        shared: SharedModel | None = None,
        shard: TrainingShard | None = None,
    ) -> None:
        refuse_script_steps(run.method, "a worker of main.py")
        self.run, self.own = run, own
        shared = shared or SharedModel(run.model, run.seed)
        self.step = TrainStep(shared)
        self.step.vary_local_randomness(own.id_worker)
        self.personal = PersonalLayers(self.step.personal, run.method.local)
        self.statistics = FlatVariables(shared.statistics if run.method.bn_sync else [])
        self.shard = shard or load_shard(run, shared.user_module, own.id_worker)
        if self.shard.num_examples:
            check_examples(shared.model, self.shard.images, self.shard.labels)
        self.session = WorkerSession(
            run,
            own,
            shared.spec,
            self.statistics.read(),
            has_gpu(run),
            self.shard.label_counts,
            self.shard.num_train,
            part=(self.shard.num_examples, run.batch_size),
            # a TensorFlow model takes no array of another framework
            keeps_on_device=run.kernels not in ("jax", "torch"),
        )
        self.session.on_report = self._note_scalars
        self.gradient = np.zeros(shared.spec.num_parameters, np.float32)
        self._spare_gradient = np.zeros_like(self.gradient) if run.method.overlap else self.gradient
        self._rate = 0.0  # learning rate of the newest mini-batch
        name = _name(own.id_worker)
        self.checkpoints = Checkpoints.in_folder(checkpoints_of(run.run_dir, name), keep=2)
        self.scalars = WorkerScalars(scalars_of(run.run_dir, name))
        self.pause_seconds = 0.0

    def train(self) -> int:
        """Join the run, train until the run ends and leave; return the exit code."""
        port = open_port(
            self.run, _name(self.own.id_worker), lambda: instruments.collect(self.session)
        )
        try:
            return self._train()
        except Unreachable:
            if not self.session.closing.is_set():
                raise
            return EXIT_INTERRUPTED
        finally:
            if port is not None:
                port.close()

    def _train(self) -> int:
        if finished := self.finished_reason():
            logging.info("this run is finished (%s), so this worker ends", finished)
            return EXIT_DONE
        self._warm_up()
        self.resume(self.session.join())
        cause = "error"
        try:
            cause = self._loop()
        except Diverged:
            cause = "diverged"
            raise
        finally:
            self.session.leave(cause)
        if cause == "interrupted":
            return EXIT_INTERRUPTED
        reason = self.session.stop_reason
        logging.info("this worker is done after %d exchanges (%s)", self.session.core.step, reason)
        return EXIT_OF_STOP.get(reason, EXIT_DONE)

    # -- the loop ---------------------------------------------------------------------------

    def _loop(self) -> str:
        session, steps = self.session, self.session.steps
        self._take_over(session.begin())
        saved_at, action = time.monotonic(), steps.begin()
        try:
            while action is not RoundAction.END:
                if action is RoundAction.POLL and session.stopped:
                    break  # not earlier: the checkpoint has no computed gradient that is not sent
                if action is RoundAction.COMPUTE:
                    action = self._one_step()
                    continue
                is_due = time.monotonic() - saved_at >= self.run.checkpoint_interval_seconds
                if action is RoundAction.POLL and is_due:
                    self._settle()
                    self.save()
                    saved_at = time.monotonic()
                    action = steps.begin()
                action = self._carry_out(action)
            if steps.diverged is not None:
                raise steps.diverged
            self._settle()
        except ShardGone:
            pass
        self.save()
        return "done" if session.core.stopped or not session.closing.is_set() else "interrupted"

    def _one_step(self) -> Action:
        """Compute one mini-batch's gradient; return the next action."""
        session, started = self.session, time.monotonic()
        computed_at = list(session.core.versions)
        images, labels = self.shard.next()
        session.measure.record(round_trace.GET_BATCH, session.stopwatch.lap("compute"))
        gradient, loss = self._gradient(images, labels)
        decay(gradient, session.core.weights, self.own.weight_decay)
        clip(gradient, self.own.clip_norm)
        self.personal.check()
        self._rate = session.core.step_rate()
        remaining = started + self.own.device.step_seconds - time.monotonic()
        if (pause := max(self.pause_seconds, remaining)) > 0:
            session.closing.wait(pause)
        statistics = self.statistics.read()
        batch = MiniBatch(gradient, len(labels), loss, statistics, computed_at)
        return session.computed(batch, started)

    def _gradient(self, images: Any, labels: Any) -> tuple[Any, float]:
        """Return gradient and loss; the gradient stays on the device if the codec runs there."""
        core = self.session.core
        if core.on_device and core.kernels.name == "tf":
            return self.step.gradients_on_device(images, labels, self.personal.gradient)
        personal = self.personal.gradient
        return self.gradient, self.step.gradients(images, labels, self.gradient, personal)

    def _carry_out(self, action: Action) -> Action:
        self._load(action)
        return self.session.carry_out(action, self.shard.cursor.epoch)

    def _load(self, action: Action) -> None:
        """Give the model the values with which the next mini-batch begins."""
        if action is RoundAction.LOAD_ROUND:
            self._take_over(self.session.core.weights)
        elif action is RoundAction.LOAD_STEP:
            self.personal.step(self._rate)
            self.step.set_weights(self.session.core.weights)
        elif isinstance(action, Restore):
            # The rejected mini-batch has changed the moving statistics, so restore their values
            # from before the mini-batch.
            self.statistics.assign(self.session.core.statistics)
        elif isinstance(action, SendPush) and action.ends_step:
            self.personal.step(self._rate)
            # With --overlap, the unanswered push may be a view of the buffer `gradient`, and after
            # a lost stream the client sends the push again. The next mini-batch must therefore
            # write to the buffer `_spare_gradient`. Without --overlap, both are one buffer.
            self.gradient, self._spare_gradient = self._spare_gradient, self.gradient

    def _settle(self) -> None:
        """Wait for the replies to the push under way, if there is one."""
        action = self.session.steps.settle()
        while action in (RoundAction.WAIT, RoundAction.LOAD_ROUND):
            action = self._carry_out(action)

    def _take_over(self, weights: Any) -> None:
        self.step.set_weights(weights)
        self.personal.begin_round()
        self.statistics.assign(self.session.core.statistics)

    def _warm_up(self) -> None:
        """Compile the training step and measure its duration; then restore the local variables."""
        if not self.shard.num_examples:
            return
        local = self.step.save_local()
        images = self.shard.images[: self.run.batch_size]
        labels = self.shard.labels[: self.run.batch_size]
        self._gradient(images, labels)
        seconds = []
        for _ in range(_CALIBRATION_STEPS):
            start = time.perf_counter()
            self._gradient(images, labels)
            seconds.append(time.perf_counter() - start)
        median = float(np.median(seconds))
        device = self.own.device
        if device.slowdown > 1:
            self.pause_seconds = (device.slowdown - 1) * median
            logging.info(
                "--slowdown=%g: this worker pauses %.1f ms after each step",
                device.slowdown,
                1e3 * self.pause_seconds,
            )
        self.session.step_seconds = max(median + self.pause_seconds, device.step_seconds)
        self.step.restore_local(local)

    def _note_scalars(self, counted: WorkerMetrics) -> None:
        """Write the worker's metrics for shard 0 to TensorBoard, too (heartbeat thread)."""
        session = self.session
        steps, version = session.steps, session.core.versions[0]
        self.scalars.record(counted, steps.loss, steps.num_steps, version)

    # -- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write this worker's checkpoint; log a disk error and continue training."""
        session = self.session
        state = {
            "run_id": session.run_id,
            "core": session.core.save(),
            "exchange": session.exchange.save(),
            "cursor": self.shard.cursor.state(),
            "local": self.step.save_local(),
            "personal": self.personal.save(),
            "metrics": session.metrics().to_dict(),
            "stop_reason": session.stop_reason,
            "limit": limit_of(self.run, session.stop_reason),
            SETTINGS: resumed_settings(self.run),
            "nb_workers": self.run.nb_workers,
        }
        try:
            self.checkpoints.save(session.core.step, state)
        except OSError as error:
            logging.error("cannot write this worker's checkpoint: %s", error)

    def finished_reason(self) -> str | None:
        """Return the reason why a finished run ended, from this worker's checkpoint.

        Returns:
            The run's stop reason; None if the checkpoint is of an unfinished run, or if the PS
            still runs.

        Raises:
            OtherRun: The checkpoint belongs to a run with other settings.
        """
        checkpoint = self.checkpoints.load_latest()
        if checkpoint is None or not is_finished(
            self.run, checkpoint[1]["stop_reason"], checkpoint[1]["limit"]
        ):
            return None
        if self.session.exchange.shards[0].probe(_PROBE_SECONDS):
            return None
        if (change := _changed_setting(checkpoint[1], self.run)) is not None:
            raise OtherRun(refusal(f"--run_dir={self.run.run_dir}", change, None))
        return str(checkpoint[1]["stop_reason"])

    def resume(self, last_applied_step: int) -> None:
        """Restore this worker's state from its checkpoint, if the checkpoint belongs to this run.

        Args:
            last_applied_step: Number of this worker's last exchange that the shards applied.

        Raises:
            ConfigurationError: The checkpoint belongs to another division of the data among
                workers.
        """
        checkpoint, session = self.checkpoints.load_latest(), self.session
        if checkpoint is None:
            return
        state: State = checkpoint[1]
        if state["run_id"] != session.run_id:
            logging.info(
                "ignoring this worker's checkpoint of another training run (%s)", state["run_id"]
            )
            return
        session.before = WorkerMetrics.from_dict(state["metrics"])
        if state["nb_workers"] == self.run.nb_workers:
            try:
                self.shard.cursor.restore(state["cursor"])
            except ConfigurationError as error:
                raise ConfigurationError(f"--run_dir={self.run.run_dir}: {error}") from error
        else:
            logging.info(
                "the number of workers has changed: starting at this worker's first example"
            )
        if (change := _changed_setting(state, self.run)) is not None:
            logging.warning(
                "--resume: ignoring the worker's saved state, because a setting has changed: %s",
                change,
            )
            return
        self.step.restore_local(state["local"])
        self.personal.restore(state["personal"])
        session.exchange.restore(state["exchange"])
        if session.core.restore(state["core"], last_applied_step):
            logging.info("this worker resumed the run at step %d", last_applied_step)
        else:
            logging.warning(
                "worker's saved state is of step %d, the PS applied step %d: dropping codec state",
                state["core"]["step"],
                last_applied_step,
            )

    # -- signals ------------------------------------------------------------------------------

    def interrupt(self, number: int, frame: Any) -> None:
        """Make the worker stop after its present exchange, because of a termination signal."""
        logging.info("%s: stopping", signal.Signals(number).name)
        self.session.interrupt()


def _changed_setting(saved: State, run: Run) -> str | None:
    """Return the first run setting that differs from a checkpoint; None if none differs."""
    return first_setting(saved.get(SETTINGS) or {}, resumed_settings(run))

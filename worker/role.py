"""The Worker role: data, step, exchange, until the run ends."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from thinwire.data.loading import TrainingShard, load_shard
from thinwire.models.flat_model import FlatVariables, SharedModel, has_gpu
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.persistence.checkpoint import Checkpoints
from thinwire.ops.run.directory import checkpoints_of, clear_node, scalars_of
from thinwire.ops.run.settings import EXIT_DONE, EXIT_INTERRUPTED, EXIT_OF_STOP, Diverged, Run
from thinwire.ops.run.signals import heard_by
from thinwire.ops.telemetry import round_trace
from thinwire.ops.telemetry.run_status import WorkerMetrics
from thinwire.proto.grpc import Unreachable
from thinwire.proto.metrics_server import open_port
from thinwire.worker import checkpoint
from thinwire.worker import flags as worker_flags
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.core.messages import PushRequest, was_accepted
from thinwire.worker.flags import WorkerFlags
from thinwire.worker.telemetry import instruments
from thinwire.worker.telemetry.tensorboard import WorkerScalars
from thinwire.worker.train_step import TrainStep, clip, decay
from thinwire.worker.trainer import WorkerSession

_CALIBRATION_STEPS = 5


def main(run: Run) -> int:
    """Train until the run ends; return the exit code.

    Raises:
        ConfigurationError, Unreachable, Refused, Diverged: See their exit codes.
    """
    own = worker_flags.read(run.nb_workers)
    limit_threads(own.threads)
    if run.overwrite:
        clear_node(run.run_dir, _name(own.id_worker))
    worker = Worker(run, own)
    with heard_by(worker.interrupt):
        return worker.train()


def limit_threads(threads: int) -> None:
    """Give TensorFlow so many threads; 0 leaves the choice to it."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _name(id_worker: int) -> str:
    return f"worker-{id_worker}"


class Worker:
    """One worker process.

    Args:
        run: The run's settings.
        own: This worker's.
        shared: Its model; built as the run says if not given.
        shard: Its examples; picked as the run says if not given.
    """

    def __init__(
        self,
        run: Run,
        own: WorkerFlags,
        shared: SharedModel | None = None,
        shard: TrainingShard | None = None,
    ) -> None:
        self.run, self.own = run, own
        shared = shared or SharedModel(run.model, run.seed)
        self.step = TrainStep(shared)
        self.step.vary_local_randomness(own.id_worker)
        self.statistics = FlatVariables(shared.statistics if run.method.bn_sync else [])
        self.shard = shard or load_shard(run, shared.user_module, own.id_worker)
        self.part = WorkerSession(
            run,
            own,
            shared.spec,
            self.statistics.read(),
            has_gpu(run),
            self.shard.label_counts,
            self.shard.num_train,
        )
        self.part.on_report = self._note_scalars
        self.gradient = np.zeros(shared.spec.num_parameters, np.float32)
        self._spare_gradient = np.zeros_like(self.gradient) if run.method.overlap else self.gradient
        self._taken = True  # the last push that was answered before the one under way
        name = _name(own.id_worker)
        self.checkpoints = Checkpoints(checkpoints_of(run.run_dir, name), keep=2)
        self.scalars = WorkerScalars(scalars_of(run.run_dir, name))
        self.pause_seconds = 0.0

    def train(self) -> int:
        """Join, train, leave; return the exit code."""
        port = open_port(
            self.run, _name(self.own.id_worker), lambda: instruments.collect(self.part)
        )
        try:
            return self._train()
        except Unreachable:
            if not self.part.closing.is_set():
                raise
            return EXIT_INTERRUPTED
        finally:
            if port is not None:
                port.close()

    def _train(self) -> int:
        if finished := checkpoint.finished(self):
            logging.info("this run is finished (%s)", finished)
            return EXIT_DONE
        self._warm_up()
        checkpoint.resume(self, self.part.join())
        cause = "error"
        try:
            cause = self._loop()
        except Diverged:
            cause = "diverged"
            raise
        finally:
            self.part.leave(cause)
        return self._exit_code(cause)

    def _exit_code(self, cause: str) -> int:
        if cause == "interrupted":
            return EXIT_INTERRUPTED
        reason = self.part.stop_reason
        logging.info("done after %d exchanges (%s)", self.part.core.step, reason)
        return EXIT_OF_STOP.get(reason, EXIT_DONE)

    # -- the loop ---------------------------------------------------------------------------

    def _loop(self) -> str:
        part = self.part
        self._take_over(part.begin())
        saved_at = time.monotonic()
        try:
            while not part.stopped:
                self._one_round()
                if time.monotonic() - saved_at >= self.run.checkpoint_interval_seconds:
                    self._settle()
                    checkpoint.save(self)
                    saved_at = time.monotonic()
            self._settle()
        except ShardGone:
            pass
        checkpoint.save(self)
        return "done" if part.core.stopped or not part.closing.is_set() else "interrupted"

    def _one_round(self) -> None:
        """One mini-batch or none, and an exchange if the pacer wants one."""
        part = self.part
        try:
            outgoing = part.due() or self._one_step()
            applied = outgoing is None or self._exchange(outgoing)
        except NonFiniteUpdate as error:
            applied = False
            part.skip(error)
            self.statistics.assign(part.core.statistics)  # of before that mini-batch
        part.note_outcome(applied)

    def _one_step(self) -> PushRequest | None:
        """One mini-batch and what the pacer and the codec make of it."""
        part, started = self.part, time.monotonic()
        computed_at = list(part.core.versions)
        images, labels = self.shard.next()
        part.measure.record(round_trace.GET_BATCH, part.stopwatch.lap("compute"))
        gradient, loss = self._gradient(images, labels)
        decay(gradient, part.core.weights, self.own.weight_decay)
        clip(gradient, self.own.clip_norm)
        rest = started + self.own.device.step_seconds - time.monotonic()
        if (pause := max(self.pause_seconds, rest)) > 0:
            part.closing.wait(pause)
        statistics = self.statistics.read()
        if self.run.method.overlap and not self._go_on():
            return None
        outgoing = part.take_in(gradient, len(labels), loss, statistics, started, computed_at)
        if outgoing is None:
            self.step.set_weights(part.core.weights)
        return outgoing

    def _gradient(self, images: Any, labels: Any) -> tuple[Any, float]:
        """Return the gradient, on the device if it may stay there, and the loss."""
        if self.part.core.on_device:
            return self.step.gradients_on_device(images, labels)
        return self.gradient, self.step.gradients(images, labels, self.gradient)

    def _go_on(self) -> bool:
        """Hear the answer to the last push; return whether the run goes on."""
        self.part.measure.record(
            round_trace.FORWARD_AND_BACKWARD, self.part.stopwatch.lap("compute")
        )
        self._taken = self._settle()
        return not self.part.core.stopped

    def _exchange(self, outgoing: PushRequest) -> bool:
        """Push, wait, take over the model; return whether shard 0 took the push.

        With --overlap the next mini-batch comes before the answer.
        """
        self.part.send(outgoing)
        if not self.run.method.overlap:
            return self._settle()
        # What is under way may lie in this buffer, and may have to be sent again.
        self.gradient, self._spare_gradient = self._spare_gradient, self.gradient
        return self._taken

    def _settle(self) -> bool:
        """Hear the answer to a push that is under way; return whether shard 0 took it."""
        replies = self.part.settle(self._take_over, self.shard.cursor.epoch)
        return not replies or was_accepted(replies)

    def _take_over(self, weights: Any) -> None:
        self.step.set_weights(weights)
        self.statistics.assign(self.part.core.statistics)

    def _warm_up(self) -> None:
        """Compile the step and measure it alone. Leaves no trace in the state."""
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
                "slowdown %g: pausing %.1f ms a step", device.slowdown, 1e3 * self.pause_seconds
            )
        self.part.step_seconds = max(median + self.pause_seconds, device.step_seconds)
        self.step.restore_local(local)

    def _note_scalars(self, counted: WorkerMetrics) -> None:
        """Write what is reported (heartbeat thread)."""
        part = self.part
        self.scalars.record(counted, part.loss, part.num_steps, part.core.versions[0])

    def interrupt(self, number: int, frame: Any) -> None:
        """Hear a signal that ends this worker."""
        del frame
        logging.info("%s: stopping", signal.Signals(number).name)
        self.part.interrupt()

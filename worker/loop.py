"""The Worker role: data, step, exchange, until the run ends."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from data.chosen import load_shard
from models.shared import SharedModel, has_gpu
from models.statistics import FlatVariables
from ops import kernels, rounds, run_dir
from ops.checkpoint import Checkpoints
from ops.codecs import NonFiniteUpdate
from ops.metrics import WorkerMetrics
from ops.run import EXIT_DONE, EXIT_INTERRUPTED, EXIT_OF_STOP, Diverged, Run
from ops.signals import heard_by
from proto.channel_grpc import Unreachable
from worker import durable
from worker import flags as worker_flags
from worker.asking import Asker
from worker.collective_exchange import exchange_for
from worker.core import Outgoing, WorkerCore
from worker.exchange import Heartbeat, Stopwatch
from worker.flags import WorkerFlags
from worker.measure import REGISTRY, origin_of
from worker.scalars import WorkerScalars
from worker.shard_client import Halted
from worker.train_step import TrainStep, clip

#: Consecutive mini-batches with a non-finite gradient after which a worker gives up.
MAX_NON_FINITE = 100
_CALIBRATION_STEPS = 5


def main(run: Run) -> int:
    """Train until the run ends; return the exit code.

    Raises:
        ConfigurationError, Unreachable, Refused, Diverged: See their exit codes.
    """
    own = worker_flags.read(run.nb_workers)
    limit_threads(own.threads)
    if run.overwrite:
        run_dir.clear_node(run.run_dir, _name(own.id_worker))
    return Worker(run, own).train()


def limit_threads(threads: int) -> None:
    """Give TensorFlow so many threads; 0 leaves the choice to it."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _name(id_worker: int) -> str:
    return f"worker-{id_worker}"


class Worker:
    """One worker process."""

    def __init__(self, run: Run, own: WorkerFlags) -> None:
        self.run, self.own = run, own
        self.closing, self.on_gpu = threading.Event(), has_gpu(run)
        shared = SharedModel(run.model, run.seed)
        self.step = TrainStep(shared)
        self.step.vary_local_randomness(own.id_worker)
        self.statistics = FlatVariables(shared.statistics if run.method.bn_sync else [])
        self.shard = load_shard(run, shared.user_module, own.id_worker)
        layouts = run.method.placement.place(shared.spec, run.nb_ps)
        self.core = WorkerCore(
            shared.spec,
            layouts,
            run.method,
            kernels.load(run.kernels, on_gpu=self.on_gpu),
            [run.seed, own.id_worker],
            self.statistics.read(),
        )
        self.gradient = np.zeros(shared.spec.num_parameters, np.float32)
        self.exchange = exchange_for(run, own, self.core, self.closing)
        name = _name(own.id_worker)
        self.checkpoints = Checkpoints(run_dir.checkpoints_of(run.run_dir, name), keep=2)
        self.scalars = WorkerScalars(run_dir.scalars_of(run.run_dir, name))
        self.stopwatch = Stopwatch()
        self.measure = REGISTRY[own.measure](run.method.pacer, self.exchange)
        self.num_steps = 0
        self.loss: float | None = None  # of the newest mini-batch
        self.num_non_finite = 0
        self.started_at = time.monotonic()
        self.pause_seconds = 0.0
        self.step_seconds = 0.0  # of the newest local step
        self.step_ended_at = 0.0
        self.asker = Asker(run.method.pacer, self.exchange.shards[0])
        self.before = WorkerMetrics(id=own.id_worker)  # totals of earlier lives
        self.run_id = ""

    def train(self) -> int:
        """Join, train, leave."""
        with heard_by(self._interrupt):
            try:
                return self._train()
            except Unreachable:
                if not self.closing.is_set():
                    raise
                return EXIT_INTERRUPTED

    def _train(self) -> int:
        if finished := durable.finished(self):
            logging.info("this run is finished (%s)", finished)
            return EXIT_DONE
        self._warm_up()
        welcomes = self.exchange.join()
        self.run_id = welcomes[0].run_id
        durable.resume(self, max(welcome.last_applied_step for welcome in welcomes))
        heartbeat = Heartbeat(self.exchange, welcomes[0].lease_seconds, self._report, self._rounds)
        cause = "error"
        try:
            cause = self._loop()
        except Diverged:
            cause = "diverged"
            raise
        finally:
            heartbeat.stop()
            self.exchange.close(cause)
        return self._exit_code(cause)

    def _exit_code(self, cause: str) -> int:
        if cause == "interrupted":
            return EXIT_INTERRUPTED
        reason = self.stop_reason
        logging.info("done after %d exchanges (%s)", self.core.step, reason)
        return EXIT_OF_STOP.get(reason, EXIT_DONE)

    @property
    def stop_reason(self) -> str:
        """Why the run ended, as far as this worker has heard."""
        return self.core.stop_reason or self.exchange.shards[0].halt_cause

    # -- the loop ---------------------------------------------------------------------------

    def _loop(self) -> str:
        self.core.finish(self.exchange.pull())
        self.step.set_weights(self.core.resume_round())
        self.statistics.assign(self.core.statistics)
        self.asker.begin_round(self.core.step + 1, self.step_seconds)
        saved_at = self.started_at = time.monotonic()
        non_finite = 0
        self.measure.begin(durable.seconds_trained(self.before))
        self.stopwatch.start()
        while not self.core.stopped and not self.closing.is_set():
            try:
                outgoing = self._one_step()
                applied = outgoing is None or self._exchange(outgoing)
            except NonFiniteUpdate as error:
                applied = False
                self._note_non_finite(error)
            except Halted:
                break
            non_finite = 0 if applied else non_finite + 1
            if non_finite > MAX_NON_FINITE:
                raise Diverged(
                    f"{non_finite} mini-batches in a row had NaN or infinite gradients; the "
                    f"model has diverged. Lower --learning_rate (now {self.core.learning_rate:g})."
                )
            if time.monotonic() - saved_at >= self.run.checkpoint_interval_seconds:
                durable.save(self)
                saved_at = time.monotonic()
        durable.save(self)
        return "done" if self.core.stopped or not self.closing.is_set() else "interrupted"

    def _note_non_finite(self, error: NonFiniteUpdate) -> None:
        self.num_non_finite += 1
        self.statistics.assign(self.core.statistics)  # of before that mini-batch
        if self.num_non_finite == 1:
            logging.warning("skipping a mini-batch: %s (further ones are only counted)", error)

    def _one_step(self) -> Outgoing | None:
        """One mini-batch and what the pacer and the codec make of it; or the round's end."""
        core, measure, lap = self.core, self.measure, self.stopwatch.lap
        measure.begin_step()
        ready = self.asker.ready(
            core.step + 1, core.local_steps, self.step_seconds, self.step_ended_at
        )
        measure.note(rounds.CHECK_READY, lap("wait"))
        if ready:
            outgoing = core.end_round()
            measure.note(rounds.ENCODE, lap("encode"))
            return outgoing
        started = time.monotonic()
        images, labels = self.shard.next()
        measure.note(rounds.GET_BATCH, lap("compute"))
        loss = self.loss = self.step.gradients(images, labels, self.gradient)
        self.num_steps += 1
        clip(self.gradient, self.own.clip_norm)
        rest = started + self.own.device.step_seconds - time.monotonic()
        if (pause := max(self.pause_seconds, rest)) > 0:
            self.closing.wait(pause)
        measure.note(rounds.FORWARD_AND_BACKWARD, lap("compute"))
        outgoing = core.begin(self.gradient, len(labels), loss, self.statistics.read())
        if outgoing is None:
            self.step.set_weights(core.weights)
        self.step_ended_at = time.monotonic()
        self.step_seconds = self.step_ended_at - started
        measure.note(rounds.LOCAL_UPDATE if outgoing is None else rounds.ENCODE, lap("encode"))
        return outgoing

    def _exchange(self, outgoing: Outgoing) -> bool:
        """Push, wait, take over the model; return whether shard 0 took the push."""
        replies = self.exchange.push(outgoing)
        exchange = self.stopwatch.lap("wait")
        for number, reply in enumerate(replies):
            if reply is not None:
                self.core.receive(number, reply)
        if replies[0] is None:
            self.core.undelivered()
        self.step.set_weights(self.core.restart_from_base())
        self.statistics.assign(self.core.statistics)
        self.asker.begin_round(self.core.step + 1, self.step_seconds)
        self.measure.note_exchange(exchange + self.stopwatch.lap("compute"))
        self.measure.end_round(outgoing, replies, self.shard.cursor.epoch, exchange)
        return replies[0] is not None

    def _warm_up(self) -> None:
        """Compile the step and measure it alone. Leaves no trace in the state."""
        local = self.step.save_local()
        images = self.shard.images[: self.run.batch_size]
        labels = self.shard.labels[: self.run.batch_size]
        self.step.gradients(images, labels, self.gradient)
        seconds = []
        for _ in range(_CALIBRATION_STEPS):
            start = time.perf_counter()
            self.step.gradients(images, labels, self.gradient)
            seconds.append(time.perf_counter() - start)
        median = float(np.median(seconds))
        device = self.own.device
        if device.slowdown > 1:
            self.pause_seconds = (device.slowdown - 1) * median
            logging.info("slowdown %g: pausing %.1f ms a step", device.slowdown,
                         1e3 * self.pause_seconds)  # fmt: skip
        self.step_seconds = max(median + self.pause_seconds, device.step_seconds)
        self.step.restore_local(local)

    # -- what others hear ---------------------------------------------------------------------

    def metrics(self) -> WorkerMetrics:
        """Return what this worker counts itself, over all its lives."""
        seconds, before = self.stopwatch.seconds, self.before
        elapsed = max(1e-9, time.monotonic() - self.started_at)
        return WorkerMetrics(
            id=self.own.id_worker,
            clock=self.core.step,
            bytes_up=before.bytes_up + self.exchange.bytes_up,
            compute_seconds=before.compute_seconds + seconds["compute"],
            encode_seconds=before.encode_seconds + seconds["encode"],
            send_seconds=before.send_seconds + self.exchange.send_seconds,
            wait_seconds=before.wait_seconds
            + max(0.0, seconds["wait"] - self.exchange.send_seconds),
            non_finite=before.non_finite + self.num_non_finite,
            steps_per_second=self.num_steps / elapsed,
            labels=self.shard.label_counts,
        )

    def _report(self) -> str:
        counted = self.metrics()
        self.scalars.note(counted, self.loss, self.num_steps, self.core.versions[0])
        return counted.to_json()

    def _rounds(self) -> list[str]:
        """Return what shard 0 has not heard of the rounds (heartbeat thread)."""
        listener = self.exchange.shards[0].welcome
        origin = origin_of(self.own.id_worker, self.run.device, self.on_gpu, listener.incarnation)
        return self.measure.batches(origin, listener)

    def _interrupt(self, number: int, frame: Any) -> None:
        """Finish the current exchange; if it does not come to an end, cut the streams."""
        del frame
        logging.info("%s: stopping", signal.Signals(number).name)
        self.closing.set()
        timer = threading.Timer(5.0, lambda: [shard.close() for shard in self.exchange.shards])
        timer.daemon = True
        timer.start()

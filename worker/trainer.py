"""One worker's session in a run, without data or a model: join, exchange, report, leave.

The class `WorkerSession` takes flat gradients and returns flat weights. The worker role and the
sessions of user scripts (`thinwire.script.steps`) use a WorkerSession.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.builder import adopt
from thinwire.ops.types import ModelSpec
from thinwire.proto import thinwire_pb2 as pb
from thinwire.runtime.run.settings import DRAIN_SECONDS, Run
from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.client.exchange import Exchange, Heartbeat
from thinwire.worker.client.offering import Offering
from thinwire.worker.client.pacing_client import PacingClient
from thinwire.worker.collective.exchange import CollectiveExchange
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import PushRequest, ShardReply
from thinwire.worker.core.worker_round import (
    Action,
    MiniBatch,
    Restore,
    RoundAction,
    SendPush,
    WorkerRound,
)
from thinwire.worker.flags import WorkerFlags
from thinwire.worker.telemetry.round_trace import MEASURES, origin_of, seconds_trained

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Stopwatch:
    """Adds up a worker's time by activity: compute, encode, wait."""

    def __init__(self) -> None:
        """Start with zero seconds for every activity of the worker."""
        self.seconds: dict[str, float] = {"compute": 0.0, "encode": 0.0, "wait": 0.0}
        self._mark = time.perf_counter()

    def start(self) -> None:
        """Start a lap of the stopwatch; the time since the end of the last lap does not count."""
        self._mark = time.perf_counter()

    def lap(self, what: str) -> float:
        """End a lap of the stopwatch: add its seconds to the activity `what`, and return them."""
        now = time.perf_counter()
        seconds = now - self._mark
        self.seconds[what] += seconds
        self._mark = now
        return seconds


def exchange_for(
    run: Run,
    own: WorkerFlags,
    core: WorkerCore,
    closing: threading.Event,
    offering: Offering | None = None,
) -> Exchange:
    """Return the object that exchanges updates in the mode of --collective, before it connects.

    Args:
        run: Settings of the training run.
        own: Settings that only this worker reads from its flags.
        core: Training engine of this worker.
        closing: Event that is set when the worker must stop.
        offering: Model that the worker offers to shards without a model; None if the shards have a
            model.
    """
    exchange_type: type[Exchange] = (
        Exchange if run.method.collective == THROUGH_PS else CollectiveExchange
    )
    exchange: Exchange = exchange_type(
        run,
        own.id_worker,
        core.spec,
        core.layouts,
        own.device.link,
        closing,
        core.aux_size,
        offering,
    )
    if isinstance(exchange, CollectiveExchange):
        exchange.attach(own, core)
    return exchange


#: Time limit of an exchange after an interrupt, in seconds. An interrupted PS answers within
#: DRAIN_SECONDS, so this limit is slightly longer.
_CUT_SECONDS = DRAIN_SECONDS + 0.5


class WorkerSession:
    """A worker's session in a run: it takes flat gradients or weights, returns flat weights.

    A caller of WorkerSession must call `join` and `begin` first. It then carries out the actions of
    `steps`: the method `carry_out` carries out all actions but COMPUTE, whose result the caller
    passes to `computed`. The caller of WorkerSession must call `leave` last. One thread must make
    all calls to a WorkerSession except `interrupt`.

    Attributes:
        steps: State machine that returns the next action after each event.
        received: Newest replies of the shards to a push; empty before the first replies.

    Args:
        run: Settings of the training run.
        own: Settings that only this worker reads from its flags.
        spec: Paths, shapes and dtypes of the shared model's variables.
        statistics: [m] float32 moving statistics that shard 0 averages over the workers; may be
            empty.
        on_gpu: True if gradients are computed on a GPU.
        labels: Maps a label to the number of this worker's examples with the label, for reports.
        num_examples: Size of the whole training set, by which codecs count epochs; 0 if unknown.
        momentum: Momentum factor of the script's optimizer, which the codec applies if the training
            method `takes_momentum`.
        offering: Model that the worker offers to shards without a model; None if the shards have a
            model.
        part: Pair (number of this worker's examples, mini-batch size); None if unknown.
        keeps_on_device: True if weights may stay in the memory of the device that computes
            gradients.
    """

    def __init__(
        self,
        run: Run,
        own: WorkerFlags,
        spec: ModelSpec,
        statistics: Float32,
        on_gpu: bool = False,
        labels: Mapping[int, int] | None = None,
        num_examples: int = 0,
        momentum: float = 0.0,
        offering: Offering | None = None,
        part: tuple[int, int] | None = None,
        keeps_on_device: bool = False,
    ) -> None:
        self.run, self.own, self.on_gpu = run, own, on_gpu
        self.closing = threading.Event()
        placed = run.method if offering is None else adopt(run.method, offering.offer)
        method = run.method if part is None else run.method.of_part(*part)
        self.core = WorkerCore(
            spec,
            placed.place(spec, run.nb_ps),
            method.with_momentum(momentum),
            load_kernels(run.kernels, on_gpu=on_gpu),
            [run.seed, own.id_worker],
            statistics,
            num_examples,
            offering.offer.groups() if offering else (),
            run.rate_in_round(num_examples),
            keeps_on_device,
        )
        self.exchange = exchange_for(run, own, self.core, self.closing, offering)
        self.stopwatch = Stopwatch()  # times by activity of the training thread
        # times by activity of the thread that encodes and exchanges
        self.exchange_watch = self.stopwatch
        self.measure = MEASURES[own.measure](run.method.pacer, self.exchange)
        self.pacing = PacingClient(run.method.pacer, self.exchange.shards[0])
        # Totals of this worker's earlier incarnations (processes).
        self.before = WorkerMetrics(id=own.id_worker)
        self.labels = dict(labels or {})
        self.run_id = ""
        self.joined_at_step = 0
        self.step_seconds = 0.0  # duration of the newest local step, in seconds
        self.on_report: Callable[[WorkerMetrics], None] = lambda counted: None
        self.started_at = time.monotonic()
        self._step_began_at = self._step_ended_at = 0.0
        self.steps = WorkerRound(self.core, has_examples=part is None or part[0] > 0)
        self._newest: PushRequest | None = None  # newest push to the shards
        self.received: list[ShardReply | None] = []
        self._wait_seconds = 0.0  # duration of the newest wait for replies
        self._heartbeat: Heartbeat | None = None

    @property
    def stopped(self) -> bool:
        """True if the run has ended or this worker must stop."""
        return self.core.stopped or self.closing.is_set()

    @property
    def is_member(self) -> bool:
        """True from `begin` to `leave`."""
        return self._heartbeat is not None

    @property
    def stop_reason(self) -> str:
        """Reason why the run ended; empty while the run continues, as far as this worker knows."""
        return self.core.stop_reason or self.exchange.shards[0].halt_cause

    # -- joining and leaving ------------------------------------------------------------------

    def join(self) -> int:
        """Join the run at every shard of the parameter server.

        Returns:
            Number of this worker's last exchange that the shards applied.

        Raises:
            Unreachable, RequestRejected: A shard does not answer, or rejects this worker.
        """
        welcomes = self.exchange.join()
        self.run_id = welcomes[0].run_id
        self.core.step = max(welcome.last_applied_step for welcome in welcomes)
        self.joined_at_step = self.core.step
        return self.core.step

    def begin(self) -> Float32:
        """Start the heartbeat, which renews the leases, and fetch the model; return its weights."""
        lease_seconds = self.exchange.shards[0].welcome.lease_seconds
        self._heartbeat = Heartbeat(self.exchange, lease_seconds, self._report, self._rounds)
        self.core.finish(self.exchange.pull())
        weights = self.core.resume_round()
        self.pacing.begin_round(self.core.step + 1, self.step_seconds)
        self.started_at = time.monotonic()
        self.measure.begin(seconds_trained(self.before))
        self.stopwatch.start()
        return weights

    def leave(self, cause: str) -> None:
        """Send a last report to shard 0 and leave every connected shard, for the reason `cause`."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        self.exchange.close(cause)

    def interrupt(self) -> None:
        """Stop the worker after the present exchange; after a time limit, without its replies."""
        self.closing.set()
        timer = threading.Timer(_CUT_SECONDS, self._cut)
        timer.daemon = True
        timer.start()

    def _cut(self) -> None:
        # A Leave message removes this worker from the barrier immediately. Without the message, all
        # workers wait until this worker's lease ends.
        for shard in self.exchange.shards:
            shard.send(pb.ToServer(leave=pb.Leave(cause="interrupted")))
        for shard in self.exchange.shards:
            shard.close()

    # -- one mini-batch -----------------------------------------------------------------------

    def computed(self, batch: MiniBatch, started: float) -> Action:
        """Report a computed mini-batch; return the next action.

        Args:
            batch: Result of the mini-batch.
            started: Time at which the work on the mini-batch started, by time.monotonic(), in
                seconds.
        """
        self.measure.record(round_trace.FORWARD_AND_BACKWARD, self.exchange_watch.lap("compute"))
        self._step_began_at = started
        return self._measured(self.steps.computed(batch))

    def carry_out(self, action: Action, epoch: int = 0) -> Action:
        """Carry out an action other than COMPUTE and END; return the next action.

        Before LOAD_STEP, LOAD_ROUND and Restore, the caller itself loads the core's values.

        Args:
            action: Action of `steps`.
            epoch: Number of this worker's passes over its examples, for reports.

        Raises:
            Unreachable, RequestRejected: A shard stayed unreachable, or rejected this worker.
            ShardGone: The run has ended, and a shard has closed its stream to this worker.
            ConfigurationError: A shard rejected the push as malformed, or the shard's reply is
                malformed.
        """
        try:
            if action is RoundAction.POLL:
                return self._poll()
            if action is RoundAction.WAIT:
                return self._wait()
            if isinstance(action, SendPush):
                self._newest = action.request
                self.exchange.send(action.request)
                self.measure.record(round_trace.ENCODE, self.exchange_watch.lap("encode"))
            elif action is RoundAction.LOAD_ROUND:
                self._end_exchange(epoch)
            elif isinstance(action, Restore) and self.steps.num_non_finite == 1:
                logging.warning(
                    "skipping a mini-batch: %s (further ones are only counted)", action.error
                )
            following = self.steps.done()
            if following is None:
                raise RuntimeError("this worker computes nothing, and no action follows")
            return self._measured(following)
        except BaseException:
            self.steps.abandon()
            raise

    def _measured(self, action: Action) -> Action:
        """Measure the time in which the core has processed a mini-batch, before its action."""
        is_local = action is RoundAction.LOAD_STEP
        if is_local or (isinstance(action, SendPush) and action.ends_step):
            self._step_ended_at = time.monotonic()
            self.step_seconds = self._step_ended_at - self._step_began_at
            phase = round_trace.LOCAL_UPDATE if is_local else round_trace.ENCODE
            self.measure.record(phase, self.exchange_watch.lap("encode"))
        return action

    def _poll(self) -> Action:
        """Query the pacer whether it requires a push before another local step."""
        core, lap = self.core, self.exchange_watch.lap
        self.measure.begin_step()
        is_due = self.pacing.ready(
            core.step + 1, core.round.num_steps, self.step_seconds, self._step_ended_at
        )
        self.measure.record(round_trace.CHECK_READY, lap("wait"))
        action = self.steps.polled(is_due)
        if isinstance(action, SendPush):
            self.measure.record(round_trace.ENCODE, lap("encode"))
        return action

    def _wait(self) -> Action:
        """Wait for all shards' replies to the push under way."""
        self.received = self.exchange.replies()
        self._wait_seconds = self.exchange_watch.lap("wait")
        return self.steps.replied(self.received)

    def _end_exchange(self, epoch: int) -> None:
        """Start the next round, after the caller has loaded the weights from the replies."""
        request, seconds = self._newest, self._wait_seconds
        self.pacing.begin_round(self.core.step + 1, self.step_seconds)
        self.measure.record_exchange(seconds + self.exchange_watch.lap("compute"))
        if request is not None:
            self.measure.end_round(request, self.received, epoch, seconds)
            logging.debug(
                "step %d: version %d, all shards replied after %.3f s",
                request.head.step,
                self.core.versions[0],
                seconds,
            )

    # -- reports ------------------------------------------------------------------------------

    def metrics(self) -> WorkerMetrics:
        """Return this worker's metrics, with the totals of its earlier incarnations."""
        seconds, before = self.stopwatch.seconds, self.before
        datagrams = self.exchange.datagrams
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
            non_finite=before.non_finite + self.steps.num_non_finite,
            restarts=max(before.restarts, self.own.num_restarts),
            steps_per_second=self.steps.num_steps / elapsed,
            labels=self.labels,
            datagrams=datagrams.after(before.datagrams) if datagrams is not None else None,
        )

    def _report(self) -> str:
        counted = self.metrics()
        self.on_report(counted)
        return counted.to_json()

    def _rounds(self) -> list[str]:
        """Return JSON documents of measured rounds that shard 0 lacks (heartbeat thread)."""
        listener = self.exchange.shards[0].welcome
        origin = origin_of(self.own.id_worker, self.run.device, self.on_gpu, listener.incarnation)
        return self.measure.batches(origin, listener)

"""A simulated worker: the worker core (state machine), its device, kill and restart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from absl import logging

from thinwire.data.loading import TrainingShard
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.ops.types import State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.runtime.telemetry import round_trace, run_status
from thinwire.runtime.telemetry.round_trace import MeasuredBy
from thinwire.simulator.clock import Clock
from thinwire.simulator.exchange import SimulatedExchange
from thinwire.simulator.pacing import SimulatedPacingClient
from thinwire.simulator.round_ahead import ComputedBatch, RoundAhead
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import PushRequest, ShardReply
from thinwire.worker.core.worker_round import Action, MiniBatch, RoundAction, SendPush, WorkerRound
from thinwire.worker.telemetry.round_trace import RoundMeasure

if TYPE_CHECKING:
    from thinwire.simulator.messages import GradientSource


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """Objects (training examples, exchange and so on) from which a simulated worker is built."""

    number: int  # id of the worker, from 1
    # Function that returns a new worker core (state machine) at each start of the worker.
    make_core: Callable[[], WorkerCore]
    shard: TrainingShard  # the worker's training examples
    # Function that returns the duration of the next mini-batch, in virtual seconds.
    step_seconds: Callable[[], float]
    exchange: SimulatedExchange
    measure: RoundMeasure
    executor: Executor  # runs the computation of gradients


@dataclasses.dataclass
class TimeBreakdown:
    """Virtual seconds that a worker has spent on computing, sending and waiting."""

    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0


class SimulatedWorker:
    """A simulated worker that computes training steps and exchanges updates with PS shards."""

    def __init__(self, own: WorkerSetup, trainer: GradientSource, clock: Clock) -> None:
        """Create a simulated worker, which does nothing before the call of `start`."""
        self.number, self._own, self._trainer, self._clock = own.number, own, trainer, clock
        self._exchange, self._measure = own.exchange, own.measure
        self.core = own.make_core()
        self._round_ahead = self._begin_rounds()
        self._local: State = {}
        self._pacing = SimulatedPacingClient(self.core.method.pacer, self._exchange, clock)
        self._steps = self._new_steps()
        # Moving statistics averaged over the workers, from the last reply.
        self._means = self.core.statistics
        self._step_seconds = 0.0
        self._query_began = 0.0
        self._seconds = TimeBreakdown()

    @property
    def alive(self) -> bool:
        """True while the worker's process runs."""
        return self._exchange.incarnation > 0

    # -- start and end ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker's process with a new incarnation number (number of the process)."""
        # A restarted worker needs a new worker core.
        if self._exchange.newest_incarnation:
            self.core = self._own.make_core()
        self._pacing = SimulatedPacingClient(self.core.method.pacer, self._exchange, self._clock)
        self._local = self._trainer.local_of(self.number)
        # A real worker measures the time of a mini-batch before it connects. The random draw
        # replaces the measurement.
        self._step_seconds = self._own.step_seconds()
        self._steps = self._new_steps(self._steps)
        self._exchange.begin_life(self)
        self._round_ahead = self._begin_rounds()

    def _new_steps(self, before: WorkerRound | None = None) -> WorkerRound:
        """Return the order of a process's steps, with the counts of the processes before it."""
        steps = WorkerRound(self.core, has_examples=self._own.shard.num_examples > 0)
        if before is not None:
            steps.num_steps, steps.num_non_finite = before.num_steps, before.num_non_finite
        return steps

    def _begin_rounds(self) -> RoundAhead:
        lives = functools.partial(self._exchange.lives, self._exchange.incarnation)
        return RoundAhead(self._trainer, self._own.executor, self.core, lives)

    def die(self, is_seen: bool = True) -> None:
        """Kill the worker's process; its messages in flight are lost.

        Args:
            is_seen: True if the PS shards notice that the worker's gRPC streams break, as after a
                kill; False if they do not, as after a loss of power.
        """
        self._exchange.break_off(is_seen)

    def leave(self, cause: str) -> None:
        """Send a Leave message to every PS shard, and end the worker's process."""
        self._exchange.leave(cause)

    def on_refused(self) -> None:
        """End the worker's process, because a PS shard has rejected the worker permanently."""
        self._exchange.end_life()

    def on_unreachable(self) -> None:
        """Leave the run, because a PS shard was unreachable for the worker's whole time limit."""
        logging.error("simulated worker %d cannot reach a PS shard and leaves the run", self.number)
        self.leave("error")

    def freeze(self, seconds: float) -> None:
        """Stop the worker's process and heartbeats for some seconds; arriving messages wait."""
        self._exchange.asleep_until = self._clock.now + seconds

    @property
    def awake(self) -> bool:
        """True if the worker's process runs and is not stopped by `freeze`."""
        return self.alive and self._clock.now >= self._exchange.asleep_until

    @property
    def exchange(self) -> SimulatedExchange:
        """The worker's exchange, which sends requests to all PS shards."""
        return self._exchange

    def on_joined(self, last_step: int) -> None:
        """Pull the model, after every PS shard has sent a Welcome message."""
        self.core.step = last_step
        self._exchange.pull()

    # -- training ---------------------------------------------------------------------------

    def _carry_out(self, action: Action | None) -> None:
        """Carry out an action and all that follow at this moment of virtual time."""
        while action is not None and self.alive:
            if action is RoundAction.POLL:
                self._poll()
                return
            if action is RoundAction.COMPUTE:
                self._begin_step()
                return
            if action is RoundAction.WAIT or action is RoundAction.END:
                break
            if isinstance(action, SendPush):
                self._exchange.push(action.request)
            action = self._steps.done()
        if action is RoundAction.END and self._steps.diverged is not None:
            logging.warning(
                "simulated worker %d leaves the run: too many consecutive mini-batches gave no "
                "usable update",
                self.number,
            )
            self.leave("diverged")

    def _poll(self) -> None:
        self._measure.begin_step()
        self._query_began = self._clock.now
        core = self.core
        self._pacing.decide(core.step + 1, core.round.num_steps, self._step_seconds, self._decided)

    def _decided(self, ready: bool) -> None:
        seconds = self._clock.now - self._query_began
        self._seconds.wait += seconds
        self._measure.record(round_trace.CHECK_READY, seconds)
        self._carry_out(self._steps.polled(ready))

    def _begin_step(self) -> None:
        """Start a mini-batch, which ends after its duration in virtual time."""
        self._step_seconds = self._own.step_seconds()
        mini_batch, versions = self._compute(), list(self.core.versions)
        incarnation = self._exchange.incarnation
        done = functools.partial(self._finish_step, incarnation, mini_batch, versions)
        self._clock.at(self._clock.now + self._step_seconds, done)

    def _finish_step(
        self, incarnation: int, mini_batch: Future[ComputedBatch], versions: list[int]
    ) -> None:
        """Use a gradient at its mini-batch's virtual end; wait if the process is stopped.

        Args:
            incarnation: Number of the worker's process that began the mini-batch.
            mini_batch: The computation of the gradient.
            versions: Model version of each PS shard that the gradient uses, shard 0 first.
        """
        if incarnation != self._exchange.incarnation:
            return
        if not self.awake:
            again = functools.partial(self._finish_step, incarnation, mini_batch, versions)
            self._clock.at(self._exchange.asleep_until, again)
            return
        self._seconds.compute += self._step_seconds
        self._measure.record(round_trace.FORWARD_AND_BACKWARD, self._step_seconds)
        if not self.core.stopped:
            self._carry_out(self._take_in(mini_batch, versions))

    def _compute(self) -> Future[ComputedBatch]:
        """Start the computation of the next mini-batch's gradient at the current weights.

        If the worker dies before the end of the training step, the gradient is discarded.
        """
        core = self.core
        weights, statistics = core.weights, core.statistics
        # Copy the weights, because replies change them before the training step ends.
        if core.method.overlap:
            weights, statistics = aligned(len(weights)), self._means
            weights[:] = core.weights
        return self._round_ahead.begin(weights, statistics, self._own.shard, self._local)

    def _take_in(self, mini_batch: Future[ComputedBatch], versions: list[int]) -> Action:
        """Report the result of a mini-batch; return the next action."""
        done = self._round_ahead.take(mini_batch)
        self._own.shard.cursor.next()
        self._local = done.local
        if done.refused is not None:
            return self._steps.refused(done.refused)
        if (step := done.step) is None:
            return self._steps.computed_ahead()
        return self._steps.computed(
            MiniBatch(step.gradient, step.samples, step.loss, step.statistics, versions)
        )

    # -- replies ----------------------------------------------------------------------------

    def on_answer(self, answer: pb.Answer | None) -> None:
        """Pass the answer of ESync's state server (None: unreachable) to the pacer."""
        self._pacing.on_answer(answer)

    def on_replies(self, replies: list[ShardReply | None]) -> None:
        """Apply the PS shards' replies, and start the next mini-batch."""
        steps, request = self._steps, self._steps.under_way
        if request is None:
            self.core.settle(replies)
        else:
            steps.replied(replies)
        self._book(request, replies)
        self._pacing.begin_round(self.core.step + 1, self._step_seconds)
        if self.core.method.overlap:
            self._means = self.core.statistics.copy()
        self._carry_out(steps.begin() if request is None else steps.done())

    def _book(self, request: PushRequest | None, replies: list[ShardReply | None]) -> None:
        """Record for how many virtual seconds the worker sent and waited in an exchange."""
        exchange, now = self._exchange, self._clock.now
        began_at, sent_at = exchange.requested_at, exchange.sent_at
        self._seconds.send += sent_at - began_at
        self._seconds.wait += now - max(sent_at, began_at)
        # Without a pushed request, the replies answer a pull, and training begins.
        if request is None:
            self._measure.begin(self._seconds.compute + self._seconds.send + self._seconds.wait)
        else:
            seconds = now - began_at
            self._measure.record_exchange(seconds)
            self._measure.end_round(request, replies, self._own.shard.cursor.epoch, seconds)

    # -- metrics ----------------------------------------------------------------------------

    def report(self) -> str:
        """Return the worker's metrics as JSON, which a real worker sends to PS shard 0."""
        seconds, now = self._seconds, self._clock.now
        return run_status.WorkerMetrics(
            id=self.number,
            clock=self.core.step,
            bytes_up=self._exchange.bytes_up,
            compute_seconds=seconds.compute,
            send_seconds=seconds.send,
            wait_seconds=seconds.wait,
            non_finite=self._steps.num_non_finite,
            steps_per_second=self._steps.num_steps / now if now else 0.0,
            labels=self._own.shard.label_counts,
            datagrams=self._exchange.datagrams,
        ).to_json()

    def rounds(self) -> list[str]:
        """Return time records of this worker's training rounds since the last call of `rounds`."""
        origin = MeasuredBy(
            "simulated", "cpu", self.number - 1, f"{self._exchange.newest_incarnation:08x}"
        )
        return self._measure.batches(origin, None)

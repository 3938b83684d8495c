"""Takes a script's training steps as a worker: pushes gradients or weights, pulls new weights."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry import round_trace
from thinwire.worker.background import BackgroundCalls
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.core.messages import PushRequest, ShardReply, was_accepted
from thinwire.worker.core.worker_round import (
    Action,
    MiniBatch,
    Restore,
    RoundAction,
    RoundStage,
    SendPush,
)
from thinwire.worker.gradients import clip, decay
from thinwire.worker.trainer import Stopwatch, WorkerSession

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


#: Time for which a leaving worker waits for its unfinished exchange with the PS, in seconds.
_CUT_SECONDS = 2.0


class RunOver(Exception):
    """Raised if the run has ended, so that this worker cannot take a training step.

    Attributes:
        cause: Reason why the run ended if another worker's script ended it; else an empty text.
    """

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """Result of one training step, with its traffic and timings."""

    version: int  # number of updates in the model that this worker last received
    lr: float  # learning rate of the server in this step
    bytes_up: int = 0  # bytes that the worker sent in this step, with framing and heartbeats
    bytes_down: int = 0  # bytes that the worker received in this step, with framing and heartbeats
    nnz_up: int = 0  # number of values of the model that the worker sent in this step
    nnz_down: int = 0  # number of values of the model that the worker received in this step
    # staleness: updates that a shard applied between this worker's pull and its push
    staleness: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by phase
    # True if the worker exchanged with the PS; False after a local or skipped step
    exchanged: bool = False
    stopped: bool = False  # True if the run has ended with this step
    skipped: bool = False  # True if the step was skipped because its values had NaN or infinity


@dataclasses.dataclass
class EpochTraffic:
    """Sums of the bytes and the staleness of a worker's steps in an epoch.

    Attributes:
        bytes_up: Number of bytes that the worker sent to the shards, with framing.
        bytes_down: Number of bytes that the worker received from the shards, with framing.
        num_exchanges: Number of steps in the epoch that pushed an update.
        staleness: Sum of the staleness of all steps that pushed an update. The staleness of a step
            is the number of updates that were merged between the worker's pull and its push.
        largest_staleness: Largest staleness of one step, in updates: how many updates were merged
            between pull and push.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    num_exchanges: int = 0
    staleness: int = 0
    largest_staleness: int = 0

    def add(self, step: StepInfo) -> None:
        """Add the bytes and the staleness of one step to the sums of the epoch."""
        self.bytes_up += step.bytes_up
        self.bytes_down += step.bytes_down
        if step.exchanged:
            self.num_exchanges += 1
            self.staleness += step.staleness
            self.largest_staleness = max(self.largest_staleness, step.staleness)


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """Finished exchange with the PS: the worker's request, if known, and the shards' replies."""

    request: PushRequest | None = None
    replies: Sequence[ShardReply | None] = ()

    def counts(self, is_applied: bool) -> dict[str, Any]:
        """Return the fields of `StepInfo` that an exchange determines."""
        sent = self.request.shards if self.request is not None and is_applied else []
        answers = [reply for reply in self.replies if reply is not None]
        return {
            "nnz_up": sum(len(block.values.data) for blocks in sent for block in blocks),
            "nnz_down": sum(len(block.values.data) for reply in answers for block in reply.blocks),
            "staleness": answers[0].staleness if answers else 0,
            "exchanged": bool(answers),
        }


class ScriptWorker(WorkerSession):
    """A worker's session in a run, for one incarnation (process) of a script's worker.

    With overlap of computing and exchanging, a step starts before the shards have answered the
    previous one. If the script's own optimizer steps, a background thread then exchanges the
    change of the weights; else the state machine `steps` has a push under way.

    Attributes:
        unsent_change: [num_parameters] change that the script made to the weights outside of its
            optimizers, and that the next push carries; None without such a change.
        left_out: Maps an optimizer to the number of batch parts in skipped mini-batches, which the
            next push counts.
        background: Thread that exchanges the change of a script's own optimizer, with overlap.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._overlaps = self.run.method.overlap
        self._is_behind = self._overlaps and self.core.own is not None
        if self._is_behind:
            self.exchange_watch = Stopwatch()
        self.unsent_change: Float32 | None = None
        # the script's change that the push under way carries
        self._sent_change: Float32 | None = None
        self.left_out: dict[int, int] = {}
        self.background: BackgroundCalls[_Exchanged] = BackgroundCalls("exchange")
        # For each optimizer, the schedule's step count after the exchange that a background thread
        # runs.
        self._counts_ahead: tuple[int, ...] = ()
        # moment at which the last step or the last pause ended
        self._computes_from = time.monotonic()
        self._counted = self._counters()  # values of the traffic counters at the last StepInfo
        # for each shard, its version at the start of the current step
        self._versions: list[int] = []
        # [m] averaged statistics for the next step; None without overlap of computing and
        # exchanging. With overlap, a step starts before the shards have averaged the statistics of
        # the previous step.
        self._means: Float32 | None = None

    @property
    def weights(self) -> Float32:
        """Weights [num_parameters] float32 for the next gradient, with the script's own changes."""
        weights, change = self.sent_weights, self.unsent_change
        return weights if change is None else weights + change

    @property
    def sent_weights(self) -> Float32:
        """Weights [num_parameters] without changes by the script that are not pushed yet."""
        weights, change = self.core.weights, self._sent_change
        return weights if change is None else weights + change

    @property
    def means(self) -> Float32:
        """Averaged moving statistics at the start of the next step: [m] float32, not a copy."""
        return self.core.statistics if self._means is None else self._means

    def schedule_count(self, optimizer: int) -> int | None:
        """Return the step count at which an optimizer's rate schedule is evaluated; None: unknown.

        The step count is the count in shard 0's last reply, plus the batches that this worker has
        trained on since that reply; None if no reply of shard 0 has contained a step count.
        """
        core, push = self.core, self.steps.under_way
        if optimizer >= len(core.schedule_counts):
            return None
        # a push of weights counts for all optimizers of the script
        sent_for = 0 if self.run.method.steps_on_workers else optimizer
        parts = self.left_out.get(sent_for, 0)
        # The reply to the unfinished push will count that push. Until the reply arrives, the batch
        # parts of the push are added to the count of the last reply.
        if push is not None and push.head.optimizer == sent_for:
            parts += push.head.batch_parts
        if self.run.method.takes_local_steps:
            parts += core.round.batch_parts
        count = core.schedule_counts[optimizer] + _batches(self.run, parts)
        return max(count, self._counts_ahead[optimizer]) if self._counts_ahead else count

    def begin(self) -> Float32:
        """Start the heartbeat and fetch the model, at which the first step starts."""
        weights = super().begin()
        self._counted = self._counters()
        self._begin_at_base()
        return weights

    def _begin_at_base(self) -> None:
        """Start the next step with the model that the shards have sent."""
        self._versions = list(self.core.versions)
        if self._overlaps:
            self._means = self.core.statistics.copy()
        self.begin_compute()

    def begin_compute(self) -> None:
        """Restart the measurement of a step's computing time, for example after a pause."""
        self._computes_from = time.monotonic()

    def step(self, batch: MiniBatch, rate_factor: float = 1.0) -> StepInfo:
        """Send a mini-batch's result; then `weights` and `means` are the next mini-batch's values.

        A mini-batch with NaN or infinity is skipped, and `StepInfo.skipped` reports it. After a
        skipped mini-batch, `weights` and `means` are the last finite values, which the caller must
        write into its model.

        Args:
            batch: Result of the mini-batch, without the versions; `step` may modify its gradient.
            rate_factor: Factor for gradients (not weights): this worker's learning rate divided by
                the run's learning rate.

        Raises:
            RunOver: The run ended before this training step was sent to the servers.
            Diverged: A hundred successive mini-batches had NaN or infinity.
            Unreachable, Refused: The server does not answer within the time limits, or rejects this
                worker.
        """
        if self.stopped:
            raise RunOver(f"this run has ended ({self.stop_reason or 'interrupted'}).")
        values, figures = batch.values, batch.figures
        optimizer, change = figures.head.optimizer, figures.change
        parts = figures.head.batch_parts + self.left_out.pop(optimizer, 0)
        head = dataclasses.replace(figures.head, batch_parts=parts)
        if self.run.method.steps_on_workers:
            for own_change in (self._sent_change, change):
                values = values if own_change is None else values - own_change
        else:
            decay(values, self.core.weights, self.own.weight_decay)
            clip(values, self.own.clip_norm)
            if rate_factor != 1:
                values *= np.float32(rate_factor)
        batch = dataclasses.replace(
            batch,
            values=values,
            computed_at=self._versions if self._overlaps else None,
            figures=dataclasses.replace(figures, head=head),
        )
        # the shards' reply to the push under way replaces the weights, even if it rejects the push
        self._sent_change = None
        done, is_skipped, means = _Exchanged(), False, self._means
        try:
            done = self._exchange_behind(batch) if self._is_behind else self._exchange(batch)
        except NonFiniteUpdate:
            # the next push counts the batch parts of the skipped mini-batch
            self.left_out[optimizer] = parts
            self._means, is_skipped = means, True
        except ShardGone:
            self.core.stopped = True
        is_applied = not is_skipped and (not done.replies or was_accepted(done.replies))
        if self._overlaps and is_applied:  # the reply to this step's push comes in a later step
            self.unsent_change, self._sent_change = None, change
        else:
            has_step = any(reply is not None and reply.step for reply in done.replies)
            self.unsent_change = None if has_step and is_applied else change
        before, self._counted = self._counted, self._counters()
        up, down, seconds = self._counted
        self.begin_compute()
        return StepInfo(
            version=self.core.versions[0],
            lr=self.core.learning_rate,
            bytes_up=up - before[0],
            bytes_down=down - before[1],
            seconds={phase: spent - before[2][phase] for phase, spent in seconds.items()},
            stopped=self.stopped,
            skipped=is_skipped,
            **done.counts(is_applied),
        )

    def _exchange(self, batch: MiniBatch) -> _Exchanged:
        """Send a mini-batch's result; wait for replies: with overlap, to the previous push.

        Raises:
            NonFiniteUpdate: The result is not finite.
        """
        own, goes_ahead = self.core.own, self._overlaps and not self._is_behind
        self._begin_step()
        if goes_ahead and self.steps.under_way is None:
            self._go_on(batch.statistics)
        action = self.computed(batch, self._computes_from)
        if action is RoundAction.WAIT:  # for the replies to the previous push
            action = self.carry_out(action)
            if not self.stopped:
                self._go_on(batch.statistics)
        done = self._carry_on(action)
        if own is not None and not self._overlaps:
            own.catch_up()
        return done

    def _exchange_behind(self, batch: MiniBatch) -> _Exchanged:
        """Exchange a step's change of the weights in a background thread, to overlap computing.

        Returns:
            The finished exchange of the previous step.

        Raises:
            NonFiniteUpdate: The step's weights, loss or statistics are not finite.
        """
        core = self.core
        self.measure.record(round_trace.FORWARD_AND_BACKWARD, self.stopwatch.lap("compute"))
        done = self.background.result() or _Exchanged()
        self.stopwatch.lap("wait")
        if core.own is not None and not self.stopped:
            try:
                core.own.step(batch.values, batch.loss, batch.statistics)
            except NonFiniteUpdate as error:
                self._begin_step()
                self._carry_on(self.steps.refused(error))
            self._go_on(batch.statistics)
            ahead = _batches(self.run, batch.figures.head.batch_parts)
            self._counts_ahead = tuple(count + ahead for count in core.schedule_counts)
            self.exchange_watch.start()
            self.background.start(functools.partial(self._exchange, batch))
        self.stopwatch.lap("encode")
        return done

    def _begin_step(self) -> None:
        """Let the worker's state machine wait for a mini-batch."""
        if self.steps.stage is RoundStage.READY:
            self._carry_on(self.steps.begin())

    def _go_on(self, statistics: Float32 | None) -> None:
        """Start the next training step with the previous exchange's values, before a step's reply.

        With overlap of computing and exchanging, the moving statistics for the next step are the
        newest averages plus this step's change, and the weights are the newest weights plus this
        step's change.
        """
        self._versions = list(self.core.versions)
        if statistics is not None and self._means is not None:
            self._means = self.core.statistics + (statistics - self._means)

    def _carry_on(
        self, action: Action | None, until: RoundAction = RoundAction.COMPUTE
    ) -> _Exchanged:
        """Carry out an action and all that follow, until the action `until` or the run's end.

        Raises:
            NonFiniteUpdate: The core has rejected a mini-batch, or the changes of local steps.
            Diverged: Too many successive mini-batches had gradients with NaN or infinity, or
                gradients that were too large.
            Unreachable, RequestRejected, ShardGone, ConfigurationError: As for `carry_out`.
        """
        request: PushRequest | None = None
        replies: Sequence[ShardReply | None] = ()
        error: NonFiniteUpdate | None = None
        while action is not None and action not in (until, RoundAction.END):
            if isinstance(action, SendPush):
                request = action.request
            elif isinstance(action, Restore):
                error = action.error
            elif action is RoundAction.LOAD_ROUND:
                replies = self.received
            action = self.carry_out(action)
        if (failure := self.steps.diverged or error) is not None:
            raise failure
        return _Exchanged(request, replies)

    def flush(self) -> None:
        """Finish the exchange in the background, then push all unsent local steps and residuals."""
        steps = self.steps
        if not self.is_member or self.stopped:
            return
        try:
            self.exchange_watch.start()
            self._sent_change = None
            self.background.result()
            self._carry_on(steps.settle(), RoundAction.POLL)
            if self.core.round.num_steps and not self.stopped:
                self._carry_on(steps.end_round(), RoundAction.POLL)
                self._carry_on(steps.settle(), RoundAction.POLL)
            if not self.stopped:
                self._carry_on(steps.end_training(), RoundAction.POLL)
                self._carry_on(steps.settle(), RoundAction.POLL)
        except NonFiniteUpdate as error:
            logging.warning("the unsent changes of this worker are lost: %s", error)
        except ShardGone:
            self.core.stopped = True

    def pull(self) -> None:
        """Replace the weights by the shards' current weights, after a call of `flush`."""
        if not self.is_member or self.stopped:
            return
        try:
            self.core.finish(self.exchange.pull())
        except ShardGone:
            self.core.stopped = True
            return
        self.pacing.begin_round(self.core.step + 1, self.step_seconds)
        self._begin_at_base()

    def cut(self) -> None:
        """Wait `_CUT_SECONDS` for the exchange in the background thread, then abandon it."""
        try:
            self.background.result(_CUT_SECONDS)
        except TimeoutError:
            # from now on, a lost stream ends the exchange without a reconnect
            self.closing.set()
            self.background = BackgroundCalls("exchange")
        except Exception as error:  # noqa: BLE001 - this worker leaves the run anyway
            logging.info("the last exchange failed while this worker left the run: %s", error)

    def _counters(self) -> tuple[int, int, dict[str, float]]:
        return self.exchange.bytes_up, self.exchange.bytes_down, dict(self.stopwatch.seconds)


def _batches(run: Run, parts: int) -> int:
    """Return how many script batches all workers train on while one worker trains on `parts`.

    In a run of n workers, each batch of the script counts as n parts. In synchronous rounds all n
    workers take equally many parts, so that k parts of one worker mean k batches of all workers.
    """
    is_in_rounds = run.method.takes_local_steps or run.method.steps_together
    return parts if is_in_rounds else parts // run.nb_workers

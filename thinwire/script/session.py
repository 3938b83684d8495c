"""Connects a script as a worker: pushes gradients or weights as flat vectors, pulls weights."""

from __future__ import annotations

import abc
import atexit
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.codecs.base import Codec, NonFiniteUpdate
from thinwire.ops.codecs.error_feedback import wrappers_of
from thinwire.ops.codecs.wrappers import WarmUp
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.slots import SCALE_STREAK, OptimizerState, OwnSlots, whole_values
from thinwire.ops.sharding.split import part_of_layout
from thinwire.ops.types import ConfigurationError, ModelSpec, ShardLayout, State
from thinwire.runtime.run.settings import Diverged
from thinwire.runtime.telemetry import round_trace
from thinwire.script.data.data import part_of_data
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.data.place import WorkerPlace
from thinwire.script.settings import ScriptSettings
from thinwire.worker.background import BackgroundCalls
from thinwire.worker.client.offering import Offering
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.client.slots import fetch_slots
from thinwire.worker.core.local_model import ScriptOwned
from thinwire.worker.core.messages import (
    NO_FIGURES,
    PushRequest,
    ScriptFigures,
    ShardReply,
    was_accepted,
)
from thinwire.worker.core.worker_round import Action, MiniBatch, Restore, RoundAction, RoundStage
from thinwire.worker.script import RECORD
from thinwire.worker.train_step import clip, decay
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


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """Finished exchange with the PS: the worker's request, if known, and the shards' replies."""

    request: PushRequest | None = None
    replies: Sequence[ShardReply | None] = ()

    @property
    def is_applied(self) -> bool:
        """True if the shards rejected nothing; also without an exchange."""
        return not self.replies or was_accepted(self.replies)


@dataclasses.dataclass(frozen=True)
class CentralState:
    """State of the model and its optimizers on all shards of the PS, between two updates.

    Attributes:
        spec: Names, shapes and dtypes of the model's variables.
        layouts: For each shard, its layout, which lists the slices of the model that the shard
            stores.
        shards: For each shard, the states of its optimizers, then a state with all other values of
            the shard, by slice of the layout. The state with all other values holds weights and
            averaged statistics only if they were requested.
    """

    spec: ModelSpec
    layouts: Sequence[ShardLayout]
    shards: Sequence[Sequence[OptimizerState]]

    def weights(self) -> tuple[Float32, Float32]:
        """Return the model's weights [num_parameters] and its averaged moving statistics [m].

        Raises:
            ValueError: Weights and statistics were not requested from the shards, or belong to a
                different model.
        """
        slots = [states[-1].slots for states in self.shards]
        return whole_values(self.spec, self.layouts, slots)

    @property
    def scale_streak(self) -> int | None:
        """Number of updates without overflow since the loss scale changed; None without a scale."""
        slots = self.shards[0][-1].slots
        streaks = (slot.values for slot in slots if slot.role == SCALE_STREAK)
        return next((int(values) for values in streaks), None)


class LeavesOnExit(contextlib.AbstractContextManager[Any]):
    """Base class of objects of a worker that leave the run at the end of a ``with`` block."""

    @abc.abstractmethod
    def close(self, cause: str = "done") -> None:
        """End this worker's membership in the run; the model keeps its current weights."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("done" if kind is None else "error")


class Session:
    """Worker of a script, which joins the run, takes training steps, leaves, and may join again.

    Args:
        settings: Settings of the training run and of this worker.
        shared: The script's model, with the variables that all workers train as one flat vector.
        num_train: Number of examples in the whole training set, by which a codec's warm-up counts
            epochs; None if unknown.
        momentum: Momentum of the script's SGD if the training method applies momentum itself. The
            script's optimizer then steps without momentum.
        offer: Description of the script's model that the worker sends to shards without a model;
            None if the shards build the model from their flags.
        optimizers: Optimizers of the script that a PS runs, without their loss-scaling wrappers, in
            the order in which the PS knows them. Empty: the optimizers run on the worker.
        before: Session of this worker in the previous phase of the run; None in the first phase. In
            a phase, the model and its optimizers do not change.
        phase: Number of the run's phase that this script is in, from 0, which the worker sends in
            its Hello message.
        check_offer: Function that is called with the session before the worker sends the model's
            description to a shard, and that raises an error to forbid it.
        kept: Function of the session and the number of the last step that the shards applied. It
            returns the saved engine state of the previous process after that step, or None if no
            such state was saved.

    Raises:
        ConfigurationError: The codec warms up over epochs, and `num_train` is missing. Or this
            worker sends weights, and its settings request weight decay or clipping, which apply to
            gradients.
    """

    def __init__(
        self,
        settings: ScriptSettings,
        shared: SharedModel,
        num_train: int | None = None,
        momentum: float = 0.0,
        offer: Offer | None = None,
        optimizers: Sequence[Any] = (),
        before: Session | None = None,
        phase: int = 0,
        kept: Callable[[Session, int], State | None] = lambda session, last_step: None,
        check_offer: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.settings, self.shared = settings, shared
        self.own = settings.worker()
        run = settings.run
        self.variables = FlatVariables(shared.variables)
        self.statistics = FlatVariables(shared.statistics if run.method.bn_sync else [])
        self._num_train = needed_size(run.method.codec, num_train)
        self._momentum = momentum
        self._offering: Offering | None = None
        if offer is not None:
            offer = dataclasses.replace(offer, statistics=self.statistics.size)
            if not optimizers:
                stateless = [
                    dataclasses.replace(optimizer_offer, iterations=0, has_slots=False)
                    for optimizer_offer in offer.optimizers
                ]
                offer = dataclasses.replace(offer, optimizers=tuple(stateless))

            def weights() -> Float32:
                check_offer(self)
                return self.variables.read()

            self._offering = Offering(
                offer,
                weights,
                self.statistics.read,
                lambda: [slots.collect() for slots in self._own_slots(optimizers)],
                phase,
                before.part.run_id if before is not None else "",
                RECORD.program,
            )
        if self.takes_weights and (self.own.weight_decay or self.own.clip_norm):
            raise ConfigurationError(
                "--worker_weight_decay and --clip_norm change gradients, but with "
                "--local_optimizer=script the script's optimizer has already applied the "
                "unchanged gradients. Leave the two flags out, and give that optimizer "
                "weight_decay, clipnorm or global_clipnorm."
            )
        self._present = False
        # saved engine state of this worker's previous incarnation (process)
        self._saved: State | None = None
        self._kept = kept
        self._exchanges: BackgroundCalls[_Exchanged] = BackgroundCalls("exchange")
        # For each optimizer, the schedule's step count after the exchange that a background thread
        # runs.
        self._counts_ahead: tuple[int, ...] = ()
        # maps an optimizer to the number of batch parts in skipped mini-batches
        self._left_out: dict[int, int] = {}
        # moment at which the last step or the last pause ended
        self._computes_from = time.monotonic()
        self.part: WorkerSession = self._new_part(self.statistics.read())
        self._counted = self._counters()  # values of the traffic counters at the last StepInfo
        # for each shard, its version at the start of the current step
        self._versions: list[int] = []
        # [m] averaged statistics for the next step; None without overlap of computing and
        # exchanging. With overlap, a step starts before the shards have averaged the statistics of
        # the previous step.
        self._means: Float32 | None = None
        # [num_parameters] change that the script made to the weights outside of its optimizers and
        # that the shards have not applied yet; None: no change. `_is_change_sent` is True once a
        # push has carried the change.
        self._change: Float32 | None = None
        self._is_change_sent = False
        if before is not None:
            self.part.before, self.part.steps.loss = before.part.metrics(), before.part.steps.loss

    @property
    def stopped(self) -> bool:
        """True if the run has ended or this worker's process was interrupted."""
        return self.part.stopped

    @property
    def stop_reason(self) -> str:
        """Reason why the run ended, as reported by a shard; an empty text before the run's end."""
        return self.part.stop_reason

    @property
    def weights(self) -> Float32:
        """Weights [num_parameters] float32 for the next gradient; the array may not be a copy.

        The weights for the next gradient include changes that the script made outside of its
        optimizers, even before the shards have applied these changes.
        """
        base = self.part.core.weights
        return base if self._change is None else base + self._change

    @property
    def unsent_change(self) -> Float32 | None:
        """The script's change [num_parameters] of the weights, not pushed yet; None: no change."""
        return None if self._is_change_sent else self._change

    @property
    def sent_weights(self) -> Float32:
        """Weights [num_parameters] without changes by the script that are not pushed yet."""
        return self.weights if self._is_change_sent else self.part.core.weights

    @property
    def offer(self) -> Offer | None:
        """Description of the model for shards without a model; None if the shards have a model."""
        return None if self._offering is None else self._offering.offer

    def _own_slots(self, optimizers: Sequence[Any]) -> list[OwnSlots]:
        """Return the slots (state variables) of the script's optimizers that a PS runs.

        Raises:
            ConfigurationError: No PS runs the script's optimizers, or an optimizer was built on
                variables that are not part of the model.
        """
        offer, variables = self.offer, self.shared.variables
        if offer is None or not offer.optimizers:
            raise ConfigurationError(
                "no PS applies this script's optimizer, so the PS shards have no optimizer slots"
            )
        return [
            OwnSlots(optimizer, described, [variables[number] for number in numbers])
            for optimizer, described, numbers in zip(
                optimizers, offer.optimizers, offer.groups(), strict=True
            )
        ]

    def fetch(self, weights: bool = False) -> CentralState:
        """Fetch the state of the script's optimizers from the shards.

        Args:
            weights: True to fetch the weights and the averaged moving statistics in addition to the
                optimizer state.

        Raises:
            Unreachable, StreamLost, RequestRejected: A shard does not answer, or rejects the
                request for optimizer state.
        """
        layouts, run = self.part.core.layouts, self.settings.run
        size = self.statistics.size if weights else None
        shards = fetch_slots(run, self.own.id_worker, self.part.run_id, layouts, size)
        return CentralState(self.shared.spec, layouts, shards)

    def fill_slots(self, optimizers: Sequence[Any], state: CentralState) -> None:
        """Write the shards' optimizer state into the script's optimizers.

        Args:
            optimizers: Optimizers of the script without their loss-scaling wrappers, in the order
                in which the PS knows them.
            state: Optimizer state of the shards, which `fetch` has returned.

        Raises:
            ConfigurationError, ValueError: An optimizer was built on variables that are not part of
                the model.
        """
        own_slots, offer = self._own_slots(optimizers), self.offer
        for number, numbers in enumerate(offer.groups() if offer else ()):
            states = [states[number] for states in state.shards]
            parts = [part_of_layout(layout, numbers)[0] for layout in state.layouts]
            own_slots[number].fill(
                parts, [optimizer_state.slots for optimizer_state in states], states[0].rate
            )

    @property
    def has_run_s_values(self) -> bool:
        """True if the script has not changed weights and statistics since the run wrote them."""
        values = ((self.variables, self.weights), (self.statistics, self.means))
        return all(
            np.array_equal(flat.read(), run_values, equal_nan=True) for flat, run_values in values
        )

    @property
    def phase(self) -> int:
        """Number of the run's phase that this script is in, from 0, sent in its Hello message."""
        return 0 if self._offering is None else self._offering.phase

    def go_to_phase(self, phase: int) -> None:
        """Start a new incarnation of this worker, in the phase of the run with number `phase`."""
        if self._offering is not None:
            self._offering = dataclasses.replace(self._offering, phase=phase)
        self.renew()

    def stay_behind(self) -> None:
        """Use the model's own values as weights: the run is in a later phase than this script."""
        self._change = None
        np.copyto(self.part.core.weights, self.variables.read())
        np.copyto(self.means, self.statistics.read())

    def end_as(self, before: Session) -> None:
        """Use the model's own values without joining: the run ended in the session `before`."""
        self.stay_behind()
        self.part.core.stopped = True
        self.part.core.stop_reason = before.stop_reason

    def schedule_count(self, optimizer: int) -> int | None:
        """Return the step count at which an optimizer's rate schedule is evaluated; None: unknown.

        The step count of a learning-rate schedule is the count in shard 0's last reply, plus the
        batches that this worker has trained on since that reply. `schedule_count` returns None if
        no reply of shard 0 has contained a step count.
        """
        core = self.part.core
        if optimizer >= len(core.schedule_counts):
            return None
        # The reply to the unfinished push will count that push. Until the reply arrives, the batch
        # parts of the push are added to the count of the last reply.
        count = core.schedule_counts[optimizer]
        # a push of weights counts for all optimizers of the script
        sent_for = 0 if self.takes_weights else optimizer
        parts = self.part.parts_under_way(sent_for) + self._left_out.get(sent_for, 0)
        if self.settings.run.method.takes_local_steps:
            parts += core.round.batch_parts
        count += self._batches(parts)
        return max(count, self._counts_ahead[optimizer]) if self._counts_ahead else count

    def _batches(self, parts: int) -> int:
        """Return how many script batches all workers train on while this worker trains on `parts`.

        In a run of n workers, each batch of the script counts as n parts. In synchronous rounds all
        n workers take equally many parts, so that k parts of this worker mean k batches of all
        workers.
        """
        run = self.settings.run
        is_in_rounds = run.method.takes_local_steps or run.method.steps_together
        return parts if is_in_rounds else parts // run.nb_workers

    @property
    def means(self) -> Float32:
        """Averaged moving statistics at the start of the next step: [m] float32, not a copy."""
        return self.part.core.statistics if self._means is None else self._means

    def open(self) -> bool:
        """Join the run, or join it again after `close`; do nothing if this worker has joined.

        Returns:
            True if joining has replaced the weights. Gradients computed at the weights before the
            call are then useless.

        Raises:
            Unreachable: No parameter server answers this worker.
            Refused: The parameter server rejects this worker.
            ConfigurationError: The server averages different moving statistics than this worker
                has.
        """
        if self._present:
            return False
        if self.part.run_id:
            self.renew()
        last = self.part.join()
        saved = self._kept(self, last) if self._saved is None else self._saved
        if saved is not None and not self.part.core.restore(saved, last):
            logging.warning(
                "this worker's saved state is from step %d, but the PS shards have applied step "
                "%d: dropping the codec's residual (the unsent part of earlier updates)",
                *(saved["step"], last),
            )
        self._present = True
        self._counts_ahead = ()
        atexit.register(self.close, "error")
        try:
            self.part.begin()
            self._counted = self._counters()
            self._begin_at_base()
        except ShardGone:
            self.part.core.stopped = True
        except BaseException:
            self.close("error")
            raise
        return True

    def _begin_at_base(self) -> None:
        """Start the next step with the model that the shards have sent."""
        core = self.part.core
        self._versions = list(core.versions)
        if self.settings.run.method.overlap:
            self._means = core.statistics.copy()
        self.begin_compute()

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set, by the function `part_of`."""
        return part_of(self.settings, data)

    def assign(self, values: tuple[Float32, Float32] | None = None) -> None:
        """Write weights and averaged statistics into the model.

        Args:
            values: Weights [num_parameters] and statistics [m] to write; None: this worker's own
                values.
        """
        weights, statistics = (self.weights, self.means) if values is None else values
        self.variables.assign(weights)
        self.statistics.assign(statistics)

    @property
    def takes_weights(self) -> bool:
        """True if `step` takes weights instead of gradients: the optimizer runs on this worker."""
        return self.settings.run.method.steps_on_workers

    @property
    def keeps_values(self) -> bool:
        """True if `step` keeps its argument's array, which the caller must not change later."""
        return self.part.core.own is None

    @property
    def loss_scale(self) -> float:
        """Factor by which the next loss is multiplied, as a PS sets it; 0 without loss scaling."""
        return self.part.core.loss_scale

    def step(
        self,
        values: Float32,
        samples: int,
        loss: float | None,
        statistics: Float32 | None = None,
        rate_factor: float = 1.0,
        figures: ScriptFigures = NO_FIGURES,
    ) -> StepInfo:
        """Send a mini-batch's result; then `weights` and `means` are the next mini-batch's values.

        A mini-batch with NaN or infinity is skipped, and `StepInfo.skipped` reports it. After a
        skipped mini-batch, `weights` and `means` are the last finite values, which the caller must
        write into its model.

        Args:
            values: [num_parameters] float32 mean gradient at `weights`, which `step` may modify. If
                `takes_weights` is true: the weights after the step of the script's optimizer.
            samples: Number of training examples in the mini-batch.
            loss: Mean loss of the mini-batch; None if unknown.
            statistics: [m] float32 moving statistics after the mini-batch; None if the run does not
                average statistics over the workers.
            rate_factor: Factor for gradients (not weights): this worker's learning rate divided by
                the run's learning rate.
            figures: Learning rate, loss scale and sparse gradient rows of the script's optimizer in
                this training step.

        Raises:
            RunOver: The run ended before this training step was sent to the servers.
            Diverged: A hundred successive mini-batches had NaN or infinity.
            Unreachable, Refused: The server does not answer within the time limits, or rejects this
                worker.
        """
        if self.stopped:
            raise RunOver(f"this run has ended ({self.stop_reason or 'interrupted'}).")
        part = self.part
        optimizer = figures.head.optimizer
        parts = figures.head.batch_parts + self._left_out.pop(optimizer, 0)
        head = dataclasses.replace(figures.head, batch_parts=parts)
        figures = dataclasses.replace(figures, head=head)
        if not self.takes_weights:
            decay(values, part.core.weights, self.own.weight_decay)
            clip(values, self.own.clip_norm)
            if rate_factor != 1:
                values *= np.float32(rate_factor)
        else:
            values = self._without_changes(values, figures.change)
        overlaps, exchange = self.settings.run.method.overlap, _Exchanged()
        batch = MiniBatch(
            values, samples, loss, statistics, self._versions if overlaps else None, figures
        )
        applied = skipped = False
        means = self._means
        try:
            if (own_changes := part.core.own) is not None:
                exchange = self._begin_behind(own_changes, batch)
                if not overlaps:
                    exchange = self._settle()
                    own_changes.catch_up()
            else:
                if overlaps:
                    self._forget_sent_change()
                exchange = self._exchange(batch)
            applied = exchange.is_applied
        except NonFiniteUpdate:
            # the next push counts the batch parts of the skipped mini-batch
            self._left_out[optimizer] = parts
            self._means, skipped = means, True
        except ShardGone:
            part.core.stopped = applied = True
        except Diverged:
            self.close("diverged")
            raise
        self._note_change(figures.change, exchange if applied else None)
        info = self._info(exchange.request if applied else None, exchange.replies, skipped)
        self.begin_compute()
        return info

    def _without_changes(self, weights: Float32, change: Float32 | None) -> Float32:
        """Return weights [num_parameters] without the script's changes outside of its optimizers.

        Args:
            weights: [num_parameters] weights after the step of the script's optimizer.
            change: [num_parameters] change by the script that is pushed together with this step;
                None without a change.
        """
        sent_change = self._change if self._is_change_sent else None
        changes = [part for part in (sent_change, change) if part is not None]
        return functools.reduce(np.subtract, changes, weights)

    def _note_change(self, change: Float32 | None, done: _Exchanged | None) -> None:
        """Update `_change` and `_is_change_sent`, the script's own change of weights, after a step.

        Without overlap of computing and exchanging, the shards' replies show if they applied the
        script's change. With overlap of computing and exchanging, the script's change was sent with
        this step's push, whose reply comes during a later step.

        Args:
            change: [num_parameters] change of the weights by the script before the step; None
                without a change.
            done: Finished exchange of the training step with the shards; None if the step exchanged
                nothing.
        """
        if done is None or not self.settings.run.method.overlap:
            replies = [] if done is None else done.replies
            was_taken = any(reply is not None and reply.step for reply in replies)
            self._change, self._is_change_sent = None if was_taken else change, False
        else:
            self._change, self._is_change_sent = change, True

    def _begin_behind(self, own: ScriptOwned, batch: MiniBatch) -> _Exchanged:
        """Exchange a step's change of the weights in a background thread, to overlap computing.

        Returns:
            The finished exchange of the previous step.

        Raises:
            NonFiniteUpdate: The step's weights, loss or statistics are not finite.
        """
        part = self.part
        part.measure.record(round_trace.FORWARD_AND_BACKWARD, part.stopwatch.lap("compute"))
        done = self._settle()
        part.stopwatch.lap("wait")
        if not self.stopped:
            try:
                own.step(batch.values, batch.loss, batch.statistics)
            except NonFiniteUpdate as error:
                self._begin_step()
                part.advance(part.steps.refused(error))
                raise
            self._go_on(batch.statistics)
            ahead = self._batches(batch.figures.head.batch_parts)
            self._counts_ahead = tuple(count + ahead for count in part.core.schedule_counts)
            part.exchange_watch.start()
            self._exchanges.start(functools.partial(self._exchange, batch))
        part.stopwatch.lap("encode")
        return done

    def _go_on(self, statistics: Float32 | None) -> None:
        """Start the next training step with the previous exchange's values, before a step's reply.

        With overlap of computing and exchanging, the moving statistics for the next step are the
        newest averages plus this step's change, and the weights are the newest weights plus this
        step's change.
        """
        core = self.part.core
        self._versions = list(core.versions)
        if statistics is not None and self._means is not None:
            self._means = core.statistics + (statistics - self._means)

    def _begin_step(self) -> None:
        """Let the worker's state machine wait for a mini-batch."""
        part = self.part
        if part.steps.stage is RoundStage.READY:
            part.advance(part.steps.begin())

    def _exchange(self, batch: MiniBatch) -> _Exchanged:
        """Send a mini-batch's result; wait for replies: with overlap, to the previous push.

        Raises:
            NonFiniteUpdate: The result is not finite.
        """
        part, refused = self.part, []
        goes_ahead = self.settings.run.method.overlap and part.core.own is None

        def load(action: Action) -> None:
            if isinstance(action, Restore):
                refused.append(action.error)
            elif action is RoundAction.LOAD_ROUND and goes_ahead and not self.stopped:
                self._go_on(batch.statistics)

        part.forget_exchange()
        self._begin_step()
        if goes_ahead and part.steps.under_way is None:
            self._go_on(batch.statistics)
        part.advance(part.computed(batch, self._computes_from), load)
        if refused:
            raise refused[0]
        return _Exchanged(part.sent, part.received)

    def _settle(self) -> _Exchanged:
        """Wait for the exchange in the background, if any; return its result or an empty one."""
        self._forget_sent_change()
        done = self._exchanges.result()
        if done is not None:
            return done
        part = self.part
        part.forget_exchange()
        if part.steps.under_way is not None and (action := part.steps.settle()) is not None:
            part.carry_out(action, lambda action: None)
        return _Exchanged(None, part.received)

    def _forget_sent_change(self) -> None:
        # the shards' reply replaces the weights even if the push was rejected
        if self._is_change_sent:
            self._change, self._is_change_sent = None, False

    def begin_compute(self) -> None:
        """Restart the measurement of a step's computing time, for example after a pause."""
        self._computes_from = time.monotonic()

    def flush(self) -> None:
        """Finish the exchange in the background, then push all unsent local steps and residuals."""
        part = self.part
        if not self._present or self.stopped:
            return
        try:
            part.exchange_watch.start()
            self._settle()
            part.steps.settle()
            if part.core.round.num_steps and not self.stopped:
                self._push_rest(part.steps.end_round())
            if not self.stopped:
                self._push_rest(part.steps.end_training())
        except NonFiniteUpdate as error:
            logging.warning("the unsent changes of this worker are lost: %s", error)
        except ShardGone:
            part.core.stopped = True

    def _push_rest(self, action: Action | None) -> None:
        """Carry out a push between two mini-batches, and wait for its replies."""
        while action is not None and action not in (RoundAction.POLL, RoundAction.END):
            action = self.part.carry_out(action, lambda action: None)
        if (rest := self.part.steps.settle()) is not None:
            self._push_rest(rest)

    def pull(self) -> None:
        """Replace this worker's model by the shards' current model, after a call of `flush`."""
        if not self._present or self.stopped:
            return
        try:
            self._settle()
            self.part.pull()
            self._begin_at_base()
        except ShardGone:
            self.part.core.stopped = True

    def close(self, cause: str = "done") -> None:
        """Leave the run and report the cause to the PS; do nothing before this worker joins."""
        if not self._present:
            return
        self._present = False
        atexit.unregister(self.close)
        if cause == "error" and self.stopped:
            cause = "interrupted" if self.part.closing.is_set() else "done"
        self._cut()
        self._saved = self.part.core.save()
        self.part.leave(cause)
        logging.info("this worker left the run after %d exchanges (%s)", self.part.core.step, cause)

    def _cut(self) -> None:
        """Wait `_CUT_SECONDS` for the exchange in the background thread, then abandon it."""
        try:
            self._exchanges.result(_CUT_SECONDS)
        except TimeoutError:
            # from now on, a lost stream ends the exchange without a reconnect
            self.part.closing.set()
            self._exchanges = BackgroundCalls("exchange")
        except Exception as error:  # noqa: BLE001 - this worker leaves the run anyway
            logging.info("the last exchange failed while this worker left the run: %s", error)

    def _new_part(self, statistics: Float32) -> WorkerSession:
        """Return the session of a new incarnation (one process) of this worker, not joined yet.

        The script's gradients arrive as arrays in host memory, from any thread, so the codec's
        kernels run on the host.
        """
        part = WorkerSession(
            self.settings.run,
            self.own,
            self.shared.spec,
            statistics,
            num_examples=self._num_train,
            momentum=self._momentum,
            offering=self._offering,
        )
        if part.core.own is not None and self.settings.run.method.overlap:
            part.exchange_watch = Stopwatch()
        return part

    def renew(self) -> None:
        """Give this worker a new incarnation id, as if its process had been restarted."""
        old = self.part
        self.part, self._change = self._new_part(self.means), None
        # weights that are used until the PS sends its weights
        np.copyto(self.part.core.weights, old.core.weights)
        self.part.before, self.part.steps.loss = old.metrics(), old.steps.loss

    def _counters(self) -> tuple[int, int, dict[str, float]]:
        exchange = self.part.exchange
        return exchange.bytes_up, exchange.bytes_down, dict(self.part.stopwatch.seconds)

    def _info(
        self, outgoing: PushRequest | None, replies: Sequence[ShardReply | None], skipped: bool
    ) -> StepInfo:
        """Return the result of a training step, with traffic and times since the last result."""
        core, before = self.part.core, self._counted
        up, down, seconds = self._counted = self._counters()
        sent = outgoing.shards if outgoing is not None else []
        answers = [reply for reply in replies if reply is not None]
        return StepInfo(
            version=core.versions[0],
            lr=core.learning_rate,
            bytes_up=up - before[0],
            bytes_down=down - before[1],
            nnz_up=sum(len(block.values.data) for blocks in sent for block in blocks),
            nnz_down=sum(len(block.values.data) for reply in answers for block in reply.blocks),
            staleness=answers[0].staleness if answers else 0,
            seconds={phase: spent - before[2][phase] for phase, spent in seconds.items()},
            exchanged=bool(answers),
            stopped=self.stopped,
            skipped=skipped,
        )


def part_of(settings: ScriptSettings, data: Sequence[Any], fit: FitNumber | None = None) -> Any:
    """Return a worker's part of a training set; the parts of all workers are disjoint.

    Args:
        settings: Settings of the training run and of this worker.
        data: Training data, equal on all workers: arrays [N, ...] in any nesting, or one
            tf.data.Dataset, keras.utils.PyDataset or ray.data.Dataset. Some values of --partition
            use the last arrays as labels.
        fit: Position of this use of the data among the script's uses, which enters the seeds of
            shuffles; None if unknown.

    Returns:
        A tuple with the part of each array; for one array or dataset, its part alone.

    Raises:
        ConfigurationError: Thinwire cannot show that the workers' parts are disjoint and complete,
            or a part is empty.
    """
    place = WorkerPlace.of(settings.run, settings.worker().id_worker)
    return part_of_data(tuple(data), dataclasses.replace(place, fit=fit))


def needed_size(codec: Codec, num_train: int | None) -> int:
    """Return the number of training examples; 0 if it is unknown and the codec does not need it.

    Raises:
        ConfigurationError: The codec warms up over epochs, and the number of training examples is
            missing.
    """
    warms_up = any(isinstance(wrapper, WarmUp) for wrapper in wrappers_of(codec))
    if warms_up and not num_train:
        raise ConfigurationError(
            f"num_train={num_train}: the codec sends more entries in the first epochs, so it "
            "needs the size of the training set; give all nodes num_train, or warmup_epochs=0."
        )
    return num_train or 0

"""A script's place in a run: flat gradients, or weights, in, flat weights out."""

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
from thinwire.ops.codecs import Codec
from thinwire.ops.codecs.base import NonFiniteUpdate
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
from thinwire.worker.core.messages import (
    NO_FIGURES,
    PushRequest,
    ScriptFigures,
    ShardReply,
    was_accepted,
)
from thinwire.worker.core.own_changes import OwnChanges
from thinwire.worker.script import RECORD
from thinwire.worker.train_step import clip, decay
from thinwire.worker.trainer import Stopwatch, WorkerSession

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


#: What an exchange that is under way may still take when a worker leaves.
_CUT_SECONDS = 2.0


class RunOver(Exception):
    """The run has ended; there is nothing to step for any more.

    Attributes:
        cause: Its stop reason, where another script has brought the end about; else empty.
    """

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What became of one step."""

    version: int  # updates applied to the model that this worker now has
    lr: float  # the server's learning rate
    bytes_up: int = 0  # on the wire in this step, framing and heartbeats included
    bytes_down: int = 0
    nnz_up: int = 0  # values sent
    nnz_down: int = 0  # values received
    staleness: int = 0  # updates the model had moved on by when the push was merged
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # compute, encode, wait
    exchanged: bool = False  # False: a local step, or a mini-batch that was left out
    stopped: bool = False  # the run has ended; this was the last step
    skipped: bool = False  # the mini-batch was not finite, and left out


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """An exchange that is over: what was sent, and a reply of every shard, if they are known."""

    request: PushRequest | None = None
    replies: Sequence[ShardReply | None] = ()


@dataclasses.dataclass(frozen=True)
class CentralState:
    """What the shards hold between two updates.

    Attributes:
        spec: Of the model.
        layouts: Of every shard.
        shards: Of every shard: the state of each optimizer, then what is beside them, by slice of
            its layout; weights and averaged statistics only if requested.
    """

    spec: ModelSpec
    layouts: Sequence[ShardLayout]
    shards: Sequence[Sequence[OptimizerState]]

    def weights(self) -> tuple[Float32, Float32]:
        """Return the weights [num_parameters] and the averaged statistics [m].

        Raises:
            ValueError: They were not requested, or are of another model.
        """
        beside = [states[-1].slots for states in self.shards]
        return whole_values(self.spec, self.layouts, beside)

    @property
    def scale_streak(self) -> int | None:
        """Updates since the loss scale was changed, without an overflow; None: it is not scaled."""
        beside = self.shards[0][-1].slots
        found = (slot.values for slot in beside if slot.role == SCALE_STREAK)
        return next((int(values) for values in found), None)


class LeavesOnExit(contextlib.AbstractContextManager[Any]):
    """What may be held by a ``with`` block: leaves the run at its end, however that comes."""

    @abc.abstractmethod
    def close(self, cause: str = "done") -> None:
        """Leave the run; the model keeps the weights that it has."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("done" if kind is None else "error")


class Session:
    """A worker of a script: joins, steps, leaves, and may join again.

    Args:
        settings: Of the run and this worker.
        shared: The model.
        num_train: Size of the whole training set, by which warm-up counts epochs.
        momentum: Of the script's SGD, where the method `takes_momentum`: the script then steps
            without.
        offer: The model, to be offered to servers without one; None: they have it.
        optimizers: Those of the script, without the loss scaling around them, in the order of the
            offer, where a PS steps with them; empty: whatever state they have stays here.
        before: This worker in the phase of the script before; None: there was none.
        phase: Of the script, as Hello counts them.
        check_offer: Called with the session before it offers the model to a shard that has none;
            raises what forbids that.
        kept: Given the last of its steps that the shards have, what a process before this one has
            left of this worker's core, and at other times None.

    Raises:
        ConfigurationError: The codec warms up, and the size of the training set is not given; or
            this worker's gradients were to be decayed or clipped, and it sends weights.
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
                fresh = [
                    dataclasses.replace(each, iterations=0, has_slots=False)
                    for each in offer.optimizers
                ]
                offer = dataclasses.replace(offer, optimizers=tuple(fresh))

            def weights() -> Float32:
                check_offer(self)
                return self.variables.read()

            self._offering = Offering(
                offer,
                weights,
                self.statistics.read,
                lambda: [own.collect() for own in self._own_slots(optimizers)],
                phase,
                before.part.run_id if before is not None else "",
                RECORD.program,
            )
        if self.takes_weights and (self.own.weight_decay or self.own.clip_norm):
            raise ConfigurationError(
                "--worker_weight_decay and --clip_norm change gradients, and with "
                "--local_optimizer=script the script's optimizer has stepped by them already. "
                "Leave them out, and give that optimizer weight_decay, clipnorm or "
                "global_clipnorm."
            )
        self._present = False
        self._saved: State | None = None  # of the incarnation before
        self._kept = kept
        self._exchanges: BackgroundCalls[_Exchanged] = BackgroundCalls("exchange")
        # The counts of schedules once the exchange has ended that is under way in a thread.
        self._counts_ahead: tuple[int, ...] = ()
        self._left_out: dict[int, int] = {}  # by optimizer: parts of batches that were not finite
        self._computes_from = time.monotonic()  # the end of the newest step, or of a pause
        self.part: WorkerSession = self._new_part(self.statistics.read())
        self._counted = self._counters()  # by the newest StepInfo
        self._versions: list[int] = []  # of the base that the present step began at
        self._means: Float32 | None = None  # where a step begins before the one before is averaged
        # [num_parameters] what the script has changed of the weights itself, and the shards' do not
        # have yet; and whether it was sent.
        self._change: Float32 | None = None
        self._is_change_sent = False
        if before is not None:
            self.part.before, self.part.loss = before.part.metrics(), before.part.loss

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, or this process was interrupted."""
        return self.part.stopped

    @property
    def stop_reason(self) -> str:
        """Why the run ended, as far as this worker was notified; empty while it goes on."""
        return self.part.stop_reason

    @property
    def weights(self) -> Float32:
        """The weights to compute the next gradient at: [num_parameters] float32, perhaps no copy.

        What the script has set stays in them until the shards have it.
        """
        own = self.part.core.weights
        return own if self._change is None else own + self._change

    @property
    def unsent_change(self) -> Float32 | None:
        """What the script has set and no shard was sent yet: [num_parameters]; None: nothing."""
        return None if self._is_change_sent else self._change

    @property
    def sent_weights(self) -> Float32:
        """The same without what the script has set and no shard was sent yet."""
        return self.weights if self._is_change_sent else self.part.core.weights

    @property
    def offer(self) -> Offer | None:
        """The model, as it is offered to servers without one; None: they have it."""
        return None if self._offering is None else self._offering.offer

    def _own_slots(self, optimizers: Sequence[Any]) -> list[OwnSlots]:
        """Return the slots of the script's own optimizers, which a PS steps with.

        Raises:
            ConfigurationError: No PS does, or one was built on other variables.
        """
        offer, variables = self.offer, self.shared.variables
        if offer is None or not offer.optimizers:
            raise ConfigurationError("no PS steps with this script's optimizer; there are no slots")
        return [
            OwnSlots(optimizer, described, [variables[number] for number in numbers])
            for optimizer, described, numbers in zip(
                optimizers, offer.optimizers, offer.groups(), strict=True
            )
        ]

    def fetch(self, weights: bool = False) -> CentralState:
        """Return the state of the optimizers on the shards, and with it the weights if wanted.

        Raises:
            Unreachable, StreamLost, RequestRejected: A shard does not answer.
        """
        layouts, run = self.part.core.layouts, self.settings.run
        size = self.statistics.size if weights else None
        shards = fetch_slots(run, self.own.id_worker, self.part.run_id, layouts, size)
        return CentralState(self.shared.spec, layouts, shards)

    def fill_slots(self, optimizers: Sequence[Any], state: CentralState) -> None:
        """Give the script's own optimizers the state that the PS has brought them to.

        Args:
            optimizers: In the order of the offer, without the loss scaling around them.
            state: Of the shards.

        Raises:
            ConfigurationError, ValueError: One was built on other variables.
        """
        own, offer = self._own_slots(optimizers), self.offer
        for number, numbers in enumerate(offer.groups() if offer else ()):
            states = [states[number] for states in state.shards]
            parts = [part_of_layout(layout, numbers)[0] for layout in state.layouts]
            own[number].fill(parts, [each.slots for each in states], states[0].rate)

    @property
    def has_run_s_values(self) -> bool:
        """Whether the model has the weights and averaged statistics that the run gave it last."""
        values = ((self.variables, self.weights), (self.statistics, self.means))
        return all(np.array_equal(own.read(), theirs, equal_nan=True) for own, theirs in values)

    @property
    def phase(self) -> int:
        """Of the script, as Hello counts them."""
        return 0 if self._offering is None else self._offering.phase

    def go_to_phase(self, phase: int) -> None:
        """Join in another phase of the script, in which the run is."""
        if self._offering is not None:
            self._offering = dataclasses.replace(self._offering, phase=phase)
        self.renew()

    def stay_behind(self) -> None:
        """Go on with the model's own values: the run is in a later phase than this script."""
        self._change = None
        np.copyto(self.part.core.weights, self.variables.read())
        np.copyto(self.means, self.statistics.read())

    def end_as(self, before: Session) -> None:
        """Go on with the model's own values, without joining: the run has ended before."""
        self.stay_behind()
        self.part.core.stopped = True
        self.part.core.stop_reason = before.stop_reason

    def schedule_count(self, optimizer: int) -> int | None:
        """Return the count that the schedule of an optimizer is read at; None: it is not known.

        It is shard 0's of the last reply, and what this worker has trained on since.
        """
        core = self.part.core
        if optimizer >= len(core.schedule_counts):
            return None
        known = core.schedule_counts[optimizer]  # before what is under way: its reply counts that
        sent_for = 0 if self.takes_weights else optimizer  # weights are those of all optimizers
        parts = self.part.parts_under_way(sent_for) + self._left_out.get(sent_for, 0)
        if self.settings.run.method.takes_local_steps:
            parts += core.round.batch_parts
        known += self._batches(parts)
        return max(known, self._counts_ahead[optimizer]) if self._counts_ahead else known

    def _batches(self, parts: int) -> int:
        """Return the batches of the script that this worker's parts stand for.

        In rounds every other worker takes as many meanwhile.
        """
        run = self.settings.run
        is_in_rounds = run.method.takes_local_steps or run.method.steps_together
        return parts if is_in_rounds else parts // run.nb_workers

    @property
    def means(self) -> Float32:
        """The averaged moving statistics to go on from: [m] float32, not a copy."""
        return self.part.core.statistics if self._means is None else self._means

    def open(self) -> bool:
        """Join, or join again after `close`; nothing while this worker is present.

        Returns:
            Whether the weights are new: gradients at others are of no use.

        Raises:
            Unreachable, Refused: No answer, or a refusal.
            ConfigurationError: What the server averages is not what this worker has.
        """
        if self._present:
            return False
        if self.part.run_id:
            self.renew()
        last = self.part.join()
        saved = self._kept(self, last) if self._saved is None else self._saved
        if saved is not None and not self.part.core.restore(saved, last):
            logging.warning(
                "what was kept of this worker is of its step %d, and the shards have step %d: "
                "what its codec has kept back is dropped",
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
        """Begin the next step at what the shards hold."""
        core = self.part.core
        self._versions = list(core.versions)
        if self.settings.run.method.overlap:
            self._means = core.statistics.copy()
        self.begin_compute()

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set; see `part_of`."""
        return part_of(self.settings, data)

    def assign(self, values: tuple[Float32, Float32] | None = None) -> None:
        """Write weights and averaged statistics into the model.

        Args:
            values: [num_parameters] and [m]; None: this worker's own.
        """
        weights, statistics = (self.weights, self.means) if values is None else values
        self.variables.assign(weights)
        self.statistics.assign(statistics)

    @property
    def takes_weights(self) -> bool:
        """Whether the script's optimizer steps, and `step` takes weights in place of gradients."""
        return self.settings.run.method.steps_on_workers

    @property
    def keeps_values(self) -> bool:
        """Whether the values given to `step` must stay as they are after it."""
        return self.part.core.own is None

    @property
    def loss_scale(self) -> float:
        """The factor of the loss for the next gradient, which the server keeps; 0: none."""
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
        """Take in a mini-batch; `weights` and `means` are then those of the next.

        Values that are not finite are left out: `StepInfo.skipped`, and `weights` and `means` are
        the last good ones, which the caller then writes into its model.

        Args:
            values: [num_parameters] float32 mean gradient at `weights`, which may be changed; if
                `takes_weights`, the weights after the script's own step.
            samples: Examples in the mini-batch.
            loss: Its mean loss; None: unknown.
            statistics: [m] the moving statistics after it, where they are averaged.
            rate_factor: By which this worker's learning rate differs from the run's; of gradients.
            figures: What the script's optimizer adds: its rate, the loss scale, touched rows.

        Raises:
            RunOver: The run had ended before.
            Diverged: A hundred mini-batches in a row were not finite.
            Unreachable, Refused: The server is gone for good.
        """
        if self.stopped:
            raise RunOver(f"this run has ended ({self.stop_reason or 'interrupted'}).")
        part = self.part
        parts = figures.batch_parts + self._left_out.pop(figures.optimizer, 0)
        figures = dataclasses.replace(figures, batch_parts=parts)
        if not self.takes_weights:
            decay(values, part.core.weights, self.own.weight_decay)
            clip(values, self.own.clip_norm)
            if rate_factor != 1:
                values *= np.float32(rate_factor)
        else:
            values = self._without_changes(values, figures.change)
        overlaps, done = self.settings.run.method.overlap, _Exchanged()
        computed_at = self._versions if overlaps else None
        arguments = (values, samples, loss, statistics, self._computes_from, computed_at, figures)
        applied = skipped = False
        means = self._means
        try:
            if (own := part.core.own) is not None:
                done = self._begin_behind(own, arguments)
                if not overlaps:
                    done = self._settle()
                    own.catch_up()
            elif overlaps:
                done = self._settle()
                if not self.stopped:
                    self._go_on(statistics)
                    done = _Exchanged(self._send(arguments), done.replies)
            else:
                done = self._exchange(arguments)
            applied = not done.replies or was_accepted(done.replies)
        except NonFiniteUpdate as error:
            part.skip(error)
            self._left_out[figures.optimizer] = parts  # the next push counts them
            self._means, skipped = means, True
        except ShardGone:
            part.core.stopped = applied = True
        try:
            self._note_change(figures.change, done if applied else None)
            part.record_outcome(applied)
        except Diverged:
            self.close("diverged")
            raise
        info = self._info(done.request if applied else None, done.replies, skipped)
        self.begin_compute()
        return info

    def _without_changes(self, weights: Float32, change: Float32 | None) -> Float32:
        """Return weights [num_parameters] without what the script itself has set of them.

        Args:
            weights: After the script's step, from the weights of this worker.
            change: [num_parameters] what is sent beside this step; None: nothing.
        """
        known = self._change if self._is_change_sent else None
        found = [each for each in (known, change) if each is not None]
        return functools.reduce(np.subtract, found, weights)

    def _note_change(self, change: Float32 | None, done: _Exchanged | None) -> None:
        """Note whether the shards have what the script had changed before a step.

        Args:
            change: [num_parameters] what is new of it; None: nothing.
            done: The exchange; None: of a step that came to nothing.
        """
        if done is None or not self.settings.run.method.overlap:
            replies = [] if done is None else done.replies
            was_taken = any(reply is not None and reply.step for reply in replies)
            self._change, self._is_change_sent = None if was_taken else change, False
        else:
            self._change, self._is_change_sent = change, True

    def _begin_behind(self, own: OwnChanges, arguments: Any) -> _Exchanged:
        """Begin to code and exchange a change of weights while the script goes on from it.

        Returns:
            The exchange of the step before.
        """
        part, (values, _, loss, statistics, *_, figures) = self.part, arguments
        part.measure.record(round_trace.FORWARD_AND_BACKWARD, part.stopwatch.lap("compute"))
        done = self._settle()
        part.stopwatch.lap("wait")
        if not self.stopped:
            own.step(values, loss, statistics)
            self._go_on(statistics)
            ahead = self._batches(figures.batch_parts)
            self._counts_ahead = tuple(each + ahead for each in part.core.schedule_counts)
            part.exchange_watch.start()
            self._exchanges.start(functools.partial(self._exchange, arguments))
        part.stopwatch.lap("encode")
        return done

    def _go_on(self, statistics: Float32 | None) -> None:
        """Begin the next step before this one is exchanged, at what the one before has brought.

        Moving statistics go on as weights do: from the newest averages and this step's change.
        """
        core = self.part.core
        self._versions = list(core.versions)
        if statistics is not None and self._means is not None:
            self._means = core.statistics + (statistics - self._means)

    def _send(self, arguments: Any) -> PushRequest | None:
        """Send a mini-batch; return the request, None for a local step."""
        part = self.part
        outgoing = part.submit(*arguments) or part.poll_pacer()
        if outgoing is not None:
            part.send(outgoing)
        return outgoing

    def _exchange(self, arguments: Any) -> _Exchanged:
        """Send a mini-batch, and wait for the answer."""
        outgoing = self._send(arguments)
        return _Exchanged(outgoing, self.part.finish_exchange(lambda weights: None))

    def _settle(self) -> _Exchanged:
        """Wait for the exchange that is under way, if there is one; return it."""
        if self._is_change_sent:  # whatever the answer is, it replaces the weights
            self._change, self._is_change_sent = None, False
        done = self._exchanges.result()
        if done is not None:
            return done
        return _Exchanged(None, self.part.finish_exchange(lambda weights: None))

    def begin_compute(self) -> None:
        """Note that the script begins to compute, perhaps after a pause that is no part of it."""
        self._computes_from = time.monotonic()

    def flush(self) -> None:
        """Finish what is under way, and send the local steps and changes that were kept back."""
        part = self.part
        if not self._present or self.stopped:
            return
        try:
            part.exchange_watch.start()
            self._settle()
            if part.core.round.num_steps and not self.stopped:
                part.exchange_round(part.core.end_round(), lambda weights: None)
            rest = part.core.end_training() if not self.stopped else None
            if rest is not None:
                part.exchange_round(rest, lambda weights: None)
        except NonFiniteUpdate as error:
            part.skip(error)
        except ShardGone:
            part.core.stopped = True

    def pull(self) -> None:
        """Take over the shards' present model; no local steps may be under way."""
        if not self._present or self.stopped:
            return
        try:
            self._settle()
            self.part.pull()
            self._begin_at_base()
        except ShardGone:
            self.part.core.stopped = True

    def close(self, cause: str = "done") -> None:
        """Leave the run in good order; nothing if this worker is not in it."""
        if not self._present:
            return
        self._present = False
        atexit.unregister(self.close)
        if cause == "error" and self.stopped:
            cause = "interrupted" if self.part.closing.is_set() else "done"
        self._cut()
        self._saved = self.part.core.save()
        self.part.leave(cause)
        logging.info("left the run after %d exchanges (%s)", self.part.core.step, cause)

    def _cut(self) -> None:
        """Let an exchange that is under way come to an end, however it does."""
        try:
            self._exchanges.result(_CUT_SECONDS)
        except TimeoutError:
            self.part.closing.set()  # it ends with its stream, and dials no other
            self._exchanges = BackgroundCalls("exchange")
        except Exception as error:  # noqa: BLE001 - of a run that this worker leaves
            logging.info("the exchange under way has failed: %s", error)

    def _new_part(self, statistics: Float32) -> WorkerSession:
        """Return this worker before it has joined.

        Gradients come as arrays of the host, in whatever thread: the kernels work there too.
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
        """Begin another incarnation of this worker, as a process that was started again."""
        old = self.part
        self.part, self._change = self._new_part(self.means), None
        np.copyto(self.part.core.weights, old.core.weights)  # until the server's come
        self.part.before, self.part.loss = old.metrics(), old.loss

    def _counters(self) -> tuple[int, int, dict[str, float]]:
        exchange = self.part.exchange
        return exchange.bytes_up, exchange.bytes_down, dict(self.part.stopwatch.seconds)

    def _info(
        self, outgoing: PushRequest | None, replies: Sequence[ShardReply | None], skipped: bool
    ) -> StepInfo:
        """Return what has come since the last one."""
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
    """Return a worker's part of a training set, disjoint from the others'.

    Args:
        settings: Of the run and this worker.
        data: The same at all workers: arrays [N, ...] in any nesting, the last of which are the
            labels, which some values of the flag partition look at; or one tf.data.Dataset or
            keras.utils.PyDataset.
        fit: Which use of this data by the script it is; None: not known.

    Returns:
        The part of each, as a tuple; of one, that part.

    Raises:
        ConfigurationError: The parts cannot be shown to be disjoint and complete, or one is empty.
    """
    place = WorkerPlace.of(settings.run, settings.worker().id_worker)
    return part_of_data(tuple(data), dataclasses.replace(place, fit=fit))


def needed_size(codec: Codec, num_train: int | None) -> int:
    """Return the size of the training set, 0 where no codec needs it."""
    warms_up = any(isinstance(wrapper, WarmUp) for wrapper in wrappers_of(codec))
    if warms_up and not num_train:
        raise ConfigurationError(
            f"num_train={num_train}: the codec sends more in the first epochs, so it must know how "
            "large the whole training set is; give num_train, or warmup_epochs=0 to all nodes."
        )
    return num_train or 0

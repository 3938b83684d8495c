"""The worker behind a distributed model: ``model.thinwire``."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from thinwire import interrupts
from thinwire.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.keras.checks import (
    check_optimizer,
    check_rate_change,
    check_same_variables,
    check_states,
    check_variables,
    explain_batch,
    momentum_of,
)
from thinwire.keras.clock import RunClock
from thinwire.keras.fit_barriers import FitBarriers
from thinwire.keras.loops import LoopSteps, Together
from thinwire.keras.offers import make_offer, sgd_momentum
from thinwire.keras.plan import (
    Pairs,
    PlannedStep,
    StepPlan,
    is_built,
    named,
    take_first,
    try_eagerly,
    try_in_graph,
)
from thinwire.keras.reports import describe_fit, describe_history
from thinwire.keras.step import (
    ExchangeStep,
    StepCall,
    WeightsChanged,
    count_rows,
    recording,
    watch_steps,
)
from thinwire.keras.traffic import EpochTraffic
from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.offer import Offer
from thinwire.ops.run.settings import END_REASONS
from thinwire.ops.sharding.w_global import W_global, shared_variables
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import decode_metrics
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.session import CentralState, LeavesOnExit, RunOver, Session, StepInfo, part_of
from thinwire.settings import ScriptSettings, read_settings
from thinwire.sharing.data import Shared, share
from thinwire.sharing.place import WorkerPlace
from thinwire.sharing.randomness import own_randomness
from thinwire.worker.client.control import Opening, RunHalted
from thinwire.worker.core.messages import ScriptFigures
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_SEEDS = "seed_generator_state"  # Keras' name of what Dropout and the like draw by
_SEED_STEP, _SEED_LIMIT = 1_000_003, 2**31 - 1
#: Of the largest weight: what adding and subtracting another one of its size may change.
_ROUNDING = 1e-6


class ModelSession(LeavesOnExit):
    """A model's part in a run, over all calls of its `fit`, or in a loop of the script's own.

    Attributes:
        model: The Keras model.
        last: What became of the newest step; None before the first.
        clock: What a schedule is read at where the script's optimizers step here; None before the
            first step, and where a PS steps.
        traffic: What the steps of the present epoch have sent and received.
        call: What is known of the step that is under way.
        own_train_step: The model's, as it was given to `distribute`.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: ScriptSettings | None = None,
        args: Any = None,
        keywords: Mapping[str, Any] | None = None,
        num_train: int | None = None,
    ) -> None:
        """Use `thinwire.distribute`; without settings the model trains alone."""
        self.model = model
        self.own_train_step = model.train_step
        self.last: StepInfo | None = None
        self.clock: RunClock | None = None
        self._settings = settings
        self._given, self._num_train = (args, dict(keywords or {})), num_train
        self._session: Session | None = None
        self._offer: Offer | None = None
        self._barriers: FitBarriers | None = None
        self._step: ExchangeStep | None = None  # of the compiled optimizer
        self._stand_ins: dict[int, ExchangeStep] = {}  # by optimizer: all that there were
        self._steps: list[ExchangeStep] = []  # of all that step in this phase, once that is known
        self._plan: StepPlan | None = None  # what they step
        self._sequence: list[int] = []  # their numbers, as they step in one train_step
        self._loop = LoopSteps()
        self._own_loop = self.call = StepCall(1, ends_later=False)
        self._counted: Any = None  # the optimizer whose steps `clock` counts
        self._trained: list[int] = []  # what was trainable when the phase began
        self._is_traced_anew = self._awaits_step = self._offers = False
        self._phase_at = "begin"  # where in a `fit` the newest phase began
        self._shared: SharedModel | None = None  # what this model shared last
        self._is_member = False  # of the run; of a script's models one is, the newest trained
        self._succeeds = False  # `_session` is another model's, until this one's phase begins
        self._exchanges_before = 0
        self._is_behind = False  # the run is in a later phase than this script
        self._passed_over: set[str] = set()  # variables of fits that were passed over
        self._lost: dict[int, Any] = {}  # by identity: those of models before this one
        self._seeded: dict[int, Any] = {}  # by identity: what random layers draw by
        self._lock = threading.Lock()  # of the session: TensorFlow's thread and the script's
        self._failure: Exception | None = None
        self._epoch, self._validates = 0, False  # of the present `fit`
        self._has_warned = False  # that nobody evaluates
        self._in_fit = self._has_left = self._has_slots = self._shares_itself = False
        self._in_loop = False  # a loop of the script's own has begun
        self._has_reported_end = False  # of the run, to such a loop
        self._stop_is_known = False  # by all scripts, that this `fit` ends before its time
        self._stops_after = 0  # how many epochs it then ends
        self.traffic = EpochTraffic()
        self._data = Shared({})
        self._to_sit_out = 0  # rounds of this epoch
        self._num_batches = 0  # begun in this `fit`
        self._num_calls = 0  # of `exchange`, in this `fit`
        self._came_late = False  # to this `fit`: the run had ended before
        self._rate_factor = 1.0  # this worker's learning rate over the run's
        if settings is not None:
            watch_steps(self)
            self._prepare()

    @property
    def active(self) -> bool:
        """Whether the model trains with others."""
        return self._settings is not None

    @property
    def place(self) -> tuple[Sequence[str], int] | None:
        """The addresses of the run and this worker's number; None: the model trains alone."""
        settings = self._settings
        return None if settings is None else (settings.run.addresses, settings.worker().id_worker)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._session is not None and self._session.stopped

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty while it goes on."""
        return "" if self._session is None else self._session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun, over all calls of `fit`."""
        known = self._exchanges_before
        return known if self._session is None else max(known, self._session.part.core.step)

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set; all, where the model is alone.

        See `thinwire.session.part_of`. `fit` then takes what it is given as this worker's part.
        """
        if self._settings is None:
            return data[0] if len(data) == 1 else data
        self._shares_itself = True
        return part_of(self._settings, data)

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and `fit` joins again."""
        interrupts.remove_listener(self._interrupt)
        with self._lock:
            if self._session is not None:
                self._session.close(cause)

    # -- one `fit` ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def fitting(self, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Be ready for one call of `fit`; leave the run if it fails.

        Args:
            arguments: Of Keras' fit.

        Yields:
            The arguments with this worker's part of the training data.

        Raises:
            ConfigurationError: Data that cannot be shared, or an optimizer that cannot step.
        """
        self._is_traced_anew = self.model.train_function is None
        self._prepare()
        place = self._place()
        if place is not None:
            check_states(self.model, place)
        self._data = Shared(arguments) if place is None else share(arguments, place)
        self._failure, self._num_batches, self._num_calls = None, 0, 0
        self._in_fit, self._has_left, self._has_slots = True, False, False
        self._stop_is_known, self._stops_after, self._came_late = False, 0, False
        given = self._data.arguments
        is_given = given.get("validation_data") is not None
        self._validates = is_given or bool(given.get("validation_split"))
        try:
            self._succeed()
            if self._barriers is not None:
                self._barriers.count_fit()
            with contextlib.nullcontext() if place is None else own_randomness(place):
                yield dict(self._data.arguments)
            self._take_over_own()
        except BaseException as error:
            if not self._num_calls:
                explain_batch(error, place, self._data.batch_size)
            RECORD.leave_fit(error)
            self.close("error")
            raise
        finally:
            self._in_fit = False

    def begin_fit(self) -> None:
        """Join before the first step, unless only that shows what the model is."""
        if self._is_standard:
            self._build_optimizer()
        if self._session is None and self._is_offered:
            self._try_first()
            return
        session = self._session
        if session is not None and self._barriers is not None and self._begins_phase("begin"):
            if self._is_traced_anew or self.model.run_eagerly:  # its first step shows what it is
                self._awaits_step = True
                self._try_first()
            else:
                self._begin_phase(self._again(session))
        elif self._succeeds:  # the run has ended, and this model keeps its own weights
            self._awaits_step = True
            self._try_first()
        elif not self.stopped:
            self._join()
            self._report_fit()
        if self.stopped:
            self.model.stop_training = self._came_late = True
            logging.warning(
                "the run has ended (%s) before this fit, which does not train %r",
                self.stop_reason or "interrupted",
                self.model.name,
            )

    # -- phases of the script -----------------------------------------------------------------

    def _begins_phase(self, where: str) -> bool:
        """Wait until all scripts begin this `fit`, or have left it, each with its model.

        Returns:
            Whether some script's model is another one than the run's: weights that were set, or
            what `compile` and `trainable` have changed.
        """
        changes = self._succeeds or (not self.stopped and not self._joined.has_run_s_values)
        if where == "begin":
            trained = [id(each) for each in self.model.trainable_variables]
            is_other = self.model.run_eagerly and trained != self._trained
            changes = changes or is_other or self._is_traced_anew
        opening = self._wait_for_others(where, changes)
        self._phase_at, self._offers = where, opening is not None and opening.offers
        return opening is not None and opening.changes

    def _again(self, session: Session) -> Session:
        """Return this worker in the next phase, of the same variables."""
        return self._new_session(self._plan, self._shared or session.shared)

    def _begin_phase(self, session: Session) -> None:
        """Go on with the model of the script that offers its own."""
        before, where, self._awaits_step = self._session, self._phase_at, False
        self._succeeds = False
        if before is not None:
            self._exchanges_before = self.num_exchanges
            before.close("done")
            if before.stopped:
                session.end_as(before)
        with self._lock:
            self._session = session
        for step in self._steps:
            step.known_rate = 0.0 if step.rate is None else float(step.rate.numpy())
        if self._offers:
            self._join()
        if self._wait_for_others(f"{where}-offered") is None:
            return
        if not self._offers:
            self._join()
        self._wait_for_others(f"{where}-joined")
        if where == "begin":
            self._report_fit()
        self._seed_apart(session.own.id_worker)

    def _take_over_own(self) -> None:
        """Let all workers go on with weights that callbacks have set at the end of `fit`."""
        session = self._session
        if session is None or self._barriers is None or self.stopped:
            return
        if self._begins_phase("left"):
            self._begin_phase(self._again(session))

    # -- several models, one after the other -----------------------------------------------------

    def _succeed(self) -> None:
        """Take this worker's place in the run over from the model that the script trained before.

        The next phase is then this model's. The fits of all models are counted together.

        Raises:
            ConfigurationError: That model is being trained, or by a loop.
        """
        if not self._is_offered:
            return
        others = self._others
        for other in others:
            if other._in_fit or other._in_loop:
                self._refuse_second_model(other, in_loop=other._in_loop)
        before = next((other for other in others if other._is_member), None)
        if before is None or before._session is None:
            return
        if self._in_loop:
            self._refuse_second_model(before, in_loop=True)
        interrupts.remove_listener(before._interrupt)
        if self._barriers is None:
            RECORD.at_end(self._leave_loop)
        self._session, self._barriers = before._session, before._barriers
        before._is_member, self._is_member, self._succeeds = False, True, True
        self._is_behind, self._has_warned = before._is_behind, before._has_warned
        self._passed_over, self._lost = set(), dict(before._lost)
        if before._passed_over and before._shared is not None:
            self._lost |= {id(each): each for each in before._shared.variables}
        if self._barriers is not None:
            self._barriers.on_stop = self._stop

    @property
    def _others(self) -> list[ModelSession]:
        """This worker's other models."""
        return [
            other
            for other in RECORD.sessions
            if isinstance(other, ModelSession) and other is not self and other.place == self.place
        ]

    def _refuse_second_model(self, other: ModelSession, in_loop: bool) -> NoReturn:
        """Refuse to train this model beside another one.

        Args:
            other: Of that model.
            in_loop: Whether a loop trains one of them.

        Raises:
            ConfigurationError: Always.
        """
        what = "a loop of the script's own trains one of them" if in_loop else "both at a time"
        raise ConfigurationError(
            f"{self.model.name!r} is a second model that this script trains with "
            f"thinwire.distribute(), beside {other.model.name!r} ({what}); expected models that "
            "model.fit(...) trains one after the other. Leave distribute() out for the one, which "
            "every worker then trains alone, train it in a run of its own, or distribute each "
            "optimizer of a loop: optimizer = thinwire.distribute(optimizer, model=model)."
        )

    # -- building, epochs, the end ------------------------------------------------------------

    def _try_first(self) -> None:
        """Let the first step be traced twice where that alone shows what is to be offered."""
        model = self.model
        if model.run_eagerly or not self._needs_trial:
            return
        alone = model.train_function

        def first(iterator: Any) -> Any:
            model.train_function = alone
            data_spec, iterator = take_first(iterator)
            self._join_first(self._try_out(try_in_graph, data_spec))
            return alone(iterator)

        model.train_function = first

    def _build_optimizer(self) -> None:
        """Create the variables of the compiled optimizer, where it steps all of the model's."""
        if self._step is not None and is_built(self.model):  # else some of them are still to come
            self._step.build(self.model.trainable_variables)

    def begin_batch(self) -> None:
        """Count a mini-batch, or several in one execution; raise what went wrong before."""
        self.raise_failure()
        self._num_batches += 1
        if self._session is not None:
            self._session.begin_compute()

    def begin_epoch(self, epoch: int) -> None:
        """Find how many of the coming epoch's rounds this worker has no rows for.

        Args:
            epoch: As Keras counts them.
        """
        self._epoch = epoch
        self._to_sit_out = self._data.short_by
        self.traffic = EpochTraffic()
        if self._stop_is_known and epoch >= self._stops_after:  # before this `fit` began here
            self.model.stop_training = True

    def end_epoch(self) -> None:
        """Sit out the last rounds of an epoch, in which only others have rows; once.

        Where the epoch ends before its time, nobody waits for this worker's rounds any more.
        """
        self.raise_failure()
        session, number = self._session, self._to_sit_out
        self._to_sit_out = 0
        if session is None:
            return
        if self.model.stop_training:
            self._stop_others(after=0)
            self._finish_rounds(session)
            self.close("done")
            return
        for _ in range(number):
            with self._lock:
                if not session.stopped:
                    self._sit_out(session)
        self.raise_failure()

    # -- evaluations by the Supervisor --------------------------------------------------------

    @property
    def is_evaluated_elsewhere(self) -> bool:
        """Whether `fit` takes over what the Supervisor's evaluator finds, as all workers do."""
        is_launched = self._settings is not None and self._settings.is_launched
        return is_launched and self._in_fit and self._takes_part

    @property
    def _takes_part(self) -> bool:
        """Whether this script's fits are those that all scripts are in."""
        return self._barriers is not None and not self.stopped and not self._is_behind

    def evaluate(self, alone: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """Return the metrics of the validation data at the end of the present epoch.

        The run's weights are evaluated once, by the Supervisor's evaluator, and all workers wait
        for that. Where nobody evaluates there are no metrics; where the run has ended, this worker
        evaluates its own weights.

        Args:
            alone: Keras' evaluate.
            keywords: Its arguments, as `fit` gives them.
        """
        callbacks = keywords["callbacks"]
        callbacks.on_test_begin()
        found = None if self._barriers is None else self._barriers.evaluate(self._epoch)
        if isinstance(found, pb.Evaluated):
            self._warn_of(found)
            logs = decode_metrics(found.metrics)
        else:
            self._take_end(found)
            logs = alone(**keywords | {"callbacks": None, "verbose": 0})
        callbacks.on_test_end(logs)
        return logs

    def _warn_of(self, found: pb.Evaluated) -> None:
        """Name, once, why there are no metrics."""
        if found.nobody and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "epoch %d was not evaluated (%s): History and callbacks have no val_* of it, nor "
                "of later ones, until a Supervisor evaluates again",
                found.epoch + 1,
                found.nobody,
            )

    def _report_fit(self) -> None:
        """Report a `fit` of a run that has a Supervisor of ours."""
        if self._session is not None and self._barriers is not None and self._takes_part:
            fit = describe_fit(self.model, self.variables, self._session.part.core.layouts)
            fit.validates, fit.phase = self._validates, self._session.phase
            self._barriers.begin_fit(fit)

    def report_history(self, history: Any) -> None:
        """Report what `fit` has returned."""
        is_known = isinstance(history, keras.callbacks.History)  # else of a fit of the script's own
        if self._barriers is not None and not self.stopped and is_known:
            self._barriers.end_fit(describe_history(history))

    def _sit_out(self, session: Session) -> None:
        """Take part in a round with nothing, which leaves the others' mean as it is."""
        for number in self._sequence[:1] if self.takes_weights else self._sequence:
            weights = session.weights
            nothing = weights.copy() if self.takes_weights else np.zeros_like(weights)
            step = self._steps[number]
            number = 0 if self.takes_weights else number
            figures = ScriptFigures(loss_scale=session.loss_scale, optimizer=number)
            means, held = session.means.copy(), session.weights
            self._try_step(step, held, nothing, 0, 0.0, means, step.known_rate, figures)
        session.assign()

    def raise_failure(self) -> None:
        """Raise what went wrong in an exchange, where TensorFlow would have swallowed it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def ends_fit(self) -> bool:
        """Leave after the last step, and take over what all workers have made.

        Returns:
            Whether the optimizer's own averages are of this run.

        Raises:
            ConfigurationError: There were steps, and none of them reached the run.
        """
        if not self._has_left:
            self._has_left = True
            self._end_fit()
        return self._session is not None and (self.takes_weights or self._has_slots)

    def _stop_others(self, after: int) -> None:
        """Let the scripts of all workers end this `fit`, where this one has set stop_training.

        Args:
            after: How many epochs, so that callbacks act in the same one everywhere; 0: in the
                middle of one, where nothing can be waited for.
        """
        if self._stop_is_known or not self.model.stop_training or self.stopped:
            return
        self._stop_is_known = True
        if self._barriers is not None:
            self._barriers.stop_fit(after)

    def _stop(self, after: int) -> None:
        """End this `fit` after so many epochs, as another script has (any thread)."""
        self._stops_after, self._stop_is_known = after, True
        if self._in_fit and self._epoch >= after:
            self.model.stop_training = True

    def stop_if_due(self) -> None:
        """End this `fit` with the present epoch, if another script has ended its own there."""
        if self._stop_is_known and self._epoch + 1 >= self._stops_after:
            self.model.stop_training = True

    def _end_fit(self) -> None:
        self.raise_failure()
        self._stop_others(after=self._epoch + 1)
        is_passed_over = self._is_behind or self._came_late
        if self._num_batches and not self._num_calls and not is_passed_over:
            raise ConfigurationError(
                f"{self._num_batches} steps of {self.model.name!r} exchanged nothing: its "
                "train_step never reached an optimizer, so this worker trained alone. Expected "
                "self.optimizer.apply_gradients(...), or that of another optimizer, in each step."
            )
        set_here = self._weights_set_here()
        if self._session is not None and self._is_offered:
            self._finish_rounds(self._session)
            self._take_final(self._session)
        self.close("done")
        if self._session is not None and self._is_offered and self._wait_for_others("end"):
            self._join()
            if not self._is_behind:
                state = self._fetch(self._session)
                self._has_slots = state is not None and self._fill_slots(self._session, state)
            # Else the rounds of a worker that is started again would wait for this one.
            self.close("done")
        if self._session is not None and set_here is not None and not self.stopped:
            self._session.variables.assign(set_here)
        if self.stopped:
            logging.info("fit ended with the run (%s)", self.stop_reason or "interrupted")

    def _weights_set_here(self) -> Float32 | None:
        """Return the model's weights [n] if a callback has set them after the last step."""
        session = self._session
        if session is None or not self._is_offered or session.stopped or self._is_behind:
            return None
        held = session.variables.read()
        return None if _is_like(held, session.weights) else held

    def _take_final(self, session: Session) -> None:
        """Take over what a run has ended with, while its shards wait for this worker to leave."""
        is_over = session.stopped and session.stop_reason in END_REASONS
        if not is_over or self._is_behind or not session.part.run_id:
            return
        state = self._fetch(session, weights=True)
        if state is not None:
            session.assign(state.weights())
            self._has_slots = self._fill_slots(session, state)

    def _fetch(self, session: Session, weights: bool = False) -> CentralState | None:
        """Return what the shards hold; None: a PS steps with no optimizer, or does not answer."""
        offer = self._offer
        if offer is None or not (offer.optimizers or weights):
            return None
        try:
            return session.fetch(weights)
        except (StreamLost, Unreachable, RequestRejected) as error:
            logging.warning("the model keeps its own state: %s", error)
            return None

    def _fill_slots(self, session: Session, state: CentralState) -> bool:
        """Let the compiled optimizer have the state that the PS made, for callbacks and saving.

        Returns:
            Whether a PS has made one.
        """
        offer, steps = self._offer, self._steps
        if offer is None or not offer.optimizers:
            return False
        before = [None if step.rate is None else float(step.rate.numpy()) for step in steps]
        try:
            session.fill_slots([step.inner for step in steps], state)
        except (ConfigurationError, ValueError) as error:
            logging.warning("the compiled optimizer keeps its own state: %s", error)
            return False
        for step, rate in zip(steps, before, strict=True):
            if state.scale_streak is not None:
                step.assign_streak(state.scale_streak)
            if rate is None:
                continue
            was_set = rate != np.float32(step.known_rate)  # after the last push, as callbacks may
            step.known_rate = float(step.rate.numpy())
            if was_set:
                step.assign_rate(rate)
        return True

    # -- files ------------------------------------------------------------------------------

    @property
    def writes_files(self) -> bool:
        """Whether this worker's script writes the files that all scripts would."""
        settings = self._settings
        if settings is None or not self._is_offered:
            return True
        return settings.worker().id_worker == RECORD.chief

    @contextlib.contextmanager
    def saving(self, is_own: bool) -> Iterator[bool]:
        """Have the model as it is to be saved; see `thinwire.keras.saving.SavingWorker`."""
        writes = self.writes_files
        with self.central() if writes or is_own else contextlib.nullcontext():
            yield writes or is_own
        if not (is_own or self._in_fit or self._barriers is None or self.stopped):
            ended = self._barriers.saved(writes, self._in_loop)
            if ended is not None:
                self._raise_if_broken(ended.cause, ended.message)

    @property
    def _present(self) -> Session | None:
        """The session, unless the run has ended, or this model has no part in it now."""
        session = self._session
        is_absent = session is None or session.stopped or self._succeeds or self._has_left
        return None if is_absent else session

    @contextlib.contextmanager
    def central(self) -> Iterator[None]:
        """Have weights, statistics and the optimizer as they are on the shards, in mid-`fit`.

        Afterwards this worker goes on with its own weights. Weights that a callback has put into
        the model stay there.
        """
        session = self._present
        if session is None or not self._in_fit:
            yield
            return
        own = session.variables.read(), session.statistics.read()
        is_own = _is_like(own[0], session.weights)
        state = self._fetch(session, weights=True) if is_own else None
        if state is None:
            yield
            return
        session.assign(state.weights())
        self._fill_slots(session, state)
        try:
            yield
        finally:
            session.assign(own)

    def refresh_averages(self) -> None:
        """Let the compiled optimizer have the PS's moving averages of the weights, in mid-`fit`."""
        session = self._present
        if session is None:
            return
        averages = any(step.inner.use_ema for step in self._steps)
        if averages and (state := self._fetch(session)) is not None:
            self._fill_slots(session, state)

    def _finish_rounds(self, session: Session) -> None:
        """Send the local steps that no exchange has taken along."""
        with self._lock:
            if not session.stopped:
                session.flush()

    def _wait_for_others(self, where: str, changes: bool = False) -> Opening | None:
        """Wait until all scripts have come to a barrier of this `fit`.

        Args:
            where: Which; see `FitBarriers.wait`.
            changes: Whether this script's model is another one than the run's.

        Returns:
            None: the run has ended.
        """
        if self.stopped:
            return None
        if self._barriers is None or self._session is None:
            return Opening()
        opening = self._barriers.wait(where, changes)
        if isinstance(opening, Opening):
            return opening
        self._take_end(opening)
        return None

    def _take_end(self, ended: RunHalted | None) -> None:
        """Note the end of the run, if it has come; raise one that another script has spoiled."""
        if ended is not None and self._session is not None:
            self._session.part.core.stopped = True
            self._session.part.core.stop_reason = ended.cause
            self._raise_if_broken(ended.cause, ended.message)

    def _raise_if_broken(self, cause: str, message: str = "") -> None:
        """Raise the end of a run that another script has spoiled."""
        if FitBarriers.is_failure(cause):
            text = f"the run has ended ({cause}){f': {message}' if message else ''}"
            raise RunOver(text, cause)

    def _prepare(self) -> None:
        """Stand in for the compiled optimizer, whichever that is now."""
        model, step = self.model, self._step
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            return
        if model.jit_compile:
            logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
        model.jit_compile = False
        if step is not None and step.optimizer is optimizer:
            return
        if not self._is_offered:
            self._settings = self._settings_for(optimizer)
        self._step = self._stand_in(optimizer)
        if self._session is not None and not self._is_offered:  # no phase begins there
            self._steps = [self._step]

    def _settings_for(self, optimizer: Any) -> ScriptSettings:
        """Return the settings, with the compiled optimizer's momentum where the method has one."""
        args, keywords = self._given
        chosen = read_settings(args, keywords, type_node="Worker")
        momentum = momentum_of(optimizer)
        is_servers = momentum in (None, chosen.run.method.server.momentum)
        if not is_servers:
            chosen = read_settings(args, keywords, type_node="Worker", momentum=momentum)
        refuse_script_steps(chosen.run.method, "a worker whose server has its model from flags")
        check_optimizer(optimizer, chosen.run.method, takes_momentum=not is_servers)
        return chosen

    def _place(self) -> WorkerPlace | None:
        """Return this worker's place among those that share data; None: the script shares it."""
        if self._settings is None or not self._is_offered:
            return None
        place = WorkerPlace.of(self._settings.run, self._settings.worker().id_worker)
        return dataclasses.replace(place, shard="off") if self._shares_itself else place

    # -- one step, traced or eager ------------------------------------------------------------

    @property
    def _is_offered(self) -> bool:
        """Whether the server has its model, and its optimizer, from the workers."""
        return self._settings is not None and self._settings.run.model_is_offered

    @property
    def variables(self) -> list[Any]:
        """The shared variables, in order."""
        return self._joined.shared.variables

    @property
    def flat_variables(self) -> FlatVariables:
        """The same as one vector."""
        return self._joined.variables

    @property
    def flat_statistics(self) -> FlatVariables:
        """The moving statistics that are averaged over the workers; may be empty."""
        return self._joined.statistics

    @property
    def takes_weights(self) -> bool:
        """Whether the script's optimizers step here, and weights are exchanged, not gradients."""
        return self._joined.takes_weights

    @property
    def takes_momentum(self) -> bool:
        """Whether the method has taken the compiled SGD's momentum over."""
        if len(self._steps) != 1 or not self.takes_weights:
            return False
        method = self._joined.settings.run.method
        return method.takes_momentum and sgd_momentum(self._steps[0].inner) > 0

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuse an optimizer that would train some of the model's variables here alone.

        Raises:
            ConfigurationError: It does.
        """
        if self._session is not None:
            shared = self.variables
            if not W_global:
                shared = [*shared, *self.model.trainable_variables]
        elif self.model.trainable_variables:
            shared = shared_variables(self.model, numbers_paths=self._is_offered)
        else:
            return
        known = {id(each) for each in shared}
        touched = [variable for variable in variables if id(variable) in known]
        if not touched:
            return
        raise ConfigurationError(
            f"{named(optimizer)} steps {touched[0].path} and {len(touched) - 1} more variables of "
            f"{self.model.name!r} on this worker alone; expected an optimizer that exchanges. In a "
            "train_step let it step in the first call already, for what steps there is shared; in "
            "a loop of your own write `optimizer = thinwire.distribute(optimizer, model=model)`."
        )

    def train_step(self, data: Any) -> Any:
        """Call the model's own `train_step`, whose optimizers' `apply` then comes here."""
        self._begin_loop()
        compiled = None if self._step is None else self._step.optimizer
        if compiled is not getattr(self.model, "optimizer", None):
            raise ConfigurationError(
                "the model was compiled while its fit was running; compile it before or after."
            )
        is_first = (self._session is None or self._awaits_step) and self._is_offered
        if is_first and tf.executing_eagerly() and self._needs_trial:
            self._join_first(self._try_out(self._try_eagerly, data))
        try:
            return self._call(data)
        except WeightsChanged:  # only where steps run eagerly: the first one of the first fit
            self.model.reset_metrics()
            return self._call(data)

    def _call(self, data: Any) -> Any:
        """Call the model's own `train_step`, and exchange the weights that its steps have made.

        Raises:
            ConfigurationError: No optimizer steps in it.
        """
        call = self.call = StepCall(count_rows(data), ends_later=True)
        try:
            return self._end_call(call, self.own_train_step(data))
        finally:
            self.call = self._own_loop

    def _end_call(self, call: StepCall, logs: Any) -> Any:
        if not call.applied:
            self._refuse_without_step()
        self._sequence = [step.number for step in call.applied]
        if self.takes_weights:
            call.applied[-1].exchange_weights()
        return logs

    def _refuse_without_step(self) -> NoReturn:
        raise ConfigurationError(
            f"the train_step of {self.model.name!r} does not step with any optimizer of Keras, so "
            "each worker would train alone; expected self.optimizer.apply_gradients(...), or that "
            "of other optimizers, in each step. Or leave thinwire.distribute() out."
        )

    @property
    def _is_standard(self) -> bool:
        """Whether the model's train_step is Keras' own, which has one optimizer."""
        return getattr(self.own_train_step, "__func__", None) is keras.Model.train_step

    def _try_eagerly(self, train_step: Callable[[Any], Any], data: Any) -> None:
        try_eagerly(train_step, data, lambda: self.model.variables)
        self.model.reset_metrics()

    @property
    def _needs_trial(self) -> bool:
        """Whether only a trial shows what steps, or creates the model's variables.

        Inside a trace new variables have no values yet, and values are what is offered to a PS.
        """
        if not self._is_standard:
            return True
        return not (is_built(self.model) or self.model.run_eagerly)

    def _try_out(self, attempt: Callable[[Callable[[Any], Any], Any], None], data: Any) -> StepPlan:
        """Return what a train_step does, without doing it.

        Args:
            attempt: How it is called.
            data: A mini-batch, or the form of one.

        Raises:
            ConfigurationError: No optimizer steps in it.
        """
        num_variables = len(self.model.variables)
        with recording() as recorder:
            attempt(self.own_train_step, data)
        if len(self.model.variables) > num_variables:  # new ones have no gradients where they arise
            return self._try_out(attempt, data)
        plan = recorder.plan()
        if not plan.steps:
            self._refuse_without_step()
        return plan

    def begin_step(self, step: ExchangeStep, pairs: Pairs) -> bool:
        """Join at the first step, and check what each is given; see `StepOwner`."""
        self._begin_loop()
        is_new = self._session is None or self._awaits_step
        has_changed = is_new and self._join_first(self._first_plan(step, pairs))
        variables = [variable for _, variable in pairs]
        check_same_variables(self.variables, variables)
        if step not in self._steps:
            self.refuse_step(step.optimizer, variables)
        elif not self.takes_weights and self._is_offered:
            self._check_own(step, variables)
        return not has_changed

    def _first_plan(self, step: ExchangeStep, pairs: Pairs) -> StepPlan:
        if self.call.ends_later:
            return StepPlan((PlannedStep.of(step.optimizer, pairs),))
        return self._loop.plan(step, pairs)

    def _check_own(self, step: ExchangeStep, variables: Sequence[Any]) -> None:
        """Refuse other variables than those that the PS steps with an optimizer.

        Raises:
            ConfigurationError: Those of another optimizer, or not all of its own.
        """
        shared, unused = self.variables, set(self._offer.unused if self._offer else ())
        groups = self._offer.groups() if self._offer else []
        for number, numbers in enumerate(groups):
            given = {id(variable) for variable in variables}
            for each in numbers:
                variable, path = shared[each], self._joined.shared.spec.tensors[each].path
                is_given = id(variable) in given
                if is_given == (number == step.number) or (not is_given and path in unused):
                    continue
                what = "steps" if is_given else "does not step"
                raise ConfigurationError(
                    f"{named(step.optimizer)} {what} {path}, and the PS steps with it what was "
                    "known of it at the first step; expected the same variables in each step. "
                    "Distribute each optimizer with the model that it steps, as in "
                    "thinwire.distribute(optimizer, model=generator), or build it before the loop: "
                    "optimizer.build(generator.trainable_variables)."
                )

    # -- loops of the script's own --------------------------------------------------------------

    def add_optimizer(self, optimizer: Any, models: Sequence[keras.Model]) -> None:
        """Let an optimizer of a loop exchange, beside those that do already.

        Args:
            optimizer: Built or not.
            models: Whose variables it steps.

        Raises:
            ConfigurationError: The loop has begun.
        """
        if self._session is not None and id(optimizer) not in self._stand_ins:
            raise ConfigurationError(
                f"distribute() was given {named(optimizer)} after the first step of "
                f"{self.model.name!r}; expected it before: the first step shows the PS all "
                "optimizers."
            )
        self.model = Together.of(self.model, models)
        self._loop.add(self._stand_in(optimizer), models)

    def _begin_loop(self) -> None:
        """Begin a loop of the script's own, where the step that is under way is of no `fit`.

        Raises:
            ConfigurationError: The server's model and optimizer come from its flags.
        """
        if self._in_fit or self._in_loop:
            return
        if not self._is_offered:
            raise ConfigurationError(
                f"{self.model.name!r} is trained by train_on_batch or a loop of its own; expected "
                "model.fit(...), for this server has its optimizer from flags. Start the script "
                "with `thinwire run`, or use thinwire.GradientSGD in the place of the optimizer "
                "and leave thinwire.distribute() out."
            )
        for other in self._others:
            if other._session is not None:
                self._refuse_second_model(other, in_loop=True)
        self._in_loop = True
        self._prepare()
        logging.info(
            "%r is trained by a loop of the script's own, whose data is the script's own affair: "
            "thinwire.worker_id() of thinwire.num_workers(), or model.thinwire.shard(...)",
            self.model.name,
        )

    @contextlib.contextmanager
    def on_batch(self) -> Iterator[None]:
        """Be ready for one call of Keras' train_on_batch.

        Raises:
            ConfigurationError: The server's model and optimizer come from its flags.
        """
        self._begin_loop()
        self._prepare()
        if self._session is None:
            if self._is_standard:
                self._build_optimizer()
            self.model.make_train_function()
            self._try_first()
        try:
            yield
        except tf.errors.OpError:
            self.raise_failure()
            raise

    def _leave_loop(self, failed: bool, message: str) -> None:
        """Leave the run when the script has ended."""
        del message
        if self._session is not None and not failed:
            self._finish_rounds(self._session)
        self.close("error" if failed else "done")

    def refresh(self, with_slots: bool) -> None:
        """Let the model have what the shards hold, between two steps of a loop.

        Args:
            with_slots: The optimizers, too.
        """
        session = self._session
        if session is None or self._in_fit or not self._in_loop or self._failure is not None:
            return
        if not session.stopped:
            held = session.variables.read()
            if self.takes_weights and not _is_like(held, session.weights):
                return  # the script has set them; they travel with its next step
            self._check_held(session, held)
        self._finish_rounds(session)
        with self._lock:
            if not session.stopped:
                session.pull()
            session.assign()
        state = self._fetch(session) if with_slots and not session.stopped else None
        if state is not None:
            self._fill_slots(session, state)

    def _join_first(self, plan: StepPlan) -> bool:
        """Join, or begin a phase, once it is known what steps.

        Returns:
            Whether the model has other weights than before.
        """
        shared = SharedModel.of(self.model, self._is_offered, plan.variables)
        session = self._new_session(plan, shared)
        before = session.variables.read()
        if len(before) != session.variables.size:
            raise ConfigurationError(
                f"{self.model.name!r} creates its variables within its first step, where they have "
                "no values yet; expected a model that is built before. Call it on one mini-batch "
                "before fit: model(x[:1])."
            )
        check_same_variables(shared.variables, plan.variables)
        self._trained = [id(each) for each in self.model.trainable_variables]
        self._shared = shared
        if self._session is not None:
            self._begin_phase(session)
            return not np.array_equal(before, session.weights)
        self._session, self._is_member = session, True
        self._join()
        if self._is_offered and not session.stopped:
            self._follow_rate(session)
            run = session.settings.run
            self._barriers = FitBarriers(
                run, session.own.id_worker, session.part.run_id, self._stop
            )
            RECORD.at_end(self._leave_loop)
            if self._in_fit:
                self._barriers.count_fit()
                self._wait_for_others("begin")
                self._report_fit()
            self._seed_apart(session.own.id_worker)
        return not np.array_equal(before, session.weights)

    def exchange(
        self,
        step: ExchangeStep,
        repeats: bool,
        in_turn: bool,
        values: Float32,
        rows: int,
        loss: float,
        held: Float32,
        statistics: Float32,
        rate: float,
        scale: float,
        sparse: Sequence[int],
        *touched: Any,
    ) -> tuple[Float32, Float32, np.float32, np.float32, int]:
        """Step; called by TensorFlow, in a thread of its own, where an exception would be lost.

        Args:
            step: Of which optimizer.
            repeats: Whether its examples were counted before.
            in_turn: Whether other optimizers of a loop may step before weights are exchanged.
            values: [num_parameters] float32 gradient, or weights; a view into TensorFlow's own.
            rows: Examples in the mini-batch.
            loss: Its mean loss.
            held: [num_parameters] float32 weights of the model where `values` are a gradient.
            statistics: [m] float32 moving statistics after it.
            rate: The optimizer's learning rate; a callback may have changed it.
            scale: What the loss was multiplied by; 0: nothing, or the optimizer unscales itself.
            sparse: Numbers of the variables whose gradients name their rows.
            touched: Those rows, of one variable each, in any order and repeated.

        Returns:
            weights [num_parameters], statistics [m], learning rate, loss scale and the schedule's
            count to go on from.
        """
        session = self._joined
        with self._lock:
            if in_turn and not self._loop.is_due(step):
                return self._unchanged(values, statistics, rate, scale)
            if not (
                self._in_fit and self.model.stop_training
            ):  # else the rest of several steps in one execution
                figures = ScriptFigures(
                    learning_rate=self._set_rate(step, float(rate)),
                    loss_scale=float(scale),
                    overflow=bool(scale) and not np.isfinite(values).all(),
                    optimizer=0 if self.takes_weights else step.number,
                    repeats_batch=repeats,
                    touched={
                        int(number): np.unique(each)
                        for number, each in zip(sparse, touched, strict=True)
                    },
                )
                own, rows = np.array(values), int(rows)
                given = own, rows, float(loss), statistics, float(rate), figures
                self._try_step(step, session.weights if self.takes_weights else held, *given)
            if not self._is_offered:
                step.known_rate = session.part.core.learning_rate * self._rate_factor
            return (
                session.weights.copy(),
                session.means.copy(),
                np.float32(rate if self._is_offered else step.known_rate),
                np.float32(session.loss_scale or scale),
                0 if self.clock is None else self.clock.advance(session.samples_of_phase),
            )

    def _unchanged(
        self, values: Float32, statistics: Float32, rate: float, scale: float
    ) -> tuple[Float32, Float32, np.float32, np.float32, int]:
        """Return what a local step goes on from that no exchange follows."""
        count = 0 if self.clock is None else int(self.clock.variable.numpy())
        own = np.array(values), np.array(statistics)
        return (*own, np.float32(rate), np.float32(scale), count)

    def _set_rate(self, step: ExchangeStep, rate: float) -> float | None:
        """Return a rate that the script has set since the last push; the PS then steps with it."""
        if not self._is_offered or self.takes_weights or rate == np.float32(step.known_rate):
            return None
        step.known_rate = rate
        return rate

    def _try_step(self, step: ExchangeStep, held: Float32, *arguments: Any) -> None:
        """Step; keep an error for `fit` to raise.

        Args:
            step: Of which optimizer.
            held: [num_parameters] float32 weights that the model has.
            arguments: Of `_one_step`.
        """
        session = self._joined
        self._num_calls += 1
        try:
            if not session.stopped:
                self._check_held(session, held)
                self._one_step(session, step, *arguments)
            if session.stopped:
                self._raise_if_broken(session.stop_reason)
                self._report_end()
        except Exception as error:
            self._failure = error  # which `fit` raises before its next batch
            if not self._in_fit:
                RECORD.fail(error)
                raise
        finally:
            if self._failure is not None or session.stopped:
                self.model.stop_training = True

    def _check_held(self, session: Session, held: Float32) -> None:
        """Refuse to step from weights that a script has changed itself, where the PS steps.

        Args:
            session: Of the run.
            held: [num_parameters] float32 weights that the model has.

        Raises:
            ConfigurationError: They are not those that the run gave it last.
        """
        if _is_like(held, session.weights):
            return
        changed = np.flatnonzero(held != session.weights)
        path = session.shared.spec.tensors[
            int(np.searchsorted(session.shared.spec.offsets, changed[0], "right")) - 1
        ].path
        raise ConfigurationError(
            f"the script has changed {len(changed)} weights of {self.model.name!r} itself since "
            f"the newest step, the first of them in {path}: by assign or set_weights in a "
            "train_step, a loop, a layer or a callback. The PS steps from its own weights, so that "
            "this would be lost; expected weights that only optimizers and constraints change "
            "while the model trains. Take a method whose workers step themselves, which exchange "
            "whatever has changed: --method=dgs, --method=dgc, --method=gd or --method=esync."
        )

    def _report_end(self) -> None:
        """Name, once, that steps of a loop change nothing any more."""
        if self._in_loop and not self._in_fit and not self._has_reported_end:
            self._has_reported_end = True
            logging.warning(
                "the run has ended (%s): further steps of %r change nothing; a loop can leave by "
                "optimizer.thinwire.stopped",
                self.stop_reason or "interrupted",
                self.model.name,
            )

    def _one_step(
        self,
        session: Session,
        step: ExchangeStep,
        values: Float32,
        rows: int,
        loss: float,
        statistics: Float32,
        rate: float,
        figures: ScriptFigures,
    ) -> None:
        is_new = abs(rate - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate)
        if is_new and not self._is_offered:
            self._scale_to_rate(session, rate)
        self.last = session.step(values, rows, loss, statistics, self._rate_factor, figures)
        self.traffic.add(self.last)

    def _scale_to_rate(self, session: Session, rate: float) -> None:
        """Step with a rate that the script has set, where the server has its own."""
        factor = rate / session.part.core.learning_rate
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self._rate_factor:
            check_rate_change(rate, session.settings.run.method)
        self._rate_factor = factor

    # -- joining ------------------------------------------------------------------------------

    @property
    def _joined(self) -> Session:
        if self._session is None:
            raise RuntimeError("the model has not joined a run yet")
        return self._session

    def _new_session(
        self, plan: StepPlan | None = None, shared: SharedModel | None = None
    ) -> Session:
        settings, data = self._settings, self._data
        if settings is None:
            raise RuntimeError("the model trains alone")
        shared = shared or SharedModel.of(self.model, self._is_offered)
        if plan is not None:
            self._steps = [self._step_of(each, number) for number, each in enumerate(plan.steps)]
        elif self._step is not None:
            self._steps = [self._step]
        if plan is None or not self._is_offered:
            check_variables(shared.variables)
            return Session(settings, shared, self._num_train)
        method, self._plan = settings.run.method, plan
        plan.check(method, self.model.name)
        num_train = self._num_train or data.num_examples
        self._offer = make_offer(shared, plan, method, data.batch_size, num_train)
        own, before = [step.inner for step in self._steps], self._session
        if method.steps_on_workers and method.schedule_clock == "examples":
            self._begin_clock(own[0])
        takes_momentum = method.takes_momentum and len(own) == 1
        momentum = sgd_momentum(own[0]) if takes_momentum else 0.0
        phase = 0
        if before is not None and self._barriers is not None:
            phase = self._barriers.phase(self._phase_at)
        return Session(settings, shared, num_train, momentum, self._offer, own, before, phase)

    def _begin_clock(self, optimizer: Any) -> None:
        """Let schedules be read at the run's count from an optimizer's own on."""
        if self.clock is None:
            self.clock = RunClock(self._data, int(optimizer._iterations))
        else:
            is_new = optimizer is not self._counted
            self.clock.begin_phase(self._data, int(optimizer._iterations) if is_new else None)
        self._counted = optimizer

    def _step_of(self, planned: PlannedStep, number: int) -> ExchangeStep:
        """Return what stands in for an optimizer of a plan, which is built by now."""
        step = self._stand_in(planned.optimizer)
        step.number = number
        step.build(planned.variables)
        return step

    def _stand_in(self, optimizer: Any) -> ExchangeStep:
        """Return what stands in for an optimizer, once for each."""
        known = self._stand_ins.get(id(optimizer))
        if known is None:
            known = self._stand_ins[id(optimizer)] = ExchangeStep(optimizer, self)
        return known

    def _join(self) -> None:
        """Join or join again, and take over the server's weights."""
        is_first = self._session is None
        with self._lock:
            session = self._session = self._session or self._new_session()
            if session.part.closing.is_set():  # `fit` was interrupted
                session.close("interrupted")
                session.renew()
            if not session.stopped and self._opens(session):
                interrupts.add_listener(self._interrupt)
            if session.part.run_id:  # else the run was over, and the model keeps its own weights
                session.assign()
        if self.clock is not None:
            self.clock.start(session.samples_of_phase)
        for step in self._steps:
            step.assign_scale(session.loss_scale)
        if is_first and not self._is_offered and self._step is not None:
            self._adopt_rate(session, self._step)

    def _opens(self, session: Session) -> bool:
        """Join, unless the run is in a later phase of the script than this worker.

        A script that was started again passes over the fits that the run has behind it.
        """
        try:
            return self._catches_up(session)
        except RequestRejected as rejected:
            if rejected.reason != pb.REASON_PHASE:
                raise
            newest = rejected.phase
        if self._barriers is not None and newest <= self._barriers.phase(self._phase_at):
            session.go_to_phase(newest)
            return self._catches_up(session)
        if not self._is_behind:
            logging.warning("this fit is passed over: the run has it behind it")
        self._is_behind = self._stop_is_known = True
        self._passed_over |= {each.path for each in session.shared.variables}
        session.stay_behind()
        self.model.stop_training = True
        return False

    def _catches_up(self, session: Session) -> bool:
        """Join, after passing over fits or not; see `Session.open`.

        Raises:
            ConfigurationError: What those fits have trained is not with the run any more.
        """
        opened, self._is_behind = session.open(), False
        shared = {each.path for each in session.shared.variables}
        missing = sorted(self._passed_over - shared)
        known = {id(each) for each in session.shared.variables}
        missing += [each.path for number, each in self._lost.items() if number not in known]
        if missing:
            raise ConfigurationError(
                f"this script was started again in a later phase of its run: {missing[0]} and "
                f"{len(missing) - 1} more variables that an earlier fit has trained are not shared "
                "any more, so that their values are lost; expected a run that goes on with all "
                "that it has trained. Start it anew with --overwrite."
            )
        self._passed_over.clear()
        self._lost.clear()
        return opened

    def _follow_rate(self, session: Session) -> None:
        """Go on with the rate that the PS steps with; others, or an earlier start, may have set it.

        A rate that this script has set since `compile` goes to the PS.
        """
        if self.takes_weights or len(self._steps) > 1 or not session.part.core.versions[0]:
            return
        step = self._steps[0]
        if step.rate is not None and float(step.rate.numpy()) == np.float32(step.known_rate):
            step.adopt_rate(session.part.core.learning_rate)

    def _adopt_rate(self, session: Session, step: ExchangeStep) -> None:
        """Go on with the server's learning rate, unless the script has set one since `compile`."""
        if step.rate is None:
            return
        now = float(step.rate.numpy())
        if abs(now - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate):
            return
        warn_of_other_rate("the optimizer's learning_rate", now, session)
        step.adopt_rate(session.part.core.learning_rate)

    def _seed_apart(self, id_worker: int) -> None:
        """Let Dropout and the like draw otherwise than those of other workers do.

        The launcher seeds all scripts alike; worker 1 keeps its seeds.
        """
        for variable in self.model.non_trainable_variables:
            is_new = variable.name == _SEEDS and id(variable) not in self._seeded
            self._seeded[id(variable)] = variable
            if is_new and id_worker > 1:
                state = np.array(variable, np.int64)
                state[0] = (state[0] + (id_worker - 1) * _SEED_STEP) % _SEED_LIMIT
                variable.assign(state)

    def _interrupt(self) -> None:
        if self._session is not None:
            self._session.part.interrupt()
        if self._barriers is not None:
            self._barriers.interrupt()


def _is_like(mine: Float32, theirs: Float32) -> bool:
    """Return whether weights [n] are the same but for the rounding of SwapEMAWeights."""
    if np.array_equal(mine, theirs):
        return True
    scale = float(np.abs(theirs).max(initial=0.0))
    return not np.abs(mine - theirs).max(initial=0.0) > _ROUNDING * scale  # not, for NaN

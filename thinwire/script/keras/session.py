"""The worker of a distributed Keras model, which scripts use as ``model.thinwire``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.rows import count_rows
from thinwire.script.keras import central
from thinwire.script.keras.assignments import Assignments
from thinwire.script.keras.callbacks import EpochTraffic
from thinwire.script.keras.clock import RunClock
from thinwire.script.keras.evaluations import FitEvaluations
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.fit_lifecycle import FitLifecycle
from thinwire.script.keras.held_weights import takes_changes
from thinwire.script.keras.loops import LoopSteps, Together
from thinwire.script.keras.optimizers import ScriptOptimizers, settings_with_momentum
from thinwire.script.keras.own_loop import OwnLoop
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.plan import Pairs, PlannedStep, StepPlan, named
from thinwire.script.keras.row_sums import RowSums
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep, StepCall, WeightsChanged, watch_steps
from thinwire.script.keras.traces import refuse_compiling
from thinwire.script.keras.trial import StepTrial
from thinwire.script.session import LeavesOnExit, Session, part_of
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import StepInfo
from thinwire.worker.script import RECORD


class ModelSession(LeavesOnExit):
    """Trains one model as a worker in a run, in all calls of `fit` or in a training loop.

    It connects the modules of `thinwire.script.keras`. The steps within a TensorFlow graph exchange
    with the servers through this session.

    Attributes:
        calls: Maps the Python id of a distributed model or optimizer to the arguments of the call
            of `thinwire.distribute`.
        call: Data of the train_step in progress, or of all steps of a training loop: numbers of
            rows, loss, optimizers.
        evaluations: Object that evaluates the validation data within the model's `fit`.
        fits: Object that begins and ends the model's calls of `fit`.
        loop: Training loop that the script writes itself.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: ScriptSettings | None = None,
        args: Any = None,
        keywords: Mapping[str, Any] | None = None,
        num_train: int | None = None,
    ) -> None:
        """Create the session of a model with the servers.

        Args:
            model: Keras model, or one of the models that a training loop trains together.
            settings: Settings of the script; None if the model trains outside of a run.
            args: Argument `args` that the script passes to `thinwire.distribute`.
            keywords: Flags by name that the script passes to `thinwire.distribute`; None without
                flags.
            num_train: Number of rows of the whole training set; None if unknown.
        """
        self.calls: dict[int, Any] = {}
        settings_for = functools.partial(settings_with_momentum, args, dict(keywords or {}))
        member = self._member = RunMember(model, settings, self._others, num_train)
        member.optimizers = self._optimizers = ScriptOptimizers(member, self, settings_for)
        self._loop_steps = LoopSteps()
        self._endless = self.call = StepCall(1, ends_later=False)
        self._trial = StepTrial(model)
        self.evaluations = FitEvaluations(member)
        self._phases = Phases(member, self._trial, self.evaluations)
        self._exchange = StepExchange(member, self._optimizers, self._phases, self._loop_steps)
        self.exchange, self.raise_failure = self._exchange.exchange, self._exchange.raise_failure
        self._row_sums = RowSums(member, self._exchange, self._trial)
        self.fits = FitLifecycle(
            member, self._phases, self._exchange, self.evaluations, self._row_sums
        )
        self.loop = OwnLoop(member, self._phases, self._exchange)
        if settings is not None:
            watch_steps(self)
            self._optimizers.prepare()

    # -- for scripts ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True if the model trains in a run; False if it trains outside of a run."""
        return self._member.settings is not None

    @property
    def place(self) -> tuple[Sequence[str], int] | None:
        """The servers' addresses and this worker's number; None for a model outside of a run."""
        return self._member.place

    @property
    def stopped(self) -> bool:
        """True if the training run has ended."""
        return self._member.stopped

    @property
    def stop_reason(self) -> str:
        """The reason for the end of the run; an empty text while the run continues."""
        return self._member.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with the servers that have begun, over all calls of `fit`."""
        return self._member.num_exchanges

    @property
    def last(self) -> StepInfo | None:
        """Result of the model's newest exchange with the servers; None before the first step."""
        return self._exchange.last

    @property
    def traffic(self) -> EpochTraffic:
        """Bytes that this worker sent and received, and its staleness, in the present epoch."""
        return self._exchange.traffic

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set; the whole set outside of a run.

        After a call of `shard`, `fit` does not divide its data among workers, because the script
        passes only this worker's part of the data to `fit`.

        Args:
            data: Arrays or a data set, in any form that `thinwire.script.session.part_of` accepts.
        """
        settings = self._member.settings
        if settings is None:
            return data[0] if len(data) == 1 else data
        self.fits.shares_itself = True
        return part_of(settings, data, self._member.fit_counts.use(data[0]) if data else None)

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and its next `fit` joins the run again.

        Args:
            cause: Reason for leaving the run that is reported to the servers.
        """
        self._member.close(cause)

    def add_optimizer(self, optimizer: Any, models: Sequence[keras.Model]) -> None:
        """Let one more optimizer of a script's training loop exchange with the servers.

        Args:
            optimizer: Keras optimizer of the script's training loop, built or not.
            models: Models whose variables the optimizer updates.

        Raises:
            ConfigurationError: The training loop has taken its first step already.
        """
        member = self._member
        if member.session is not None and not self._optimizers.has(optimizer):
            raise ConfigurationError(
                f"distribute() received {named(optimizer)} after the first step of "
                f"{member.model.name!r}; expected the call before that step, when the PS receives "
                "the descriptions of all optimizers and models of a script's loops. Distribute "
                "all optimizers before the first loop begins: one = thinwire.distribute(one, "
                "model=first); other = thinwire.distribute(other, model=second). Or train the "
                "second model in a run of its own."
            )
        member.model = Together.of(member.model, models)
        self._loop_steps.add(self._optimizers.stand_in(optimizer), models)

    # -- for saved files --------------------------------------------------------------------------

    @property
    def writes_files(self) -> bool:
        """True if this worker writes the script's files; only one worker of a run writes them."""
        return self._member.writes_files

    def saving(self, is_own: bool) -> contextlib.AbstractContextManager[bool]:
        """Load the shards' state into the model while the script saves it; see `central.saving`."""
        return central.saving(self._member, is_own)

    def holds(self, tracked: Collection[int]) -> bool:
        """Return True if an object id in `tracked` is of this session's model or its optimizers."""
        models = getattr(self._member.model, "models", [self._member.model])
        return any(id(model) in tracked for model in models) or self._optimizers.are_in(tracked)

    def checkpointing(self, is_own: bool) -> contextlib.AbstractContextManager[bool]:
        """Load the shards' state into the model while TensorFlow saves a checkpoint."""
        if tf.executing_eagerly():
            self.loop.refresh(with_slots=True)
        return self.saving(is_own)

    def _others(self) -> list[RunMember]:
        """Return the memberships in the run of the other models that this script distributed."""
        return [
            other._member
            for other in RECORD.sessions
            if isinstance(other, ModelSession) and other is not self and other.place == self.place
        ]

    # -- a train_step ---------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        """Call the model's own `train_step`, whose optimizers push to the PS and pull from it."""
        refuse_compiling()
        self.loop.begin()
        member, step = self._member, self._optimizers.compiled
        compiled = getattr(member.model, "optimizer", None)
        if compiled is not (None if step is None else step.optimizer):
            raise ConfigurationError(
                "the model was compiled while its fit was running; compile the model before or "
                "after the fit."
            )
        is_first = member.state.begins_with_step and member.is_offered
        if is_first and tf.executing_eagerly() and self._trial.is_needed:
            self._phases.begin_with(self._trial.eagerly(data))
        try:
            return self._call(data)
        except WeightsChanged:
            # The first step of an eager train_step joins the run after it has computed a gradient,
            # and joining replaces the weights. The gradient at the old weights and the metrics are
            # dropped, and the train_step is called again.
            member.model.reset_metrics()
            return self._call(data)

    def _call(self, data: Any) -> Any:
        """Call the model's own `train_step`; exchange weights if optimizers step on this worker.

        Raises:
            ConfigurationError: The `train_step` calls no optimizer.
        """
        call = self.call = StepCall(count_rows(data), ends_later=True)
        try:
            with self._row_sums.step(data):
                logs = self._trial.train_step(data)
                if not call.applied:
                    self._trial.refuse_without_step()
                self._optimizers.sequence = [step.number for step in call.applied]
                if self._member.takes_weights:
                    call.applied[-1].exchange_weights()
            return logs
        finally:
            self.call = self._endless

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Reject an optimizer that would train shared variables on this worker alone."""
        self._optimizers.refuse_step(optimizer, variables)
        if not self._member.in_fit:
            self._loop_steps.name_other(optimizer, variables)

    def assignments_to(self, variable: Any) -> Assignments | None:
        """Return the record of a script's assignments to a variable; None if there is no record."""
        member = self._member
        self._optimizers.states.check_assignment(variable)
        if not member.is_offered:
            return None
        run = member.own_settings.run
        steps_each_time = run.method.steps_on_workers and not run.method.takes_local_steps
        # If assignments are not recorded, a comparison of weights finds the script's changes.
        if not (steps_each_time and takes_changes(run)):
            return None
        is_trainable = any(variable is trainable for trainable in member.model.trainable_variables)
        return member.assignments if is_trainable else None

    # -- for the steps: the methods of `thinwire.script.keras.step.StepOwner` --------------------

    @property
    def joined(self) -> Session:
        """The session with the servers; raises an error if the model has not joined the run yet."""
        return self._member.joined

    @property
    def takes_momentum(self) -> bool:
        """True if the training method, not the optimizer, applies the compiled SGD's momentum."""
        return self._optimizers.takes_momentum

    @property
    def clocks(self) -> Sequence[RunClock | None]:
        """For each optimizer, the run's batch count for its rate schedule; None: no schedule."""
        return [step.clock for step in self._optimizers.stepping]

    @property
    def assignments(self) -> Assignments:
        """Record of the script's own assignments to shared variables."""
        return self._member.assignments

    def ends_fit(self) -> bool:
        """Leave the run after a `fit`; return True if the optimizer has this run's averages."""
        return self.fits.leave()

    def begin_step(self, step: ExchangeStep, pairs: Pairs) -> bool:
        """Join the run at the first step, and check which variables the optimizer updates."""
        has_changed = self.loop.begin()
        if self._member.state.begins_with_step:
            if self.call.ends_later:
                plan = StepPlan((PlannedStep.of(step.optimizer, pairs),))
            else:
                plan = self._loop_steps.plan(step, pairs)
            has_changed = self._phases.begin_with(plan)
        self._optimizers.check_step(step, [variable for _, variable in pairs])
        return not has_changed

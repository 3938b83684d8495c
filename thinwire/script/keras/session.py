"""The worker of a distributed Keras model, which scripts use as ``model.thinwire``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.data.rows import count_rows
from thinwire.script.keras import central
from thinwire.script.keras.compiled_step import CompiledSteps
from thinwire.script.keras.evaluations import FitEvaluations
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.fit_lifecycle import FitLifecycle
from thinwire.script.keras.held_weights import Assignments
from thinwire.script.keras.loops import LoopSteps, Together
from thinwire.script.keras.optimizers import ScriptOptimizers, settings_with_momentum
from thinwire.script.keras.own_loop import OwnLoop
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.plan import Pairs, PlannedStep, StepPlan, named
from thinwire.script.keras.row_sums import RowSums
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import (
    ExchangeStep,
    StepAnswer,
    StepCall,
    StepValues,
    WeightsChanged,
    watch_steps,
)
from thinwire.script.keras.trial import StepTrial
from thinwire.script.own_changes import takes_changes
from thinwire.script.session import LeavesOnExit, part_of
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import EpochTraffic, StepInfo


class ModelSession(RunMember, LeavesOnExit):
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
        compiled_steps: Steps of a stateless backend, whose compiled part exchanges nothing.
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
        super().__init__(model, settings, num_train)
        self.calls: dict[int, Any] = {}
        settings_for = functools.partial(settings_with_momentum, args, dict(keywords or {}))
        self._optimizers = ScriptOptimizers(self, self, settings_for)
        self._loop_steps = LoopSteps()
        self._endless = self.call = StepCall(1, ends_later=False)
        self._trial = StepTrial(model)
        self.evaluations = FitEvaluations(self)
        self._phases = Phases(self, self._optimizers, self._trial, self.evaluations)
        self._exchange = StepExchange(self, self._phases, self._loop_steps)
        self.exchange: Callable[[ExchangeStep, bool, bool, StepValues], StepAnswer]
        self.exchange, self.raise_failure = self._exchange.exchange, self._exchange.raise_failure
        self._row_sums = RowSums(self, self._exchange, self._trial)
        self.fits = FitLifecycle(
            self, self._phases, self._exchange, self.evaluations, self._row_sums
        )
        self.loop = OwnLoop(self, self._optimizers, self._phases, self._exchange)
        self.compiled_steps = CompiledSteps(self, self._phases, self._trial, self._row_sums)
        if settings is not None:
            watch_steps(self)
            self._optimizers.prepare()

    # -- for scripts ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True if the model trains in a run; False if it trains outside of a run."""
        return self.settings is not None

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
        settings = self.settings
        if settings is None:
            return data[0] if len(data) == 1 else data
        self.fits.shares_itself = True
        return part_of(settings, data, self.fit_counts.use(data[0]) if data else None)

    def add_optimizer(self, optimizer: Any, models: Sequence[keras.Model]) -> None:
        """Let one more optimizer of a script's training loop exchange with the servers.

        Args:
            optimizer: Keras optimizer of the script's training loop, built or not.
            models: Models whose variables the optimizer updates.

        Raises:
            ConfigurationError: The training loop has taken its first step already.
        """
        if self.session is not None and not self._optimizers.has(optimizer):
            raise ConfigurationError(
                f"distribute() received {named(optimizer)} after the first step of "
                f"{self.model.name!r}; expected the call before that step, when the PS receives "
                "the descriptions of all optimizers and models of a script's loops. Distribute "
                "all optimizers before the first loop begins: one = thinwire.distribute(one, "
                "model=first); other = thinwire.distribute(other, model=second). Or train the "
                "second model in a run of its own."
            )
        self.model = Together.of(self.model, models)
        self._loop_steps.add(self._optimizers.stand_in(optimizer), models)

    # -- for saved files --------------------------------------------------------------------------

    def holds(self, tracked: Collection[int]) -> bool:
        """Return True if an object id in `tracked` is of this session's model or its optimizers."""
        models = getattr(self.model, "models", [self.model])
        return any(id(model) in tracked for model in models) or self._optimizers.are_in(tracked)

    def checkpointing(self, is_own: bool) -> contextlib.AbstractContextManager[bool]:
        """Load the shards' state into the model while TensorFlow saves a checkpoint."""
        if not backend().is_traced():
            self.loop.refresh(with_slots=True)
        return central.saving(self, is_own)

    # -- a train_step -----------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        """Call the model's own `train_step`, whose optimizers push to the PS and pull from it."""
        backend().refuse_compiling()
        self.begin_train_step()
        is_first = self.state.begins_with_step and self.is_offered
        if is_first and not backend().is_traced() and self._trial.is_needed:
            self._phases.begin_with(self._trial.plan(data))
        try:
            return self._call(data)
        except WeightsChanged:
            # The first step of an eager train_step joins the run after it has computed a gradient,
            # and joining replaces the weights. The gradient at the old weights and the metrics are
            # dropped, and the train_step is called again.
            self.model.reset_metrics()
            return self._call(data)

    def begin_train_step(self) -> None:
        """Begin a loop of the script's own at its first step; check the compiled optimizer."""
        self.loop.begin()
        step = self._optimizers.compiled
        compiled = getattr(self.model, "optimizer", None)
        if compiled is not (None if step is None else step.optimizer):
            raise ConfigurationError(
                "the model was compiled while its fit was running; compile the model before or "
                "after the fit."
            )

    def _call(self, data: Any) -> Any:
        """Call the model's own `train_step`; exchange weights if optimizers step on this worker.

        Raises:
            ConfigurationError: The `train_step` calls no optimizer.
        """
        call = self.call = StepCall(count_rows(data), ends_later=True)
        try:
            with self._row_sums.step(data):
                logs = self._trial.train_step(data)
                self.note_sequence(call)
                if self.joined.takes_weights:
                    call.applied[-1].exchange_weights()
            return logs
        finally:
            self.call = self._endless

    def note_sequence(self, call: StepCall) -> None:
        """Store in which order a train_step has called the optimizers; refuse one without."""
        if not call.applied:
            self._trial.refuse_without_step()
        self.sequence = [step.number for step in call.applied]

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Reject an optimizer that would train shared variables on this worker alone."""
        self._optimizers.refuse_step(optimizer, variables)
        if not self.in_fit:
            self._loop_steps.name_other(optimizer, variables)

    def assignments_to(self, variable: Any) -> Assignments | None:
        """Return the record of a script's assignments to a variable; None if there is no record.

        A loop of the script's own on a stateless backend writes its state to the variables, which
        changes nothing.
        """
        if backend().is_stateless and self.in_loop and not self.in_fit:
            return None
        self._optimizers.states.check_assignment(variable)
        if not self.is_offered:
            return None
        # If assignments are not recorded, a comparison of weights finds the script's changes.
        if not self.records_assignments:
            return None
        is_trainable = any(variable is trainable for trainable in self.model.trainable_variables)
        return self.assignments if is_trainable else None

    @property
    def records_assignments(self) -> bool:
        """True if changes of weights by the script are recorded: optimizers step here each time."""
        run = self.own_settings.run
        steps_each_time = run.method.steps_on_workers and not run.method.takes_local_steps
        return steps_each_time and takes_changes(run)

    # -- for the steps: the methods of `thinwire.script.keras.step.StepOwner` --------------------

    @property
    def takes_momentum(self) -> bool:
        """True if the training method, not the optimizer, applies the compiled SGD's momentum."""
        return self._optimizers.takes_momentum

    def ends_fit(self) -> bool:
        """Leave the run after a `fit`; return True if the optimizer has this run's averages."""
        return self.fits.ends_fit()

    def begin_step(self, step: ExchangeStep, pairs: Pairs) -> bool:
        """Join the run at the first step, and check which variables the optimizer updates."""
        has_changed = self.loop.begin()
        if self.state.begins_with_step:
            if self.call.ends_later:
                plan = StepPlan((PlannedStep.of(step.optimizer, pairs),))
            else:
                plan = self._loop_steps.plan(step, pairs)
            has_changed = self._phases.begin_with(plan)
        self._optimizers.check_step(step, [variable for _, variable in pairs])
        return not has_changed

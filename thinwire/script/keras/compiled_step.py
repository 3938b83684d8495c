"""The steps of a stateless backend (JAX) in `fit` and `train_on_batch`.

The backend calls the compiled part of a step, a function from a state to a new state. That part
returns the values to send. Then Python exchanges them with the servers, and puts the answer into
the new state. So compiled code never waits for the network, and the moving statistics are sent
with the gradient of the same step, although `stateless_apply` does not see them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from thinwire.models.flat_tensors import join_arrays
from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.base import Attached
from thinwire.script.data.rows import count_rows
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.row_sums import RowSums
from thinwire.script.keras.step import (
    ExchangeStep,
    StepAnswer,
    StepCall,
    joined,
    recording,
    refuse_statistics,
)
from thinwire.script.keras.trial import StepTrial

if TYPE_CHECKING:
    from thinwire.script.keras.train_metrics import TrainMetrics


class CompiledSteps:
    """Joins, traces and exchanges the compiled steps of one model.

    It implements `thinwire.script.backends.base.CompiledSession`.

    Args:
        owner: The model's session with the servers.
        phases: Object that joins the run before the first step.
        trial: Object that has the model's own train_step.
        row_sums: Object that scales losses that are sums over rows.
    """

    def __init__(self, owner: Any, phases: Phases, trial: StepTrial, row_sums: RowSums) -> None:
        self._owner, self._phases, self._trial = owner, phases, trial
        self._row_sums = row_sums
        # optimizer that the newest trace has called
        self._step: ExchangeStep | None = None
        # number of the `fit` in which the train_step was tried; 0 before
        self._tried_in = 0

    @contextlib.contextmanager
    def surrounding(self, data: Any, attached: Attached) -> Iterator[None]:
        """Surround one compiled step: join the run before the first one, and count its rows.

        Args:
            data: Mini-batch of the step.
            attached: Returns a context in which the model's variables have their values.
        """
        owner = self._owner
        owner.begin_train_step()
        joins = owner.state.begins_with_step and owner.is_offered
        tries = self._tried_in != owner.fits.number and self._needs_trial
        if joins or tries:
            self._tried_in = owner.fits.number
            with attached():
                if joins:
                    trial = self._trial
                    plan = trial.plan(data) if trial.is_needed else trial.standard_plan
                    self._phases.begin_with(plan)
                if tries:
                    self._try(data)
        elif owner.state.begins_with_step:
            with attached():
                self._phases.begin_with(self._trial.standard_plan)
        self._row_sums.begin_step(count_rows(data))
        yield
        self._row_sums.end_step()

    @property
    def _metrics(self) -> TrainMetrics:
        metrics: TrainMetrics = self._owner.fits.metrics
        return metrics

    @property
    def _needs_trial(self) -> bool:
        return self._row_sums.needs_trial or self._metrics.needs_trial

    def _try(self, data: Any) -> None:
        """Test losses and metrics with values, which the tensors of a trace do not have."""
        with recording():
            if self._row_sums.needs_trial:
                self._row_sums.try_losses(data)
            if self._metrics.needs_trial:
                self._metrics.try_updates(lambda: self._trial.call(data))

    @property
    def extra_variables(self) -> list[Any]:
        """Variables outside of the model's state that a compiled step reads and assigns."""
        clocks = [clock for clock in self._owner.clocks if clock is not None]
        return [variable for clock in clocks for variable in (clock.variable, clock.own)]

    def trace(
        self,
        data: Any,
        call: Callable[[Callable[..., Any]], Any],
        scope: Callable[[Any], Any],
        is_untouched: Callable[[Any], bool],
    ) -> tuple[Any, Any, list[Any]]:
        """Call the model's stateless train_step in a trace, without an exchange.

        Args:
            data: Mini-batch of tensors of the trace.
            call: Function that calls a train_step with the state and the batch.
            scope: Function of what `call` returned; returns a `keras.StatelessScope` in which the
                model's variables have the values of the new state.
            is_untouched: Function of what `call` returned; returns True if the trainable weights of
                the new state are those of the old one.

        Returns:
            What `call` returned; the values to exchange, with the changes of weights by the
            script's own code (None if the train_step has exchanged them itself); and the new values
            of the extra variables.
        """
        owner = self._owner
        step_call, returned = self._call(data, call, is_postponed=True)
        if not owner.joined.takes_weights and not is_untouched(returned):
            # The train_step itself changes weights, and may read what it has changed. So its
            # exchange takes place where it applies the gradients, by a callback.
            refuse_statistics(owner.joined, "a train_step that changes weights itself")
            _, returned = self._call(data, call, is_postponed=False)
            with scope(returned) as values:
                return returned, None, _values_in(values, self.extra_variables)
        self._step = step_call.applied[-1]
        with scope(returned) as values, self._in_call(step_call):
            sent = self._step.postponed_values()
            assigned = self._assigned(step_call)
            return returned, (sent, assigned), _values_in(values, self.extra_variables)

    @contextlib.contextmanager
    def _in_call(self, step_call: StepCall) -> Iterator[None]:
        before, self._owner.call = self._owner.call, step_call
        try:
            yield
        finally:
            self._owner.call = before

    def _call(self, data: Any, call: Callable[..., Any], is_postponed: bool) -> tuple[Any, Any]:
        step_call = StepCall(count_rows(data), ends_later=True, is_postponed=is_postponed)
        with (
            self._in_call(step_call),
            self._row_sums.step(data),
            _recording_loss(self._owner.model, step_call),
        ):
            returned = call(self._trial.train_step)
        if step_call.loss is None and isinstance(returned[0], Mapping):
            step_call.loss = returned[0].get("loss")
        self._owner.note_sequence(step_call)
        if len(step_call.applied) > 1:
            raise ConfigurationError(
                f"the train_step of {self._owner.model.name!r} takes {len(step_call.applied)} "
                "optimizer steps, and a compiled step of JAX exchanges once; expected one "
                "optimizer that steps once. Write the loop yourself, and distribute each optimizer "
                "with its model: one = thinwire.distribute(one, model=first). Or set "
                "KERAS_BACKEND=torch or KERAS_BACKEND=tensorflow."
            )
        return step_call, returned

    def _assigned(self, step_call: StepCall) -> Any:
        """Return by how much the train_step changed weights after the optimizer's step; or None.

        Returns:
            [num_parameters] float32 tensor; None if the optimizer does not step on this worker, or
            if the train_step returns the optimizer's weights.
        """
        variables = self._owner.joined.shared.variables
        values = [variable.value for variable in variables]
        stepped = [step_call.stepped.get(id(variable), variable.value) for variable in variables]
        pairs = list(zip(values, stepped, strict=True))
        if not self._owner.joined.takes_weights or all(a is b for a, b in pairs):
            return None
        return keras.ops.concatenate([keras.ops.ravel(a - b) for a, b in pairs], 0)

    def exchange(self, values: Any) -> StepAnswer | None:
        """Exchange the values of a compiled step with the servers.

        Args:
            values: The values that `trace` has returned, as NumPy arrays; None if the step has
                exchanged them itself.

        Returns:
            The servers' answer; None without an exchange.
        """
        if values is None or self._step is None:
            return None
        owner, (sent, assigned) = self._owner, values
        sent = joined(sent, join_arrays)
        if assigned is not None and np.any(assigned) and owner.records_assignments:
            for variable, change in owner.joined.variables.parts(np.asarray(assigned)):
                owner.assignments.add(variable, change)
            sent = sent._replace(has_assigned=True)
        answer: StepAnswer = owner.exchange(self._step, False, False, sent)
        return answer

    def take(self, answer: StepAnswer) -> None:
        """Assign the servers' answer to the variables, within a scope that holds the state."""
        if self._step is not None:
            self._step.take(answer)


@contextlib.contextmanager
def _recording_loss(model: Any, step_call: StepCall) -> Iterator[None]:
    """Store the loss with which a train_step updates Keras' own metric of the loss."""
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        yield
        return
    alone = tracker.update_state

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        step_call.loss = values
        return alone(values, sample_weight)

    tracker.update_state = update_state
    try:
        yield
    finally:
        del tracker.update_state


def _values_in(scope: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the values that variables have in a `keras.StatelessScope`."""
    return [scope.get_current_value(variable) for variable in variables]

"""Prepares the first step of a model: finds its optimizers, and creates its metrics.

The class `StepTrial` calls or traces a train_step before the first step, to find the optimizers
that it calls. The function `create_before_trace` creates the metrics of a model whose train_step is
Keras' own: a script may pass metrics to `compile` by name, and Keras creates these metrics only
within the first step. TensorFlow discards a trace that creates variables and traces the step again,
which doubles the tracing time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import keras
from keras.src.models.functional import Functional

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.keras.plan import PlannedStep, StepPlan, is_built
from thinwire.script.keras.step import recording


class StepTrial:
    """Finds out which optimizers a train_step calls and which variables they update.

    While a train_step is tried, no optimizer changes variables.

    Attributes:
        train_step: Method `train_step` of the model, as it was before `distribute`.
    """

    def __init__(self, model: keras.Model) -> None:
        """Store the model and its train_step without calling the train_step."""
        self._model, self.train_step = model, model.train_step

    @property
    def is_standard(self) -> bool:
        """True if the model's train_step is Keras' own, which has one optimizer."""
        return getattr(self.train_step, "__func__", None) is keras.Model.train_step

    @property
    def is_needed(self) -> bool:
        """True if a trial of the train_step must find its optimizers or create variables.

        A Keras variable that a TensorFlow trace creates has no value yet, but the offer of the
        model to the PS contains values.
        """
        if backend().tries_each_plan:
            return True
        return not (self.is_standard and (is_built(self._model) or self._model.run_eagerly))

    def plan(self, data: Any) -> StepPlan:
        """Return the optimizers that the train_step calls, and their variables, by one trial.

        Args:
            data: Mini-batch, or its specs, with which the train_step is called or traced.
        """
        return self._plan(lambda: backend().try_step(self._model, self.train_step, data))

    @property
    def standard_plan(self) -> StepPlan:
        """The plan of Keras' own train_step, in which every trainable variable has a gradient."""
        model = self._model
        planned = PlannedStep(model.optimizer, tuple(model.trainable_variables))
        return StepPlan((planned,))

    def call(self, data: Any) -> Any:
        """Call the train_step; a stateless one gets the state of the model's variables."""
        return self.train_step(*backend().state_of(self._model), data)

    def before_first(self, join: Callable[[StepPlan], object]) -> None:
        """If a trial of the train_step is needed, run it before the first step of a graph.

        Args:
            join: Function that joins the run, called with the optimizers that the trial has found
                and their variables.
        """
        if self.is_needed and not self._model.run_eagerly:
            backend().before_first_step(self._model, lambda spec: join(self.plan(spec)))

    def refuse_without_step(self) -> NoReturn:
        """Raise a ConfigurationError, because the train_step calls no optimizer."""
        raise ConfigurationError(
            f"the train_step of {self._model.name!r} does not step with any optimizer of Keras, so "
            "each worker would train alone; expected self.optimizer.apply_gradients(...), or that "
            "of another optimizer, in each step. Or leave thinwire.distribute() out."
        )

    def _plan(self, attempt: Callable[[], None]) -> StepPlan:
        num_variables = len(self._model.variables)
        with recording() as calls:
            attempt()
        # If the trial of a train_step has created variables, the recorded calls lack the gradients
        # of these variables. So the trial is repeated with all variables.
        if len(self._model.variables) > num_variables:
            return self._plan(attempt)
        plan = StepPlan.of(calls)
        if not plan.steps:
            self.refuse_without_step()
        return plan


def create_before_trace(model: Any) -> None:
    """Create a model's metrics before its next step, if their classes can be predicted.

    Args:
        model: Compiled Keras model with Keras' own train_step.
    """
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None or metrics.built or model.run_eagerly or not _is_usual(model):
        return
    backend().before_first_step(model, lambda specs: _create(model, metrics, specs))


def _is_usual(model: Any) -> bool:
    """Return True if a model has one output and uses Keras' own `call` and `compute_metrics`."""
    call = getattr(model.call, "__func__", None)
    compute = getattr(model.compute_metrics, "__func__", None)
    is_of_keras = compute is keras.Model.compute_metrics
    is_known = is_of_keras and call in (keras.Sequential.call, Functional.call)
    outputs: Any = getattr(model, "outputs", None)
    is_single = bool(outputs) and len(outputs) == 1
    return is_known and is_single and outputs[0].shape[-1:] not in ((), (None,))


def _create(model: Any, metrics: Any, data_spec: Any) -> None:
    """Create compiled metrics with classes that fit the shapes of the labels and the output."""
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data_spec)
    shape = getattr(labels, "shape", None)
    if not metrics.built and shape is not None and shape.rank:
        metrics.build(labels, model.outputs[0])

"""Trial of a model's own train_step before the first step, to find which optimizers step in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import keras

from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.plan import (
    StepPlan,
    before_first_step,
    is_built,
    try_eagerly,
    try_in_graph,
)
from thinwire.script.keras.step import recording


class StepTrial:
    """Finds the plan of a train_step without taking the step.

    Attributes:
        train_step: The model's own train_step, as it was before `distribute`.
    """

    def __init__(self, model: keras.Model) -> None:
        """Store the model and its train_step; a trial starts later."""
        self._model, self.train_step = model, model.train_step

    @property
    def is_standard(self) -> bool:
        """True if the model's train_step is Keras' own, which has one optimizer."""
        return getattr(self.train_step, "__func__", None) is keras.Model.train_step

    @property
    def is_needed(self) -> bool:
        """True if only a trial shows which optimizers step, or creates the model's variables.

        A variable that is created inside a trace has no value yet, but a PS is offered values.
        """
        if not self.is_standard:
            return True
        return not (is_built(self._model) or self._model.run_eagerly)

    def in_graph(self, data_spec: Any) -> StepPlan:
        """Return the plan of the train_step for mini-batches of this form, by tracing it.

        Raises:
            ConfigurationError: No optimizer steps in the train_step.
        """
        return self._plan(lambda: try_in_graph(self.train_step, data_spec))

    def eagerly(self, data: Any) -> StepPlan:
        """Return the plan of the train_step by calling it for a mini-batch."""

        def attempt() -> None:
            try_eagerly(self.train_step, data, lambda: self._model.variables)
            self._model.reset_metrics()

        return self._plan(attempt)

    def before_first(self, join: Callable[[StepPlan], object]) -> None:
        """Try the train_step before the first step, and call `join` with the plan, if needed.

        Args:
            join: Takes the plan of the step.
        """
        model = self._model
        if model.run_eagerly or not self.is_needed:
            return
        before_first_step(model, lambda data_spec: join(self.in_graph(data_spec)))

    def refuse_without_step(self) -> NoReturn:
        """Reject the train_step, because it calls no optimizer."""
        raise ConfigurationError(
            f"the train_step of {self._model.name!r} does not step with any optimizer of Keras, so "
            "each worker would train alone; expected self.optimizer.apply_gradients(...), or the "
            "same call of another optimizer, in each step. Or leave thinwire.distribute() out."
        )

    def _plan(self, attempt: Callable[[], None]) -> StepPlan:
        num_variables = len(self._model.variables)
        with recording() as recorder:
            attempt()
        # Variables that the attempt has created have no gradients in it: repeat the attempt.
        if len(self._model.variables) > num_variables:
            return self._plan(attempt)
        plan = recorder.plan()
        if not plan.steps:
            self.refuse_without_step()
        return plan

"""A model's own train_step, tried before its first step where only that shows what steps in it."""

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
        train_step: The model's, as it was given to `distribute`.
    """

    def __init__(self, model: keras.Model) -> None:
        """Try nothing yet."""
        self._model, self.train_step = model, model.train_step

    @property
    def is_standard(self) -> bool:
        """Whether the model's train_step is Keras' own, which has one optimizer."""
        return getattr(self.train_step, "__func__", None) is keras.Model.train_step

    @property
    def is_needed(self) -> bool:
        """Whether only a trial shows what steps, or creates the model's variables.

        Inside a trace new variables have no values yet, and values are what is offered to a PS.
        """
        if not self.is_standard:
            return True
        return not (is_built(self._model) or self._model.run_eagerly)

    def in_graph(self, data_spec: Any) -> StepPlan:
        """Return what the train_step does with mini-batches of this form, without doing it.

        Raises:
            ConfigurationError: No optimizer steps in it.
        """
        return self._plan(lambda: try_in_graph(self.train_step, data_spec))

    def eagerly(self, data: Any) -> StepPlan:
        """Do so by calling it for a mini-batch."""

        def attempt() -> None:
            try_eagerly(self.train_step, data, lambda: self._model.variables)
            self._model.reset_metrics()

        return self._plan(attempt)

    def before_first(self, join: Callable[[StepPlan], object]) -> None:
        """Let the first step be traced twice, and `join` be called in between, where it is needed.

        Args:
            join: Takes what the step does.
        """
        model = self._model
        if model.run_eagerly or not self.is_needed:
            return
        before_first_step(model, lambda data_spec: join(self.in_graph(data_spec)))

    def refuse_without_step(self) -> NoReturn:
        """Refuse the train_step: nothing of it reaches an optimizer."""
        raise ConfigurationError(
            f"the train_step of {self._model.name!r} does not step with any optimizer of Keras, so "
            "each worker would train alone; expected self.optimizer.apply_gradients(...), or that "
            "of other optimizers, in each step. Or leave thinwire.distribute() out."
        )

    def _plan(self, attempt: Callable[[], None]) -> StepPlan:
        num_variables = len(self._model.variables)
        with recording() as recorder:
            attempt()
        if (
            len(self._model.variables) > num_variables
        ):  # new ones have no gradients where they arise
            return self._plan(attempt)
        plan = recorder.plan()
        if not plan.steps:
            self.refuse_without_step()
        return plan

"""Custom training loops, whose optimizers are given to `distribute(optimizer, model=model)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.checks import check_model
from thinwire.script.keras.plan import Pairs, PlannedStep, StepPlan, named

if TYPE_CHECKING:
    from thinwire.script.keras.step import ExchangeStep

#: Number of local steps after which a loop exchanges weights even if one of its optimizers has not
#: stepped. Without this limit a loop that rarely calls one of its optimizers would rarely exchange.
_MOST_PENDING = 8
#: Method of a Keras model that reads all weights -> True if it also reads the optimizer's state.
_LOOKS = {
    "evaluate": False,
    "predict": False,
    "get_weights": False,
    "save": True,
    "save_weights": True,
    "export": False,
}


class Together:
    """Several models that a script's loop trains together, with the attributes of one model.

    Attributes:
        models: Models in the order in which the script gave them to `distribute`.
        stop_training: True if training must stop, like this attribute of a Keras model.
    """

    run_eagerly = jit_compile = False
    optimizer = None

    def __init__(self, models: Sequence[keras.Model]) -> None:
        self.models = list(models)
        self.stop_training = False

    @staticmethod
    def of(model: Any, others: Iterable[keras.Model]) -> Any:
        """Return a `Together` of a model and the models in `others` that are not its layers.

        If all models in `others` are layers of the model, the model itself is returned.
        """
        models = list(model.models) if isinstance(model, Together) else [model]
        layers = [layer for member in models for layer in member._flatten_layers()]
        new = [other for other in others if not any(other is layer for layer in layers)]
        return Together([*models, *new]) if new else model

    @property
    def name(self) -> str:
        """Names of all models, joined by "+"."""
        return "+".join(model.name for model in self.models)

    @property
    def variables(self) -> list[Any]:
        """Variables of all models, without duplicates."""
        return _once(variable for model in self.models for variable in model.variables)

    @property
    def trainable_variables(self) -> list[Any]:
        """Trainable variables of all models, without duplicates."""
        return _once(v for model in self.models for v in model.trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Non-trainable variables of all models, without duplicates."""
        return _once(v for model in self.models for v in model.non_trainable_variables)

    def train_step(self, data: Any) -> Any:
        """Raise NotImplementedError: several models have no common train_step."""
        raise NotImplementedError(f"a train_step of {self.name} for {type(data).__name__}")


def _once(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def models_of(optimizer: Any, model: Any) -> list[keras.Model]:
    """Return the models that an optimizer steps as a list, and check their types.

    Args:
        optimizer: Optimizer to be distributed.
        model: One model, or a list or tuple of models.

    Raises:
        ConfigurationError: No model is given, or an object that is no Keras model.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    if model is None or not models:
        raise ConfigurationError(
            f"distribute() received {named(optimizer)} without a model; expected the model, or "
            "the models, whose variables the optimizer trains: thinwire.distribute(optimizer, "
            "model=model)."
        )
    for member in models:
        check_model(member)
    return models


class LoopSteps:
    """The optimizers of a custom training loop, and the steps at which they exchange weights.

    A loop has no train_step that Thinwire could try before training. So the script gives each
    optimizer with its models to `distribute` before the first step. At the first step Thinwire
    finds out which optimizer steps which variables.
    """

    def __init__(self) -> None:
        self._models: dict[ExchangeStep, list[keras.Model]] = {}
        # Optimizers that have stepped, in the order of their first steps.
        self._cycle: list[ExchangeStep] = []
        self._num_pending = 0  # number of local steps since the last exchange of weights
        self._others: dict[int, Any] = {}  # id -> optimizer of the loop that is not distributed

    def add(self, step: ExchangeStep, models: Sequence[keras.Model]) -> None:
        """Add an optimizer of the loop with the models that it steps."""
        self._models[step] = list(models)

    def name_other(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Log once that the loop steps an optimizer that is not distributed.

        Args:
            optimizer: Optimizer that is not distributed.
            variables: Variables that the optimizer steps on this worker only.
        """
        if not self._models or id(optimizer) in self._others:
            return
        self._others[id(optimizer)] = optimizer
        logging.warning(
            "%s trains the variable %s and %d more variables on this worker alone; to train these "
            "variables on all workers, write: optimizer = thinwire.distribute(optimizer, "
            "model=model)",
            named(optimizer),
            variables[0].path,
            len(variables) - 1,
        )

    def plan(self, step: ExchangeStep, pairs: Pairs) -> StepPlan:
        """Return which variables each optimizer of the loop steps, at the loop's first step.

        Args:
            step: Replacement of the optimizer that steps first.
            pairs: Gradients and variables that this optimizer is called with.

        Raises:
            ConfigurationError: The variables of an optimizer are unknown or ambiguous.
        """
        self._models.setdefault(step, [])
        known = {step: PlannedStep.of(step.optimizer, pairs)}
        for other in self._models:
            if other is not step and other.optimizer.built:
                variables = tuple(other.inner._trainable_variables)
                known[other] = PlannedStep(other.optimizer, variables)
        taken = {id(v) for planned in known.values() for v in planned.variables}
        for other, models in self._models.items():
            if other not in known:
                all_of_models = _once(v for model in models for v in model.trainable_variables)
                remaining = tuple(v for v in all_of_models if id(v) not in taken)
                known[other] = PlannedStep(other.optimizer, remaining)
        for other in self._models:
            self._check(other, known)
        return StepPlan(tuple(known[other] for other in self._models))

    @staticmethod
    def _check(step: ExchangeStep, known: dict[ExchangeStep, PlannedStep]) -> None:
        """Reject an optimizer if its variables cannot be known before its first step."""
        variables = {id(v) for v in known[step].variables}
        unbuilt = [other for other in known if other is not step and not other.optimizer.built]
        shared = any(variables & {id(v) for v in known[other].variables} for other in unbuilt)
        if not variables or (shared and not step.optimizer.built):
            raise ConfigurationError(
                f"the variables that {named(step.optimizer)} trains are unknown before its first "
                "step, but another optimizer takes a step earlier. Give each optimizer a "
                "different model, as in thinwire.distribute(optimizer, model=generator); or build "
                "the optimizer before the loop: optimizer.build(generator.trainable_variables)."
            )

    def is_due(self, step: ExchangeStep) -> bool:
        """Return True if weights must be exchanged after a local step of an optimizer.

        Weights are exchanged once per iteration of the loop: after a step of the optimizer that
        took its first step after the first steps of all other optimizers.
        """
        if step not in self._cycle:
            self._cycle.append(step)
        self._num_pending += 1
        is_whole = len(self._cycle) >= len(self._models)
        is_due = (is_whole and step is self._cycle[-1]) or self._num_pending >= _MOST_PENDING
        if is_due:
            self._num_pending = 0
        return is_due


class Refreshed(Protocol):
    """Interface of an object that can load the shards' weights into a model."""

    def refresh(self, with_slots: bool) -> None:
        """Load the shards' weights into the model.

        Args:
            with_slots: True to load the PS's optimizer state into the script's optimizers, too.
        """


def look_fresh(model: keras.Model, session: Refreshed) -> None:
    """Patch the methods of a model that read all its weights: they first load the shards' weights.

    Args:
        model: Keras model of a training loop.
        session: Object that loads the shards' weights into the model.
    """
    for name, with_slots in _LOOKS.items():
        setattr(model, name, _fresh(getattr(model, name), session, with_slots))


def _fresh(alone: Callable[..., Any], session: Refreshed, with_slots: bool) -> Callable[..., Any]:
    @functools.wraps(alone)
    def look(*args: Any, **keywords: Any) -> Any:
        if tf.executing_eagerly():
            session.refresh(with_slots)
        return alone(*args, **keywords)

    return look

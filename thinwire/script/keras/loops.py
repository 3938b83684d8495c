"""Training loops that a script writes itself and trains by `distribute(optimizer, model=model)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.keras.checks import check_model
from thinwire.script.keras.plan import Pairs, PlannedStep, StepPlan, distinct, named

if TYPE_CHECKING:
    from thinwire.script.keras.step import ExchangeStep

#: Number of local steps after which a training loop exchanges weights even if one of its optimizers
#: has not stepped. Without this limit, a loop that rarely calls one of its optimizers would rarely
#: exchange.
_MOST_PENDING = 8
#: Maps the name of a Keras model's method that reads all weights to True if the method also reads
#: the optimizer's state.
_LOOKS = {
    "evaluate": False,
    "predict": False,
    "get_weights": False,
    "save": True,
    "save_weights": True,
    "export": False,
}


class Together:
    """Several models that a training loop trains together, with the attributes of one model.

    Attributes:
        models: Models in the order in which the script passed them to `distribute`.
        stop_training: True if training must stop, like the attribute of this name of a Keras model.
    """

    run_eagerly = jit_compile = False
    optimizer = None

    def __init__(self, models: Sequence[keras.Model]) -> None:
        self.models = list(models)
        self.stop_training = False

    @staticmethod
    def of(model: Any, others: Iterable[keras.Model]) -> Any:
        """Return a `Together` of a model and the models in `others` that are not layers of it.

        If all models in `others` are layers of the model, the model itself is returned.
        """
        models = list(model.models) if isinstance(model, Together) else [model]
        layers = [layer for member in models for layer in member._flatten_layers()]
        new = [other for other in others if not any(other is layer for layer in layers)]
        return Together([*models, *new]) if new else model

    @property
    def name(self) -> str:
        """Names of all models of the training loop, joined by "+"."""
        return "+".join(model.name for model in self.models)

    @property
    def variables(self) -> list[Any]:
        """Variables of all models of the training loop, without duplicates."""
        return distinct(variable for model in self.models for variable in model.variables)

    @property
    def trainable_variables(self) -> list[Any]:
        """Trainable variables of all models of the training loop, without duplicates."""
        return distinct(v for model in self.models for v in model.trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Non-trainable variables of all models of the training loop, without duplicates."""
        return distinct(v for model in self.models for v in model.non_trainable_variables)


def models_of(optimizer: Any, model: Any) -> list[keras.Model]:
    """Return the models that an optimizer updates as a list, after a check of their types.

    Args:
        optimizer: Optimizer that the script passes to `distribute`.
        model: One model, or a list or tuple of models, that the optimizer updates.

    Raises:
        ConfigurationError: No model is given, or one of the objects is no Keras model.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    if model is None or not models:
        raise ConfigurationError(
            f"distribute() received {named(optimizer)} without a model; expected the model, or the "
            "models, whose variables it trains: thinwire.distribute(optimizer, model=model)."
        )
    for member in models:
        check_model(member)
    return models


class LoopSteps:
    """The optimizers of a script's training loop, and the steps at which they exchange weights.

    A training loop has no train_step that Thinwire could call before training. So a script with a
    training loop passes each optimizer with its models to `distribute` before the first step. At
    the first step of a training loop, Thinwire finds out which optimizer updates which variables.
    """

    def __init__(self) -> None:
        self._models: dict[ExchangeStep, list[keras.Model]] = {}
        # Optimizers of the training loop that have stepped, in the order of their first steps.
        self._cycle: list[ExchangeStep] = []
        # number of local steps since the last exchange of weights with the PS
        self._num_pending = 0
        # maps an id to the optimizer of the training loop that is not distributed
        self._others: dict[int, Any] = {}

    def add(self, step: ExchangeStep, models: Sequence[keras.Model]) -> None:
        """Add an optimizer of the training loop, with the models that it updates."""
        self._models[step] = list(models)

    def name_other(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Log once that the training loop calls an optimizer that is not distributed.

        Args:
            optimizer: Optimizer that the script has not passed to `distribute`.
            variables: Variables that the optimizer updates on this worker only.
        """
        if not self._models or id(optimizer) in self._others:
            return
        self._others[id(optimizer)] = optimizer
        logging.warning(
            "%s trains %s and %d more variables on this worker alone; to train them on all "
            "workers, write: optimizer = thinwire.distribute(optimizer, model=model)",
            named(optimizer),
            variables[0].path,
            len(variables) - 1,
        )

    def plan(self, step: ExchangeStep, pairs: Pairs) -> StepPlan:
        """Return which variables each optimizer of the training loop updates, at its first step.

        Args:
            step: Replacement (`ExchangeStep`) of the optimizer that takes the first step of the
                training loop.
            pairs: Pairs (gradient, variable) with which the script calls the first optimizer.

        Raises:
            ConfigurationError: It is unknown or ambiguous which variables an optimizer of the
                training loop updates.
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
                all_of_models = distinct(v for model in models for v in model.trainable_variables)
                remaining = tuple(v for v in all_of_models if id(v) not in taken)
                known[other] = PlannedStep(other.optimizer, remaining)
        for other in self._models:
            self._check(other, known)
        return StepPlan(tuple(known[other] for other in self._models))

    @staticmethod
    def _check(step: ExchangeStep, known: dict[ExchangeStep, PlannedStep]) -> None:
        """Reject an optimizer if it is unknown before its first step which variables it updates."""
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
        """Return True if a local step of an optimizer must be followed by an exchange of weights.

        A training loop exchanges weights once per iteration: after the step of the optimizer that
        was the last one to take its first step.
        """
        if step not in self._cycle:
            self._cycle.append(step)
        self._num_pending += 1
        is_whole = len(self._cycle) >= len(self._models)
        is_due = (is_whole and step is self._cycle[-1]) or self._num_pending >= _MOST_PENDING
        if is_due:
            self._num_pending = 0
        return is_due


def look_fresh(model: keras.Model, refresh: Callable[[bool], None]) -> None:
    """Patch a model's methods that read all its weights to load the shards' weights first.

    Args:
        model: Keras model that the script's training loop trains.
        refresh: Function that loads the shards' weights into the model and, if its argument is
            True, the PS's optimizer state into the script's optimizers.
    """
    for name, with_slots in _LOOKS.items():
        setattr(model, name, _fresh(getattr(model, name), refresh, with_slots))


def _fresh(
    alone: Callable[..., Any], refresh: Callable[[bool], None], with_slots: bool
) -> Callable[..., Any]:
    @functools.wraps(alone)
    def look(*args: Any, **keywords: Any) -> Any:
        if not backend().is_traced():
            refresh(with_slots)
        return alone(*args, **keywords)

    return look

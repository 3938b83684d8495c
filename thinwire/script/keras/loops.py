"""`distribute(optimizer, model=model)`: training loops of the script's own."""

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

#: Local steps after which the weights are exchanged though not every optimizer has stepped.
_MOST_PENDING = 8
#: Methods of a model that look at its weights as a whole -> whether at the optimizer's state, too.
_LOOKS = {
    "evaluate": False,
    "predict": False,
    "get_weights": False,
    "save": True,
    "save_weights": True,
    "export": False,
}


class Together:
    """Several models that a script trains together, as far as their session looks at one model.

    Attributes:
        models: In the order in which the script named them.
        stop_training: As Keras' models have it.
    """

    run_eagerly = jit_compile = False
    optimizer = None

    def __init__(self, models: Sequence[keras.Model]) -> None:
        self.models = list(models)
        self.stop_training = False

    @staticmethod
    def of(model: Any, others: Iterable[keras.Model]) -> Any:
        """Return a model together with those of the others that it does not hold already."""
        models = list(model.models) if isinstance(model, Together) else [model]
        held = [layer for each in models for layer in each._flatten_layers()]
        new = [each for each in others if not any(each is layer for layer in held)]
        return Together([*models, *new]) if new else model

    @property
    def name(self) -> str:
        """The names of all."""
        return "+".join(model.name for model in self.models)

    @property
    def variables(self) -> list[Any]:
        """Those of all, each once."""
        return _once(variable for model in self.models for variable in model.variables)

    @property
    def trainable_variables(self) -> list[Any]:
        """Those of all, each once."""
        return _once(v for model in self.models for v in model.trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Those of all, each once."""
        return _once(v for model in self.models for v in model.non_trainable_variables)

    def train_step(self, data: Any) -> Any:
        """Refuse: models have no train_step together."""
        raise NotImplementedError(f"a train_step of {self.name} for {type(data).__name__}")


def _once(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def models_of(optimizer: Any, model: Any) -> list[keras.Model]:
    """Return the models that an optimizer steps, as a script names them.

    Args:
        optimizer: To be distributed.
        model: One, or several.

    Raises:
        ConfigurationError: None, or something else.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    if model is None or not models:
        raise ConfigurationError(
            f"distribute() was given {named(optimizer)} without a model; expected the model, or "
            "the models, whose variables it steps: thinwire.distribute(optimizer, model=model)."
        )
    for each in models:
        check_model(each)
    return models


class LoopSteps:
    """The optimizers of a loop of the script's own, and when they exchange.

    A loop has no place where it can be tried, so each optimizer is distributed with its models
    before the first step, which then shows what all of them step.
    """

    def __init__(self) -> None:
        self._models: dict[ExchangeStep, list[keras.Model]] = {}
        self._cycle: list[ExchangeStep] = []  # in the order of their first steps
        self._num_pending = 0  # local steps since the last exchange
        self._others: dict[int, Any] = {}  # by identity: that step beside them

    def add(self, step: ExchangeStep, models: Sequence[keras.Model]) -> None:
        """Count an optimizer in."""
        self._models[step] = list(models)

    def name_other(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Name, once, an optimizer that the loop steps beside these.

        Args:
            optimizer: Not distributed.
            variables: That it steps, none of which is shared.
        """
        if not self._models or id(optimizer) in self._others:
            return
        self._others[id(optimizer)] = optimizer
        logging.warning(
            "%s steps %s and %d more variables, which this worker trains alone; if all workers "
            "are to train them together: optimizer = thinwire.distribute(optimizer, model=model)",
            named(optimizer),
            variables[0].path,
            len(variables) - 1,
        )

    def plan(self, step: ExchangeStep, pairs: Pairs) -> StepPlan:
        """Return what all optimizers step, given what one of them is about to.

        Raises:
            ConfigurationError: That cannot be known of one of them.
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
                rest = tuple(v for v in all_of_models if id(v) not in taken)
                known[other] = PlannedStep(other.optimizer, rest)
        for other in self._models:
            self._check(other, known)
        return StepPlan(tuple(known[other] for other in self._models))

    @staticmethod
    def _check(step: ExchangeStep, known: dict[ExchangeStep, PlannedStep]) -> None:
        """Refuse an optimizer whose variables cannot be distinguished from the others'."""
        variables = {id(v) for v in known[step].variables}
        others = [each for each in known if each is not step and not each.optimizer.built]
        shared = any(variables & {id(v) for v in known[each].variables} for each in others)
        if not variables or (shared and not step.optimizer.built):
            raise ConfigurationError(
                f"which variables {named(step.optimizer)} steps is not known before its first "
                "step, and the others step without it; expected a model of its own, as in "
                "thinwire.distribute(optimizer, model=generator). Or build it before the loop: "
                "optimizer.build(generator.trainable_variables)."
            )

    def is_due(self, step: ExchangeStep) -> bool:
        """Return whether the weights are to be exchanged after a local step of an optimizer.

        They are exchanged once in a turn of the loop: after the optimizer that stepped first last.
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
    """Whoever can bring a model up to date."""

    def refresh(self, with_slots: bool) -> None:
        """Let the model have what the shards hold, with the optimizers' state if `with_slots`."""


def look_fresh(model: keras.Model, session: Refreshed) -> None:
    """Let a model be up to date wherever the script looks at it as a whole."""
    for name, with_slots in _LOOKS.items():
        setattr(model, name, _fresh(getattr(model, name), session, with_slots))


def _fresh(alone: Callable[..., Any], session: Refreshed, with_slots: bool) -> Callable[..., Any]:
    @functools.wraps(alone)
    def look(*args: Any, **keywords: Any) -> Any:
        if tf.executing_eagerly():
            session.refresh(with_slots)
        return alone(*args, **keywords)

    return look

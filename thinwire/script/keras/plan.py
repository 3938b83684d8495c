"""Finds out, before the first step, which optimizers of a script update which variables.

The PS must know all optimizers of a script before the first step, and a train_step may call several
optimizers. So Thinwire traces or calls the train_step once before training, while a recorder
replaces the optimizers' steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from absl import logging

from thinwire.ops.methods.method import Method
from thinwire.ops.types import ConfigurationError

#: Arguments with which an optimizer is called: pairs (gradient, variable). A gradient may be None.
Pairs = Sequence[tuple[Any, Any]]
#: Number of variables of a Keras optimizer without slots (moments): its step count and its learning
#: rate.
WITHOUT_SLOTS = 2
#: Calls of optimizers, in their order: pairs (optimizer, the pairs that it gets).
Calls = Sequence[tuple[Any, Pairs]]


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """An optimizer that a train_step calls, and the variables that it updates.

    Attributes:
        optimizer: Keras optimizer that the script calls.
        variables: Variables that the optimizer updates, in the order in which the optimizer gets
            them.
        without_gradient: Variables of the optimizer that get no gradient in any of the optimizer's
            calls.
        is_uniform: True if every call of the optimizer in a training step gets the same variables.
    """

    optimizer: Any
    variables: tuple[Any, ...]
    without_gradient: tuple[Any, ...] = ()
    is_uniform: bool = True

    @staticmethod
    def of(optimizer: Any, *calls: Pairs) -> PlannedStep:
        """Return an optimizer's planned step, given the pairs (gradient, variable) of its calls."""
        variables = distinct(variable for pairs in calls for _, variable in pairs)
        moved = _ids(v for pairs in calls for gradient, v in pairs if gradient is not None)
        without_gradient = tuple(variable for variable in variables if id(variable) not in moved)
        is_uniform = all(_ids(v for _, v in pairs) == _ids(variables) for pairs in calls)
        return PlannedStep(optimizer, tuple(variables), without_gradient, is_uniform)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The optimizers that a train_step calls, in the order of their first calls."""

    steps: tuple[PlannedStep, ...]

    @staticmethod
    def of(calls: Calls) -> StepPlan:
        """Return the recorded calls of optimizers as a plan of the train_step."""
        return StepPlan(
            tuple(
                PlannedStep.of(optimizer, *(pairs for other, pairs in calls if other is optimizer))
                for optimizer in distinct(optimizer for optimizer, _ in calls)
            )
        )

    @property
    def variables(self) -> list[Any]:
        """All variables that the optimizers of the train_step update, without duplicates."""
        return distinct(variable for step in self.steps for variable in step.variables)

    @property
    def moved(self) -> set[int]:
        """The ids of the variables for which an optimizer of the train_step gets a gradient."""
        moved = (_ids(step.variables) - _ids(step.without_gradient) for step in self.steps)
        return set[int]().union(*moved)

    def _warn_of_own_sums(self) -> None:
        """Warn of an Ftrl optimizer whose steps on the workers let the workers' models diverge."""
        for step in self.steps:
            optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
            if isinstance(optimizer, keras.optimizers.Ftrl):
                logging.warning(
                    "optimizer %s computes weights from its own sums, not from the weights that "
                    "the PS sends, so the models of workers that apply it locally diverge; "
                    "expected a method whose PS applies it: --method=bsp or --method=asgd",
                    named(step.optimizer),
                )

    def check(self, method: Method, name: str) -> None:
        """Reject optimizers if the PS cannot update weights as the optimizers do without Thinwire.

        Args:
            method: Training method of the run.
            name: Name of the model for error messages.

        Raises:
            ConfigurationError: Two optimizers update the same variable, an optimizer gets different
                variables from call to call, or the training method does not support several
                optimizers.
        """
        if method.steps_on_workers:
            self._warn_of_own_sums()
            return
        remedy = (
            "Or take a method whose workers step themselves: --method=dgs, --method=dgc, "
            "--method=gd or --method=esync."
        )
        for step in self.steps:
            if not step.is_uniform:
                raise ConfigurationError(
                    f"the training step of {name!r} gives {named(step.optimizer)} different "
                    "variables from call to call, but the PS updates all variables of an optimizer "
                    f"together; expected one optimizer for each set of variables. {remedy}"
                )
        owners: dict[int, PlannedStep] = {}
        for step in self.steps:
            for variable in step.variables:
                owner = owners.setdefault(id(variable), step)
                if owner is not step:
                    raise ConfigurationError(
                        f"the training step of {name!r} updates the variable {variable.path} with "
                        f"both {named(owner.optimizer)} and {named(step.optimizer)}, but a PS "
                        "updates a variable with one optimizer; expected each optimizer to have "
                        f"variables of its own. {remedy}"
                    )
        if len(self.steps) > 1 and method.router.channels:
            raise ConfigurationError(
                f"the training step of {name!r} has {len(self.steps)} optimizers, but "
                f"--router={method.choices['router']} sends the gradient of one optimizer in "
                "datagrams; expected one optimizer. Take --router=reliable, or --method=bsp."
            )


def _ids(variables: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables}


def distinct(objects: Iterable[Any]) -> list[Any]:
    """Return objects, for example variables, in their order but without duplicates."""
    return list({id(each): each for each in objects}.values())


def named(optimizer: Any) -> str:
    """Return the name of an optimizer for messages: its class and its Keras name."""
    return f"{type(optimizer).__name__} {optimizer.name!r}"


def is_built(model: Any) -> bool:
    """Return True if all variables of a model exist."""
    return all(layer.built for layer in model._flatten_layers())

"""What one step of a script does: which optimizers step which variables, found before it is taken.

A PS learns of all optimizers in the one offer that begins a run, and a train_step may have several.
So it is traced, or called, once in advance with a recorder in the place of their steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from thinwire.ops.methods.method import Method
from thinwire.ops.types import ConfigurationError

Pairs = Sequence[tuple[Any, Any]]  # gradient or None, variable

_RUNS_EAGERLY = threading.RLock()  # whether functions do is a setting of the whole process


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """What one optimizer does in a step.

    Attributes:
        optimizer: As the script calls it.
        variables: Those that it steps, in the order in which it was given them.
        without_gradient: Those of them that never have one.
        is_uniform: Whether it is always given the same variables.
    """

    optimizer: Any
    variables: tuple[Any, ...]
    without_gradient: tuple[Any, ...] = ()
    is_uniform: bool = True

    @staticmethod
    def of(optimizer: Any, pairs: Pairs) -> PlannedStep:
        """Return the step of an optimizer that is given these pairs."""
        missing = tuple(variable for gradient, variable in pairs if gradient is None)
        return PlannedStep(optimizer, tuple(variable for _, variable in pairs), missing)

    def merged(self, other: PlannedStep) -> PlannedStep:
        """Return both calls of one optimizer as one."""
        known, missing = _ids(self.variables), _ids(other.without_gradient)
        never = [each for each in self.without_gradient if id(each) in missing]
        return PlannedStep(
            self.optimizer,
            (*self.variables, *(each for each in other.variables if id(each) not in known)),
            tuple(never),
            self.is_uniform and other.is_uniform and known == _ids(other.variables),
        )


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The optimizers of a step, in the order in which they step first."""

    steps: tuple[PlannedStep, ...]

    @property
    def variables(self) -> list[Any]:
        """All that are stepped, each once."""
        return list({id(v): v for step in self.steps for v in step.variables}.values())

    @property
    def without_gradient(self) -> list[Any]:
        """Those that no optimizer has a gradient for."""
        moved = {
            id(v)
            for step in self.steps
            for v in step.variables
            if id(v) not in _ids(step.without_gradient)
        }
        return [v for v in self.variables if id(v) not in moved]

    def _warn_of_own_sums(self) -> None:
        """Name an optimizer whose steps on workers pull the run's model apart."""
        for step in self.steps:
            optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
            if isinstance(optimizer, keras.optimizers.Ftrl):
                logging.warning(
                    "%s makes its weights of sums of its own, not of those that it is sent, "
                    "so workers that step themselves pull the model apart; expected a method whose "
                    "PS steps: --method=bsp or --method=asgd",
                    named(step.optimizer),
                )

    def check(self, method: Method, name: str) -> None:
        """Refuse optimizers that a PS cannot step as they step alone.

        Args:
            method: Of the run.
            name: Of the model, for messages.

        Raises:
            ConfigurationError: Two step one variable, one steps others each time, or the method has
                no place for several.
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
                    f"the step of {name!r} gives {named(step.optimizer)} other variables from call "
                    "to call, and the PS steps with it on all of them together; expected one "
                    f"optimizer for each set of variables. {remedy}"
                )
        owners: dict[int, PlannedStep] = {}
        for step in self.steps:
            for variable in step.variables:
                owner = owners.setdefault(id(variable), step)
                if owner is not step:
                    raise ConfigurationError(
                        f"the step of {name!r} steps {variable.path} with both "
                        f"{named(owner.optimizer)} and {named(step.optimizer)}, and a PS steps a "
                        "variable with one optimizer; expected each optimizer to have variables of "
                        f"its own. {remedy}"
                    )
        if len(self.steps) > 1 and method.router.channels:
            raise ConfigurationError(
                f"the step of {name!r} has {len(self.steps)} optimizers, and --router="
                f"{method.choices['router']} sends whole gradients by datagrams; expected one "
                "optimizer. Take --router=reliable, or --method=bsp."
            )


def _ids(variables: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables}


def named(optimizer: Any) -> str:
    """Return how messages call an optimizer."""
    return f"{type(optimizer).__name__} {optimizer.name!r}"


class StepRecorder:
    """Stands in the place of all optimizers while a step is tried, and records their calls.

    Attributes:
        gradients: All that the optimizers were given, in order; empty if they are not kept.
    """

    def __init__(self, keeps_gradients: bool = False) -> None:
        self.gradients: list[Any] = []
        self._steps: dict[int, PlannedStep] = {}
        self._keeps_gradients = keeps_gradients

    def record(self, optimizer: Any, pairs: Pairs) -> None:
        """Take the place of a step."""
        step, known = PlannedStep.of(optimizer, pairs), self._steps.get(id(optimizer))
        self._steps[id(optimizer)] = step if known is None else known.merged(step)
        if self._keeps_gradients:
            self.gradients.extend(gradient for gradient, _ in pairs)

    def plan(self) -> StepPlan:
        """Return what was recorded."""
        return StepPlan(tuple(self._steps.values()))


def is_built(model: Any) -> bool:
    """Return whether a model's variables exist."""
    return all(layer.built for layer in model._flatten_layers())


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """Let functions of TensorFlow run eagerly: a trace of them would keep what a trial makes."""
    with _RUNS_EAGERLY:
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)


def try_in_graph(train_step: Callable[[Any], Any], data_spec: Any) -> None:
    """Trace a train_step for mini-batches of this form; it creates variables that there are not.

    No trace may be under way: within `tf.init_scope` there are no gradients. Functions of
    TensorFlow that it calls are not traced by themselves, which would keep what the trial makes.
    """
    with running_eagerly():
        tf.function(train_step, autograph=False).get_concrete_function(data_spec)


def try_eagerly(
    train_step: Callable[[Any], Any], data: Any, variables: Callable[[], Iterable[Any]]
) -> None:
    """Call a train_step for a mini-batch, and put what it has changed back.

    Args:
        train_step: The model's own.
        data: The mini-batch.
        variables: Returns all that it may change; those that it creates keep their values.
    """
    before = [(variable, variable.numpy()) for variable in variables()]
    train_step(data)
    for variable, values in before:
        variable.assign(values)


def before_first_step(model: Any, call: Callable[[Any], object]) -> None:
    """Let a model's next train_function call something first, once.

    Args:
        model: Has a train_function.
        call: Takes the tensor specs of the first batch.
    """
    alone = model.train_function

    def first(iterator: Any) -> Any:
        model.train_function = alone
        data_spec, iterator = take_first(iterator)
        call(data_spec)
        return alone(iterator)

    model.train_function = first


def take_first(iterator: Any) -> tuple[Any, Any]:
    """Return the form of an iterator's mini-batches, and an iterator of all of them."""
    if hasattr(iterator, "element_spec"):
        return iterator.element_spec, iterator
    first = next(iterator)
    return tf.nest.map_structure(_spec, first), itertools.chain([first], iterator)


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(leaf)

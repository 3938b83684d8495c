"""Values that one training step exchanges with the servers, as one operation of a TensorFlow graph.

TensorFlow passes only a list of arrays to a Python function and back. This module alone knows the
order of the arrays in the two lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class StepValues:
    """Values of a training step before its exchange: tensors in the graph, arrays in Python.

    Attributes:
        pushed: [num_parameters] float32 gradient, or weights if the optimizer updates them on this
            worker. In Python, the array is a view of TensorFlow's memory.
        rows: Number of examples in the mini-batch of the step.
        statistics: [m] float32 moving statistics (of BatchNormalization) after the step.
        rate: Learning rate of the optimizer, which a callback may have changed.
        scale: Loss scale by which the loss was multiplied; 0 if the loss is not scaled, or if the
            optimizer itself unscales the gradients.
        held: [num_parameters] float32 weights of the model if `pushed` is a gradient; an empty
            array if `pushed` are the weights.
        loss: [1] float32 mean loss of the mini-batch; an empty array if the loss is unknown.
        has_stepped: False if an optimizer on this worker skipped the step, because its scaled
            gradients overflowed.
        has_assigned: True if the script has set weights itself and `pushed` are weights.
        touched: Index of a shared variable with a sparse gradient (IndexedSlices) -> row numbers
            of the gradient, unordered and with duplicates.
        repeats: True if an earlier training step has already counted the examples of the
            mini-batch.
        in_turn: True if other optimizers of a training loop may step before the weights are
            exchanged.
    """

    pushed: Any
    rows: Any
    statistics: Any
    rate: Any
    scale: Any
    held: Any
    loss: Any
    has_stepped: Any = True
    has_assigned: Any = False
    touched: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    repeats: bool = False
    in_turn: bool = False


@dataclasses.dataclass(frozen=True)
class StepAnswer:
    """Values with which the next step starts: arrays in Python, tensors in the graph.

    Attributes:
        weights: [num_parameters] float32 weights.
        statistics: [m] float32 moving statistics.
        rate: Learning rate, float32.
        scale: Loss scale, float32.
        counts: [k] int64 batch counts of all learning-rate schedules.
    """

    weights: Any
    statistics: Any
    rate: Any
    scale: Any
    counts: Any


#: Fields of `StepValues` that are one tensor each, in the order in which TensorFlow passes them.
_PASSED = tuple(
    field.name
    for field in dataclasses.fields(StepValues)
    if field.name not in ("touched", "repeats", "in_turn")
)
_ANSWERED = tuple(field.name for field in dataclasses.fields(StepAnswer))
#: Data types of the fields of `StepAnswer`.
_TYPES = (tf.float32, tf.float32, tf.float32, tf.float32, tf.int64)


def exchange_in_python(
    exchange: Callable[[StepValues], StepAnswer], values: StepValues
) -> StepAnswer:
    """Call a Python function with the values of a step, from a graph or eagerly.

    Args:
        exchange: Function of the step's values as numpy arrays, which returns numpy arrays.
        values: The step's values as tensors.

    Returns:
        The function's result as tensors.
    """
    # The function below lives as long as the graph. It must not refer to the graph's tensors,
    # because the graph would then be freed only by a garbage collection.
    variables, repeats, in_turn = tuple(values.touched), values.repeats, values.in_turn

    def call(*arrays: Any) -> Sequence[Any]:
        passed = dict(zip(_PASSED, arrays, strict=False))
        touched = dict(zip(variables, arrays[len(_PASSED) :], strict=True))
        answer = exchange(StepValues(**passed, touched=touched, repeats=repeats, in_turn=in_turn))
        return [getattr(answer, name) for name in _ANSWERED]

    tensors = [getattr(values, name) for name in _PASSED]
    return StepAnswer(*tf.numpy_function(call, [*tensors, *values.touched.values()], _TYPES))

"""Steps of a Keras optimizer on TensorFlow: one traced graph, which XLA compiles if it is large."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from thinwire.ops.optimizers.steps import OptimizerSteps, SteppedVariables
from thinwire.ops.types import Float32

#: Fewest weights for which XLA compiles an optimizer step. With fewer weights, XLA saves less than
#: 0.2 ms per step but takes 0.1 s to compile.
FEWEST_FOR_XLA = 1 << 16


class TensorFlowSteps(OptimizerSteps):
    """The steps of a Keras optimizer on TensorFlow's device, which --device selects."""

    def __init__(self, stepped: SteppedVariables) -> None:
        self._stepped = stepped
        self._step = self._traced()

    @staticmethod
    def device() -> AbstractContextManager[Any]:
        """Return an empty context: TensorFlow chooses the device."""
        return contextlib.nullcontext()

    @staticmethod
    def assign(variable: Any, parts: Sequence[Any]) -> None:
        """Copy arrays, or DeviceArrays, into a variable."""
        if isinstance(parts[0], np.ndarray):
            variable.assign(np.concatenate(parts).reshape(variable.shape))
            return
        joined = tf.concat([_as_tensor(part) for part in parts], 0)
        variable.assign(tf.reshape(joined, variable.shape))

    def _traced(self) -> Callable[[Any], Any]:
        """Return the optimizer's step as one compiled TensorFlow graph.

        The argument of the graph for an optimizer step is a gradient [n] in the order of the
        variables. The graph for an optimizer step returns the new weights [n] in a list of one
        tensor, or an empty list if XLA may compile the graph.
        """
        stepped, fuses = self._stepped, self._stepped.is_elementwise
        optimizer, variables, shapes = stepped.optimizer, stepped.variables, stepped.shapes
        sizes = [int(np.prod(shape)) for shape in shapes]

        def step(gradient: Any) -> Any:
            if all(stepped.unused):
                optimizer._iterations.assign_add(1)
            else:
                pieces = zip(stepped.unused, tf.split(gradient, sizes), shapes, strict=True)
                gradients = [
                    None if unused else tf.reshape(piece, shape) for unused, piece, shape in pieces
                ]
                optimizer.apply(gradients, variables)
            values = [tf.reshape(variable.value, [-1]) for variable in variables]
            return [] if fuses else [tf.concat(values, 0)]

        # XLA fuses the passes over a few large variables. For many small variables, and for copies
        # between variables, XLA makes slower programs. So the step of an elementwise optimizer
        # returns no joined copy of the weights; the caller copies them from the variables.
        function: Any = tf.function(
            step,
            input_signature=[tf.TensorSpec((sum(sizes),), tf.float32)],
            autograph=False,  # autograph is off, as in Keras's own optimizer steps
            jit_compile=fuses and sum(sizes) >= FEWEST_FOR_XLA,
        )
        with warnings.catch_warnings():
            # Keras would warn that unused variables have no gradient
            warnings.simplefilter("ignore")
            traced: Callable[[Any], Any] = function.get_concrete_function()
        # A call of a TensorFlow concrete function takes a third less time than a call of
        # `function`, which looks up the concrete function each time.
        return traced

    def step(self, gradient: Any) -> Float32 | None:
        """Do one optimizer step with a gradient [n], which may be a DeviceArray."""
        stepped = self._step(_as_tensor(gradient))
        # the memoryview of the new weights avoids a copy
        return np.asarray(memoryview(stepped[0])) if stepped else None

    def values(self, number: int) -> Float32:
        """Return the entries [size] of variable `number` in the variable's own memory."""
        value = self._stepped.variables[number].value.value()
        return np.asarray(memoryview(value)).reshape(-1)

    def on_device(self, sizes: Sequence[Sequence[tuple[int, int]]]) -> Any:
        """Return the new weights [n] as a tensor on the device."""
        by_number: dict[int, Any] = {}
        for pieces, variable in zip(sizes, self._stepped.variables, strict=True):
            numbers, lengths = zip(*pieces, strict=True)
            flat = tf.reshape(variable.value, [-1])
            by_number |= zip(numbers, tf.split(flat, lengths), strict=True)
        return tf.concat([by_number[number] for number in range(len(by_number))], 0)


def _as_tensor(values: Any) -> Any:
    """Return a TensorFlow tensor [n] with the values of a memory buffer [n].

    The tensor shares the buffer's memory if the buffer's address is a multiple of 64 bytes and the
    buffer is writeable. The caller must not change the buffer while the tensor with its values is
    in use.
    """
    if not isinstance(values, np.ndarray):
        return values.value  # `values` is a `DeviceArray`, which contains a tensor
    if values.ctypes.data % 64 or not values.flags.writeable:
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())

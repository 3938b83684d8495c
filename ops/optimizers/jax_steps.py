"""Steps of a Keras optimizer on JAX: one compiled function of the variables' values.

The step takes the values of all variables and slots and returns new ones. The old values are
donated, so that XLA writes the new values into their memory. Memory that a variable shares with a
numpy array must never be donated, so `JaxSteps.assign` copies.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from thinwire.ops.optimizers.steps import OptimizerSteps, SteppedVariables
from thinwire.ops.types import Float32


class JaxSteps(OptimizerSteps):
    """The steps of a Keras optimizer on the processor, compiled by JAX."""

    def __init__(self, stepped: SteppedVariables) -> None:
        self._optimizer, self._variables = stepped.optimizer, list(stepped.variables)
        self._unused, self._shapes = stepped.unused, stepped.shapes
        with self.device(), warnings.catch_warnings():
            # Keras would warn that unused variables have no gradient
            warnings.simplefilter("ignore")
            step = jax.jit(self._stepped, donate_argnums=(0, 1))
            size = sum(math.prod(shape) for shape in self._shapes)
            gradient = jax.ShapeDtypeStruct((size,), np.float32)
            self._step = step.lower(*self._values(), gradient).compile()

    @staticmethod
    def device() -> AbstractContextManager[Any]:
        """Return the context in which JAX computes on the processor, if JAX may use it."""
        try:
            (processor, *_) = jax.local_devices(backend="cpu")
        except RuntimeError:  # JAX_PLATFORMS names other devices only
            return contextlib.nullcontext()
        context: AbstractContextManager[Any] = jax.default_device(processor)
        return context

    @staticmethod
    def assign(variable: Any, parts: Sequence[Any]) -> None:
        """Copy arrays into a variable."""
        joined = np.concatenate([np.asarray(part) for part in parts]).reshape(variable.shape)
        variable.assign(jnp.array(joined, variable.dtype, copy=True))

    def _values(self) -> tuple[list[Any], list[Any]]:
        """Return the values of the variables, and of the optimizer's slots."""
        slots = self._optimizer.variables
        return [v.value for v in self._variables], [slot.value for slot in slots]

    def _stepped(
        self, weights: list[Any], slots: list[Any], gradient: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the new values of the variables and slots after a step; a pure function."""
        if all(self._unused):
            count = self._optimizer._iterations
            variables = self._optimizer.variables
            pairs = zip(variables, slots, strict=True)
            return weights, [value + (variable is count) for variable, value in pairs]
        gradients, start = [], 0
        for unused, shape in zip(self._unused, self._shapes, strict=True):
            stop = start + math.prod(shape)
            gradients.append(None if unused else gradient[start:stop].reshape(shape))
            start = stop
        stepped, changed = self._optimizer.stateless_apply(slots, gradients, weights)
        return list(stepped), list(changed)

    def step(self, gradient: Any) -> Float32 | None:
        """Do one optimizer step with a gradient [n]; the caller reads each variable by `values`."""
        weights, slots = self._step(*self._values(), np.asarray(gradient))
        for variable, value in zip(self._variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(self._optimizer.variables, slots, strict=True):
            variable.assign(value)
        # The computation may still read the caller's gradient.
        jax.block_until_ready((weights, slots))
        return None

    def values(self, number: int) -> Float32:
        """Return the entries [size] of variable `number` in the variable's own memory."""
        return np.asarray(self._variables[number].value).reshape(-1)

"""Steps of a Keras optimizer on PyTorch: its eager, in-place functions of all variables together.

Keras' optimizers for PyTorch change the variables and slots in place by `torch._foreach` functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from thinwire.ops.optimizers.steps import OptimizerSteps, SteppedVariables
from thinwire.ops.types import Float32


class TorchSteps(OptimizerSteps):
    """The steps of a Keras optimizer on the processor, in PyTorch."""

    def __init__(self, stepped: SteppedVariables) -> None:
        self._optimizer, self._variables = stepped.optimizer, stepped.variables
        self._unused, self._shapes = stepped.unused, stepped.shapes
        self._sizes = [variable.value.numel() for variable in self._variables]
        pairs = zip(self._variables, self._unused, strict=True)
        self._used = [variable for variable, unused in pairs if not unused]
        if not any(map(self._optimizer._use_weight_decay, self._used)):
            # Keras would decay an empty list of tensors, which PyTorch refuses.
            self._optimizer.weight_decay = None

    @staticmethod
    def device() -> AbstractContextManager[Any]:
        """Return the context in which Keras makes its tensors on the processor."""
        import keras

        context: AbstractContextManager[Any] = keras.device("cpu")
        return context

    @staticmethod
    def assign(variable: Any, parts: Sequence[Any]) -> None:
        """Copy arrays into a variable's own memory."""
        joined = np.concatenate([np.asarray(part) for part in parts])
        variable.assign(joined.reshape(variable.shape))

    def step(self, gradient: Any) -> Float32 | None:
        """Do one optimizer step with a gradient [n]; the caller reads each variable by `values`."""
        flat = np.asarray(gradient)
        # PyTorch has no tensors on memory that must not be written.
        tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        pieces = zip(tensor.split(self._sizes), self._shapes, self._unused, strict=True)
        gradients = [piece.view(shape) for piece, shape, unused in pieces if not unused]
        with torch.no_grad():
            if gradients:
                self._optimizer.apply(gradients, self._used)
            else:
                self._optimizer._iterations.assign_add(1)
        return None

    def values(self, number: int) -> Float32:
        """Return the entries [size] of variable `number` in the variable's own memory."""
        values: Float32 = self._variables[number].value.detach().numpy().reshape(-1)
        return values

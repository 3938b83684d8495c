"""Interface of the steps of a Keras optimizer on the host, with one implementation per backend.

`thinwire.ops.optimizers.variables` groups a shard server's weights into Keras variables. How the
optimizer's step on these variables is compiled, and how arrays get into variables and back, depends
on Keras' backend. Each implementation is in a module of its own, the only one that imports its
framework.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from thinwire.ops.types import ConfigurationError, Float32

#: Backend of Keras -> module and class with the optimizer steps on that backend.
_CLASSES = {
    "tensorflow": ("tensorflow_steps", "TensorFlowSteps"),
    "jax": ("jax_steps", "JaxSteps"),
    "torch": ("torch_steps", "TorchSteps"),
}


@dataclasses.dataclass(frozen=True)
class SteppedVariables:
    """The Keras variables that a Keras optimizer steps together.

    Attributes:
        optimizer: Keras optimizer, built on the variables.
        variables: Keras variables with a shard server's weights. All weights, in the order of the
            variables, are one flat array [n].
        unused: True for each variable without a gradient, which a step does not change.
        is_elementwise: True if the step of a weight depends only on the weight's gradient and
            optimizer slots.
    """

    optimizer: Any
    variables: Sequence[Any]
    unused: Sequence[bool]
    is_elementwise: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the variables."""
        return [tuple(variable.shape) for variable in self.variables]


class OptimizerSteps(Protocol):
    """The steps of a Keras optimizer on one backend of Keras.

    Args:
        stepped: The optimizer and its variables.
    """

    def __init__(self, stepped: SteppedVariables) -> None: ...

    @staticmethod
    def device() -> AbstractContextManager[Any]:
        """Return the context in which variables and optimizers are built, stepped and assigned."""

    @staticmethod
    def assign(variable: Any, parts: Sequence[Any]) -> None:
        """Copy arrays into a variable, which does not use their memory afterwards.

        Args:
            variable: Keras variable of any shape.
            parts: Flat float32 arrays, which have together as many entries as the variable.
        """

    def step(self, gradient: Any) -> Float32 | None:
        """Do one optimizer step.

        Args:
            gradient: [n] float32, the gradients of all variables. The step does not change it and
                does not use its memory afterwards.

        Returns:
            The new weights [n], valid until the next step; None if the caller must read each
            variable by `values`.
        """

    def values(self, number: int) -> Float32:
        """Return the entries [size] of variable `number`, valid until the next step."""

    def on_device(self, sizes: Sequence[Sequence[tuple[int, int]]]) -> Any:
        """Return the new weights [n] as an array that a DeviceArray can take.

        The default is an array on the host.

        Args:
            sizes: For each variable, the (number, size) of the pieces of which it consists. The
                result has all pieces in the order of their numbers.
        """
        import numpy as np

        by_number: dict[int, Any] = {}
        for variable, pieces in enumerate(sizes):
            ends = np.cumsum([size for _, size in pieces])
            parts = np.split(self.values(variable), ends[:-1])
            by_number |= zip((number for number, _ in pieces), parts, strict=True)
        return np.concatenate([by_number[number] for number in range(len(by_number))])


def steps_of_backend(backend: str) -> type[OptimizerSteps]:
    """Return the class of the optimizer steps on a backend of Keras.

    Raises:
        ConfigurationError: Thinwire does not support the backend.
    """
    if backend not in _CLASSES:
        raise ConfigurationError(
            f"Keras uses its backend {backend}, which has no optimizer steps in Thinwire; expected "
            f"one of {', '.join(_CLASSES)}. Set the environment variable KERAS_BACKEND."
        )
    module, name = _CLASSES[backend]
    steps: type[OptimizerSteps] = getattr(
        importlib.import_module(f"thinwire.ops.optimizers.{module}"), name
    )
    return steps

"""The state of a Keras optimizer that steps on its worker, for checkpoints of the worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.ops.types import State
from thinwire.script.keras.step import steps_allowed

#: NumPy dtype kinds that checkpoint files support. Arrays of other dtypes (bfloat16) are saved as
#: float32.
_KINDS = "biuf"
#: Index of the learning rate among a Keras optimizer's variables; the step count has index 0.
_RATE = 1


class KerasState:
    """State of a Keras optimizer; see `thinwire.script.kept_state.KeptOptimizer`.

    Args:
        optimizer: Built Keras optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def name(self) -> str:
        """Name of the optimizer's class."""
        return type(self._optimizer).__name__

    def values(self) -> State:
        """Return copies of all variables of the optimizer by position, from "0" (step count)."""
        arrays = (np.array(variable.numpy()) for variable in self._optimizer.variables)
        return {
            str(number): array if array.dtype.kind in _KINDS else array.astype(np.float32)
            for number, array in enumerate(arrays)
        }

    def fits(self, saved: State) -> bool:
        """Return True if saved values have the shapes of the optimizer's variables."""
        return _shapes(saved) == _shapes(self.values())

    def load(self, saved: State, keeps_rate: bool) -> None:
        """Assign saved values to the optimizer's variables."""
        variables = self._optimizer.variables
        with steps_allowed():
            rate = variables[_RATE].numpy()
            for number, variable in enumerate(variables):
                variable.assign(saved[str(number)])
            if keeps_rate:
                variables[_RATE].assign(rate)


def _shapes(values: State) -> list[tuple[str, tuple[int, ...]]]:
    return [(number, np.shape(values[number])) for number in sorted(values)]

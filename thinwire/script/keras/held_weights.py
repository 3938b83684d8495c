"""Records which weights a script sets itself, if optimizers step on the worker.

If optimizers step on the worker, the weights alone do not show whether an optimizer or the script
changed them. So Thinwire records calls of `keras.Variable.assign`, eagerly and within a graph, by
which layers, callbacks and train_steps set weights. Changes of variables by Keras' optimizers and
by Thinwire are not recorded, because neither of them calls `assign`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from thinwire.script.backends.present import backend

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Assignments:
    """Sum of a script's assigned changes of each variable, since the last call of `take`."""

    def __init__(self) -> None:
        self._sums = backend().new_sums()

    @property
    def has_any(self) -> Any:
        """Scalar bool tensor: True if the script assigned a variable since the last `take`."""
        return self._sums.has_any

    def record(self, variable: Any, before: Any) -> None:
        """Add the change of one assignment to the variable's sum, eagerly or as part of a graph.

        Args:
            variable: Keras variable that already has the newly assigned value.
            before: Tensor with the value of the variable before the assignment.
        """
        value = backend().value_of(variable)
        self.add(variable, ops.cast(value, "float32") - ops.cast(before, "float32"))

    def add(self, variable: Any, change: Any) -> None:
        """Add a change of a variable, a float32 tensor of its shape, to the variable's sum."""
        self._sums.add(variable, change)

    def take(self, variables: Sequence[Any]) -> Float32 | None:
        """Return the changes assigned to variables since the last `take`, and clear their sums.

        Args:
            variables: Keras variables whose assigned changes are returned, in this order.

        Returns:
            [n] float32 changes of the variables' n values, concatenated; None if all changes are
            zero.
        """
        changes = self._sums.read(variables)
        if changes is None:
            return None
        self.clear()
        flat = np.concatenate([np.ravel(change) for change in changes]).astype(np.float32)
        return flat if flat.any() else None

    def clear(self) -> None:
        """Set the sums of the assigned changes of all variables to zero."""
        self._sums.clear()

"""Records a script's assignments to shared variables that optimizers on the worker also change.

If optimizers step on the worker, the weights alone do not show whether an optimizer or the script
changed them. So Thinwire records calls of `keras.Variable.assign`, eagerly and within a graph, by
which layers, callbacks and train_steps set weights. Changes of variables by Keras' optimizers and
by Thinwire are not recorded, because neither of them calls `assign`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from thinwire.script.keras.own_states import OWN_PREFIX

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Assignments:
    """Sum of a script's assigned changes of each variable, since the last call of `take`."""

    def __init__(self) -> None:
        # maps the id of a variable to the float32 sum of the script's changes of it
        self._sums: dict[int, Any] = {}
        # Create the variable `flag` before any step is traced, because TensorFlow traces a step a
        # second time if the step creates a variable.
        with tf.init_scope():
            self._flag = tf.Variable(False, trainable=False, name=f"{OWN_PREFIX}has_assigned")

    @property
    def has_any(self) -> Any:
        """Scalar bool tensor: True if the script assigned a variable since the last `take`."""
        return self._flag.read_value()

    def record(self, variable: Any, before: Any) -> None:
        """Add the change of one assignment to the variable's sum, eagerly or as part of a graph.

        Args:
            variable: Keras variable that already has the newly assigned value.
            before: Tensor with the value of the variable before the assignment.
        """
        if id(variable) not in self._sums:
            with tf.init_scope():
                self._sums[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape), trainable=False, name=f"{OWN_PREFIX}assigned"
                )
        change = tf.cast(variable.value, tf.float32) - tf.cast(before, tf.float32)
        total = self._sums[id(variable)].assign_add(change)
        # Set the flag of an assignment only after the sum has changed, so that a reader of the flag
        # sees the new sum.
        with tf.control_dependencies([total]):
            self._flag.assign(True)

    def take(self, variables: Sequence[Any]) -> Float32 | None:
        """Return the changes assigned to variables since the last `take`, and clear their sums.

        Args:
            variables: Keras variables whose assigned changes are returned, in this order.

        Returns:
            [n] float32 changes of the variables' n values, concatenated; None if all changes are
            zero.
        """
        if not self._sums:
            return None
        totals = [self._sums.get(id(variable)) for variable in variables]
        changes = [
            np.zeros(variable.shape) if total is None else total.numpy()
            for variable, total in zip(variables, totals, strict=True)
        ]
        self.clear()
        flat = np.concatenate([np.ravel(change) for change in changes]).astype(np.float32)
        return flat if flat.any() else None

    def clear(self) -> None:
        """Set the sums of the assigned changes of all variables to zero."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._flag.assign(False)

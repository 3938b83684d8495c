"""Sums up a script's own assignments to shared variables that local optimizers also step.

With local optimizers the weights alone do not show whether a change came from a step or from the
script. So calls of `keras.Variable.assign` are recorded, eagerly and within a graph: layers,
callbacks and train_steps set weights with this method. Keras' optimizers and Thinwire itself
assign by other methods, so their changes are not recorded.
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
    """Sum of the changes that assignments made to each variable, until `take` returns the sum."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}  # id of a variable -> [its shape] float32
        # Create the flag before any step is traced: TensorFlow traces a step a second time if the
        # step creates a variable.
        with tf.init_scope():
            self._flag = tf.Variable(False, trainable=False, name=f"{OWN_PREFIX}has_assigned")

    @property
    def has_any(self) -> Any:
        """Scalar bool tensor: True if the script assigned a variable since the last `take`."""
        return self._flag.read_value()

    def record(self, variable: Any, before: Any) -> None:
        """Add the change of one assignment, eagerly or as part of a graph.

        Args:
            variable: Keras variable, which already has the new value.
            before: Value of the variable before the assignment, a tensor.
        """
        if id(variable) not in self._sums:
            with tf.init_scope():
                self._sums[id(variable)] = _new_sum(variable)
        change = tf.cast(variable.value, tf.float32) - tf.cast(before, tf.float32)
        total = self._sums[id(variable)].assign_add(change)
        with tf.control_dependencies([total]):  # a reader that sees the flag also sees the sum
            self._flag.assign(True)

    def take(self, variables: Sequence[Any]) -> Float32 | None:
        """Return the assigned changes since the last call, and clear them.

        Args:
            variables: Variables whose changes are returned, in this order.

        Returns:
            [n] float32 changes of all values of the variables; None if nothing has changed.
        """
        if not self._sums:
            return None
        shapes = ([int(size) for size in variable.shape] for variable in variables)
        changes = [
            np.ravel(self._sums[id(var)].numpy()) if id(var) in self._sums else np.zeros(shape)
            for var, shape in zip(variables, shapes, strict=True)
        ]
        self.clear()
        flat = np.concatenate([np.ravel(change) for change in changes]).astype(np.float32)
        return flat if flat.any() else None

    def clear(self) -> None:
        """Set all sums to zero."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._flag.assign(False)


def _new_sum(variable: Any) -> tf.Variable:
    zeros = tf.zeros(variable.shape)
    return tf.Variable(zeros, trainable=False, name=f"{OWN_PREFIX}assigned")

"""What a script assigns to shared variables itself, where its own optimizers step them as well.

The weights alone do not show then what was a step and what was not. So `keras.Variable.assign` is
looked at, by which layers, callbacks and train_steps set weights, within a graph too. Optimizers of
Keras assign otherwise, and so does what comes from the run.
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
    """Adds up by how much variables were changed by assignments, until it is taken."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}  # id of a variable -> [its shape] float32
        # Made before any step is traced: TensorFlow traces a step again that makes a variable.
        with tf.init_scope():
            self._flag = tf.Variable(False, trainable=False, name=f"{OWN_PREFIX}has_assigned")

    @property
    def has_any(self) -> Any:
        """Whether there were any, a scalar tensor."""
        return self._flag.read_value()

    def record(self, variable: Any, before: Any) -> None:
        """Add an assignment, eagerly or as part of a graph.

        Args:
            variable: Of Keras, with its new value.
            before: Its value before, a tensor.
        """
        if id(variable) not in self._sums:
            with tf.init_scope():
                self._sums[id(variable)] = _new_sum(variable)
        change = tf.cast(variable.value, tf.float32) - tf.cast(before, tf.float32)
        total = self._sums[id(variable)].assign_add(change)
        with tf.control_dependencies([total]):  # whoever sees the flag sees the sum
            self._flag.assign(True)

    def take(self, variables: Sequence[Any]) -> Float32 | None:
        """Return the sum since the last call, of some variables: [n] float32; None: nothing."""
        if not self._sums:
            return None
        shapes = ([int(size) for size in each.shape] for each in variables)
        found = [
            np.ravel(self._sums[id(each)].numpy()) if id(each) in self._sums else np.zeros(shape)
            for each, shape in zip(variables, shapes, strict=True)
        ]
        self.clear()
        flat = np.concatenate([np.ravel(each) for each in found]).astype(np.float32)
        return flat if flat.any() else None

    def clear(self) -> None:
        """Forget what there was."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._flag.assign(False)


def _new_sum(variable: Any) -> tf.Variable:
    zeros = tf.zeros(variable.shape)
    return tf.Variable(zeros, trainable=False, name=f"{OWN_PREFIX}assigned")

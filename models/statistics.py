"""The moving statistics of a model's BatchNormalization layers, which training does not share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

    from ops.types import Float32

#: What Keras calls them; a layer of your own that uses these names is treated likewise.
_NAMES = frozenset({"moving_mean", "moving_variance"})


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving means and variances, in the model's order: layer by layer, mean first.

    The order follows from the model alone, so it is the same on every node that builds the same
    model, inner models and frozen layers included. Nothing to return is a legal answer.

    Args:
        model: Built.
    """
    return [v for v in model.non_trainable_variables if v.name in _NAMES]


class FlatVariables:
    """Variables, possibly none, seen as one flat float32 vector.

    Attributes:
        size: Its length.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Compile nothing yet."""
        import tensorflow as tf

        self._variables = list(variables)
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self.size = sum(self._sizes)
        # One call each: many small variables one by one would cost more than a small model's step.
        self._joined, self._split = tf.function(self._join), tf.function(self._assign_split)

    def read(self) -> Float32:
        """Return a copy of the values: [size] float32."""
        return np.array(self._joined()) if self.size else np.empty(0, np.float32)

    def assign(self, flat: Float32) -> None:
        """Overwrite the values from [size] float32, an array or a tensor."""
        if self.size:
            self._split(flat)

    def joined(self) -> Any:
        """Return the values as a tensor, [size] float32; for use inside a tf.function."""
        import tensorflow as tf

        return self._joined() if self.size else tf.zeros([0])

    def _join(self) -> Any:
        import tensorflow as tf

        parts = [tf.cast(variable.value, tf.float32) for variable in self._variables]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    def _assign_split(self, flat: Any) -> None:
        import tensorflow as tf

        for variable, part in zip(self._variables, tf.split(flat, self._sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

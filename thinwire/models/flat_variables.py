"""Reads and assigns a list of variables as one flat vector, on each of Keras' backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Number of calls that `FlatVariables` runs before it compiles its functions. Compiling takes
#: seconds for a thousand variables, which does not pay for the few calls at a worker's start.
_CALLS_AS_THEY_ARE = 8


class FlatVariables:
    """View of a list of Keras variables (may be empty) as one float32 vector.

    Attributes:
        size: Number of float32 values in the flat vector of all variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Prepare functions that read and assign `variables`; their first calls run uncompiled."""
        import keras

        self._variables = list(variables)
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self._ends = np.cumsum([0, *self._sizes])
        self.size = sum(self._sizes)
        self._num_calls = 0
        self._compiles = keras.backend.backend() == "tensorflow"

    @functools.cached_property
    def _compiled(self) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Functions of TensorFlow that read and assign all variables in one call.

        One call for each variable would take longer than a small model's training step. Each
        function is a new partial object, because TensorFlow counts retracing per code object, and
        plain methods of several instances would share one count and cause a false warning.
        """
        import tensorflow as tf

        return (
            tf.function(functools.partial(self._join), autograph=False),
            tf.function(functools.partial(self._assign_parts), autograph=False),
        )

    @property
    def _is_worth_compiling(self) -> bool:
        """True if `read` and `assign` were called so often that compiling them saves time."""
        self._num_calls += 1
        return self._compiles and self._num_calls > _CALLS_AS_THEY_ARE

    def read(self) -> Float32:
        """Return a copy of all variables' values as one vector, [size] float32."""
        if not self.size:
            return np.empty(0, np.float32)
        if self._is_worth_compiling:
            return np.array(self._compiled[0]())
        parts = [np.ravel(variable.numpy()) for variable in self._variables]
        return np.concatenate(parts, dtype=np.float32)

    def assign(self, flat: Any) -> None:
        """Overwrite the variables with the values of `flat`, an array or tensor [size] float32."""
        if self.size:
            (self._compiled[1] if self._is_worth_compiling else self._assign_parts)(flat)

    def joined(self) -> Any:
        """Return the variables' values as a tensor [size] float32, for use inside a step."""
        from keras import ops

        return self._join() if self.size else ops.zeros([0])

    def _join(self) -> Any:
        from keras import ops

        parts = [ops.cast(variable.value, "float32") for variable in self._variables]
        return ops.concatenate([ops.reshape(part, [-1]) for part in parts], 0)

    def _assign_parts(self, flat: Any) -> None:
        for variable, values in self.parts(flat):
            _assign(variable, values)

    def parts(self, flat: Any) -> list[tuple[Any, Any]]:
        """Return pairs (variable, the variable's values in `flat`), for use inside a step.

        Args:
            flat: Values of all variables as one vector, [size] float32: a tensor or an array. The
                parts of an array are copies.
        """
        from keras import ops

        if not self.size:
            return []
        if isinstance(flat, np.ndarray):
            # A framework may keep an array's memory as a tensor's, which must not change later.
            pieces = [flat[a:b].copy() for a, b in zip(self._ends, self._ends[1:], strict=False)]
        else:
            pieces = ops.split(flat, [int(end) for end in self._ends[1:-1]])
        return [
            (variable, ops.cast(ops.reshape(piece, variable.shape), variable.dtype))
            for variable, piece in zip(self._variables, pieces, strict=True)
        ]


def _assign(variable: Any, values: Any) -> None:
    """Assign a variable without `variable.assign`, in which Thinwire records a script's changes."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

    if in_stateless_scope():
        get_stateless_scope().add_update((variable, values))
    else:
        variable._direct_assign(values)

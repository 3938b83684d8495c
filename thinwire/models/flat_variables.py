"""Reads and assigns a list of variables as one flat vector, on each of Keras' backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models import flat_tensors

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
        self._ends = np.cumsum(self._sizes, dtype=int).tolist()
        self.size = sum(self._sizes)
        self._num_calls = 0
        self._backend = keras.backend.backend()

    @functools.cached_property
    def _compiled_join(self) -> Callable[[], Any]:
        """Function of TensorFlow that joins all variables in one call.

        One call for each variable would take longer than a small model's training step. The
        function is a new partial object, because TensorFlow counts retracing per code object, and
        plain methods of several instances would share one count and cause a false warning.
        """
        import tensorflow as tf

        compiled: Callable[[], Any] = tf.function(functools.partial(self.joined), autograph=False)
        return compiled

    @functools.cached_property
    def _compiled_assign(self) -> Callable[[Any], None]:
        """Function of TensorFlow or JAX that assigns all variables in one call."""
        if self._backend == "tensorflow":
            import tensorflow as tf

            compiled: Callable[[Any], None] = tf.function(
                functools.partial(self._assign_parts), autograph=False
            )
            return compiled
        import jax

        cut = jax.jit(lambda flat: flat_tensors.cut(flat, self._variables, self._ends))

        def assign(flat: Any) -> None:
            # JAX may read the argument after the call
            values = cut(flat.copy() if isinstance(flat, np.ndarray) else flat)
            for variable, value in zip(self._variables, values, strict=True):
                _assign(variable, value)

        return assign

    @property
    def _is_worth_compiling(self) -> bool:
        """True if `read` and `assign` were called so often that compiling them saves time."""
        self._num_calls += 1
        return self._num_calls > _CALLS_AS_THEY_ARE

    def read(self) -> Float32:
        """Return a copy of all variables' values as one vector, [size] float32."""
        if not self.size:
            return np.empty(0, np.float32)
        if self._backend == "tensorflow" and self._is_worth_compiling:
            return np.array(self._compiled_join())
        parts = [np.ravel(variable.numpy()) for variable in self._variables]
        return np.concatenate(parts, dtype=np.float32)

    def assign(self, flat: Any) -> None:
        """Overwrite the variables with the values of `flat`, an array or tensor [size] float32."""
        if not self.size:
            return
        # PyTorch does not compile, and calls its functions fast.
        if self._backend != "torch" and self._is_worth_compiling:
            self._compiled_assign(flat)
        else:
            self._assign_parts(flat)

    def joined(self) -> Any:
        """Return the variables' values as a tensor [size] float32, for use inside a step."""
        return flat_tensors.join(self.values)

    @property
    def values(self) -> list[Any]:
        """The variables' values as tensors."""
        return [variable.value for variable in self._variables]

    def _assign_parts(self, flat: Any) -> None:
        for variable, values in self.parts(flat):
            _assign(variable, values)

    def parts(self, flat: Any) -> list[tuple[Any, Any]]:
        """Return pairs (variable, the variable's values in `flat`), for use inside a step.

        Args:
            flat: Values of all variables as one vector, [size] float32: a tensor or an array. The
                parts of an array are copies.
        """
        if not self.size:
            return []
        values = flat_tensors.cut(flat, self._variables, self._ends)
        return list(zip(self._variables, values, strict=True))


def _assign(variable: Any, values: Any) -> None:
    """Assign a variable without `variable.assign`, in which Thinwire records a script's changes."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

    if in_stateless_scope():
        get_stateless_scope().add_update((variable, values))
    else:
        variable._direct_assign(values)

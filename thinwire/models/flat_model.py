"""Reads and assigns a model's shared variables as one flat vector, equal on every node.

`SharedModel` holds a Keras model and the signature of its shared variables (W_global).
`moving_statistics` returns the moving means and variances of a model's BatchNormalization layers,
which are not in W_global.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models.registry import build_network, build_user_model, load_user_model
from thinwire.models.tasks import CLASSIFICATION, TASKS
from thinwire.ops.sharding import w_global
from thinwire.ops.types import ConfigurationError, ModelSpec
from thinwire.runtime.run.settings import ModelChoice, Run

if TYPE_CHECKING:
    import keras

    from thinwire.ops.types import Float32, ShardLayout

#: Keras' names of BatchNormalization's moving statistics. Variables of custom layers with these
#: names count as moving statistics, too.
_NAMES = frozenset({"moving_mean", "moving_variance"})


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return a model's moving means and variances layer by layer, each mean before its variance.

    The list of moving statistics includes inner models and frozen layers. The order of the moving
    statistics depends only on the model, so every node that builds the same model gets the same
    order. The list of moving statistics is empty if the model has no BatchNormalization layer.

    Args:
        model: Built Keras model.
    """
    return [v for v in model.non_trainable_variables if v.name in _NAMES]


#: Number of calls that `FlatVariables` runs before it compiles its functions. Compiling takes
#: seconds for a thousand variables, which does not pay for the few calls at a worker's start.
_CALLS_AS_THEY_ARE = 8


class FlatVariables:
    """View of a list of TensorFlow or Keras variables (may be empty) as one float32 vector.

    Attributes:
        size: Number of float32 values in the flat vector of all variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Prepare functions that read and assign `variables`; their first calls run uncompiled."""
        import tensorflow as tf

        self._variables = list(variables)
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self.size = sum(self._sizes)
        self._num_calls = 0
        # The functions are compiled so that reading or assigning all variables is one call. One
        # call per variable would take longer than a small model's training step. Each function is a
        # new partial object, because TensorFlow counts retracing per code object, and plain methods
        # of several instances would share one count and cause a false warning.
        self._joined = tf.function(functools.partial(self._join), autograph=False)
        self._split = tf.function(functools.partial(self._assign_split), autograph=False)

    @property
    def _is_worth_compiling(self) -> bool:
        """True if `read` and `assign` were called so often that compiling them saves time."""
        self._num_calls += 1
        return self._num_calls > _CALLS_AS_THEY_ARE

    def read(self) -> Float32:
        """Return a copy of all variables' values as one vector, [size] float32."""
        if not self.size:
            return np.empty(0, np.float32)
        return np.array(self._joined() if self._is_worth_compiling else self._join())

    def assign(self, flat: Float32) -> None:
        """Overwrite the variables with the values of `flat`, an array or tensor [size] float32."""
        if self.size:
            (self._split if self._is_worth_compiling else self._assign_split)(flat)

    def joined(self) -> Any:
        """Return the variables' values as a tensor [size] float32, for use inside a tf.function."""
        import tensorflow as tf

        return self._join() if self.size else tf.zeros([0])

    def _join(self) -> Any:
        import tensorflow as tf

        parts = [tf.cast(variable.value, tf.float32) for variable in self._variables]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    def _assign_split(self, flat: Any) -> None:
        for variable, values in self.parts(flat):
            # `variable.assign` is avoided, because Thinwire patches it to record assignments of
            # scripts.
            variable.value.assign(values)

    def parts(self, flat: Any) -> list[tuple[Any, Any]]:
        """Return pairs (variable, the variable's values in `flat`), for use inside a tf.function.

        Args:
            flat: Values of all variables as one vector, [size] float32.
        """
        import tensorflow as tf

        parts = tf.split(flat, self._sizes) if self.size else []
        return [
            (variable, tf.cast(tf.reshape(part, variable.shape), variable.dtype))
            for variable, part in zip(self._variables, parts, strict=True)
        ]


def has_gpu(run: Run) -> bool:
    """Return True if the run uses a GPU: TensorFlow sees a GPU, and --device is not cpu.

    Raises:
        ConfigurationError: --device names a GPU, but TensorFlow sees no GPU.
    """
    import tensorflow as tf

    present = bool(tf.config.list_physical_devices("GPU"))
    if run.device.startswith("gpu") and not present:
        raise ConfigurationError(
            f"--device={run.device}: TensorFlow finds no GPU; expected a GPU, or --device=cpu."
        )
    return present and run.device != "cpu"


class SharedModel:
    """A Keras model with the ordered list and signature of the variables that workers share."""

    def __init__(self, choice: ModelChoice, seed: int) -> None:
        """Build the network or the user's model, with equal initial weights for equal seeds.

        Raises:
            ConfigurationError: The model cannot be built, or has no variables that workers could
                share.
        """
        user_module: ModuleType | None = None
        if choice.path is not None:
            user_module = load_user_model(choice.path)
            model: Any = build_user_model(user_module, seed)
        else:
            model = build_network(
                choice.network, choice.image_size, choice.image_depth, choice.nb_classes, seed
            )
        self._share(model, user_module)
        self.task = TASKS[choice.task]
        """Training task (row of `TASKS`) that the model is trained for."""

    @classmethod
    def of(
        cls, model: Any, is_offered: bool = False, stepped: Sequence[Any] | None = None
    ) -> SharedModel:
        """Return a `SharedModel` of a Keras model that the caller has built, with current weights.

        Args:
            model: Built Keras model.
            is_offered: True if a script sends the model to the PS shards, so that no shard builds
                the model. Then several variables may have equal paths, which are numbered.
            stepped: Variables that a training step passes to the optimizer; None if unknown.

        Raises:
            ConfigurationError: The model has no variables to share, or W_global does not fit the
                model.
        """
        shared = cls.__new__(cls)
        shared.task = TASKS[CLASSIFICATION]
        shared._share(model, None, is_offered, stepped)
        return shared

    def _share(
        self,
        model: Any,
        user_module: ModuleType | None,
        numbers_paths: bool = False,
        stepped: Sequence[Any] | None = None,
    ) -> None:
        self.model, self.user_module = model, user_module
        self.variables = w_global.shared_variables(model, stepped, numbers_paths)
        self.spec: ModelSpec = w_global.model_spec(self.variables, numbers_paths)
        self.statistics = moving_statistics(model)

    def flat(self) -> Float32:
        """Return a copy of the values of all shared variables, [num_parameters] float32."""
        return np.concatenate([np.asarray(v.value).ravel() for v in self.variables])

    def part(self, layout: ShardLayout) -> Float32:
        """Return a copy of the k parameters that a PS shard stores, [k] float32, in its order."""
        part, filled = np.empty(layout.size, np.float32), 0
        for piece in layout.slices:  # one variable at a time, because reading copies a variable
            values = np.asarray(self.variables[piece.tensor].value).ravel()
            part[filled : filled + piece.size] = values[piece.start : piece.stop]
            filled += piece.size
        return part

    def assign(self, flat: Float32) -> None:
        """Overwrite the shared variables with `flat`, [num_parameters] float32."""
        offsets = self.spec.offsets
        for number, variable in enumerate(self.variables):
            values = flat[offsets[number] : offsets[number + 1]]
            variable.assign(values.reshape(variable.shape))

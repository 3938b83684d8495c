"""A model's shared variables and moving statistics, with a signature equal on every node.

`SharedModel` holds a Keras model and the signature of its shared variables (W_global).
`moving_statistics` returns the moving means and variances of a model's BatchNormalization layers,
which are not in W_global.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models.flat_variables import FlatVariables
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

    def view(self, variables: Sequence[Any]) -> FlatVariables:
        """Return a flat view of some variables of the model."""
        return FlatVariables(variables)

    def flat(self) -> Float32:
        """Return a copy of the values of all shared variables, [num_parameters] float32."""
        return np.concatenate([np.asarray(v.value).ravel() for v in self.variables])

    def part(self, layout: ShardLayout) -> Float32:
        """Return a copy of the k parameters that a PS shard stores, [k] float32, in its order."""
        part, filled = np.empty(layout.size, np.float32), 0
        for piece in layout.slices:  # one variable at a time, because reading copies a variable
            values = np.asarray(self.variables[piece.tensor].numpy()).ravel()
            part[filled : filled + piece.size] = values[piece.start : piece.stop]
            filled += piece.size
        return part

    def assign(self, flat: Float32) -> None:
        """Overwrite the shared variables with `flat`, [num_parameters] float32."""
        offsets = self.spec.offsets
        for number, variable in enumerate(self.variables):
            values = flat[offsets[number] : offsets[number + 1]]
            variable.assign(values.reshape(variable.shape))

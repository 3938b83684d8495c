"""A built model seen as one flat vector of its shared variables, the same on every node."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

import models
from models.statistics import moving_statistics
from ops import collection
from ops.run import ModelChoice, Run
from ops.types import ConfigurationError, ModelSpec

if TYPE_CHECKING:
    from ops.types import Float32


def has_gpu(run: Run) -> bool:
    """Return whether the run asks for a GPU, or takes one because there is one.

    Raises:
        ConfigurationError: A GPU was asked for and TensorFlow sees none.
    """
    import tensorflow as tf

    present = bool(tf.config.list_physical_devices("GPU"))
    if run.device.startswith("gpu") and not present:
        raise ConfigurationError(
            f"--device={run.device}: TensorFlow sees no such GPU; expected one, or --device=cpu."
        )
    return present and run.device != "cpu"


class SharedModel:
    """A Keras model, its W_global variables in order, and their signature."""

    def __init__(self, choice: ModelChoice, seed: int) -> None:
        """Build the network or the user's model, with the same values for the same seed.

        Raises:
            ConfigurationError: It cannot be built, or has nothing to share.
        """
        user_module: ModuleType | None = None
        if choice.path is not None:
            user_module = models.load_user_model(choice.path)
            model: Any = models.build_user_model(user_module, seed)
        else:
            model = models.build(
                choice.network, choice.image_size, choice.image_depth, choice.nb_classes, seed
            )
        self._share(model, user_module)

    @classmethod
    def of(cls, model: Any) -> SharedModel:
        """Share a Keras model that was built elsewhere, from the weights that it has.

        Raises:
            ConfigurationError: It has nothing to share, or W_global does not fit it.
        """
        shared = cls.__new__(cls)
        shared._share(model, None)
        return shared

    def _share(self, model: Any, user_module: ModuleType | None) -> None:
        self.model, self.user_module = model, user_module
        self.variables = collection.shared_variables(model)
        self.spec: ModelSpec = collection.model_spec(self.variables)
        self.statistics = moving_statistics(model)

    def flat(self) -> Float32:
        """Return a copy of the shared values: [num_parameters] float32."""
        return np.concatenate([np.asarray(v.value).ravel() for v in self.variables])

    def assign(self, flat: Float32) -> None:
        """Overwrite the shared values from [num_parameters] float32."""
        offsets = self.spec.offsets
        for number, variable in enumerate(self.variables):
            values = flat[offsets[number] : offsets[number + 1]]
            variable.assign(values.reshape(variable.shape))

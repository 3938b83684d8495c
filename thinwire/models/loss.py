"""The training loss of a model: the compiled loss, or without one the task's loss."""

from __future__ import annotations

from typing import Any

import keras

from thinwire.models.tasks import CLASSIFICATION, TASKS, Task
from thinwire.ops.types import ConfigurationError


class _FunctionLoss(keras.losses.Loss):
    """Keras loss that returns the batch mean of a loss function (labels, outputs) -> [N]."""

    def __init__(self, function: Any) -> None:
        super().__init__(name=getattr(function, "__name__", "loss"))
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each example of a batch, [N]."""
        return self._function(y_true, y_pred)


def ensure_compiled_loss(
    model: keras.Model, task: Task = TASKS[CLASSIFICATION]
) -> keras.losses.Loss:
    """Return the Keras loss with which a model is trained and evaluated.

    Args:
        model: Built Keras model, compiled or not.
        task: Training task of the model, an entry of `TASKS`.

    Returns:
        The loss that the model was compiled with, or else the loss of the task. For classification,
        the loss is the mean sparse categorical cross-entropy, from logits unless the last layer
        applies a softmax.

    Raises:
        ConfigurationError: The compiled loss is unknown, expects one-hot labels, or the model was
            compiled with several losses.
    """
    compiled_loss = model.loss if getattr(model, "compiled", False) else None
    if compiled_loss is None:
        loss: keras.losses.Loss = task.loss(model)
        return loss
    if isinstance(compiled_loss, list | tuple | dict):
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with several losses ({compiled_loss!r:.80}); "
            "expected one loss. Compile the model with one loss for one output."
        )
    try:
        loss = keras.losses.get(compiled_loss)
    except ValueError as error:
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with the loss {compiled_loss!r:.80}, which Keras "
            "does not know; expected a keras.losses.Loss, its name, or a function of (y_true, "
            "y_pred)."
        ) from error
    if (
        isinstance(loss, keras.losses.CategoricalCrossentropy)
        or loss is keras.losses.categorical_crossentropy
    ):
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with categorical cross-entropy, which expects "
            "one-hot labels; expected a loss for class numbers. Compile the model with "
            "keras.losses.SparseCategoricalCrossentropy."
        )
    return loss if isinstance(loss, keras.losses.Loss) else _FunctionLoss(loss)

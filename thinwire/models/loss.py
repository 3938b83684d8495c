"""The training loss of any model: its own if it was compiled with one, else its task's."""

from __future__ import annotations

from typing import Any

import keras

from thinwire.models.tasks import CLASSIFICATION, TASKS, Task
from thinwire.ops.types import ConfigurationError


class _FunctionLoss(keras.losses.Loss):
    """A loss function of (labels, outputs) -> [N] as a Loss: the mean over the batch."""

    def __init__(self, function: Any) -> None:
        super().__init__(name=getattr(function, "__name__", "loss"))
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each example."""
        return self._function(y_true, y_pred)


def ensure_compiled_loss(
    model: keras.Model, task: Task = TASKS[CLASSIFICATION]
) -> keras.losses.Loss:
    """Return the loss to train and evaluate a model with.

    Args:
        model: Built; compiled or not.
        task: What it is for.

    Returns:
        The loss the model was compiled with; else that of the task, such as the mean sparse
        categorical cross-entropy, from logits unless the last layer takes the softmax.

    Raises:
        ConfigurationError: The compiled loss is unknown, one of several, or wants one-hot labels.
    """
    given = model.loss if getattr(model, "compiled", False) else None
    if given is None:
        loss: keras.losses.Loss = task.loss(model)
        return loss
    if isinstance(given, list | tuple | dict):
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with several losses ({given!r:.80}); expected one. "
            "Compile it with one loss for one output."
        )
    try:
        loss = keras.losses.get(given)
    except ValueError as error:
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with the loss {given!r:.80}, which Keras does not "
            "know; expected a keras.losses.Loss, its name, or a function of (y_true, y_pred)."
        ) from error
    if (
        isinstance(loss, keras.losses.CategoricalCrossentropy)
        or loss is keras.losses.categorical_crossentropy
    ):
        raise ConfigurationError(
            f"Model {model.name!r} is compiled with categorical cross-entropy, which wants one-hot "
            "labels; expected a loss for class numbers. Compile it with "
            "keras.losses.SparseCategoricalCrossentropy."
        )
    return loss if isinstance(loss, keras.losses.Loss) else _FunctionLoss(loss)

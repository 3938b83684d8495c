"""Accuracy and loss of the central model over the whole test set, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ops.types import ConfigurationError

#: Activations of one evaluation batch may take about this much.
_MEMORY_BYTES = 256 * 2**20
#: Batch when the model does not tell the shapes of its layers.
_UNKNOWN_MODEL_BATCH = 1024

Weights = Sequence[Any] | Callable[[], None]


class Evaluator:
    """Evaluates one model again and again; compiles once.

    Args:
        model: built Keras model with outputs [n, classes].
        loss: Keras loss, or a function of (labels, outputs) giving a mean or a value per example.
        images: [n, ...], as the model wants them.
        labels: [n] or [n, 1] class numbers.
        batch_size: upper limit; cut to the test set and to memory, so that AdaComp's 100000 works.
        variables: what a list of weights given to ``evaluate`` is assigned to, in order; by default
            the model's trainable variables.

    Raises:
        ConfigurationError: empty or unequal images and labels, or a batch size below 1.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        images: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        variables: Sequence[Any] | None = None,
    ) -> None:
        if len(images) != len(labels) or not len(images):
            raise ConfigurationError(
                f"The test set has {len(images)} images and {len(labels)} labels; expected as many "
                "of each, at least one. Check the data files."
            )
        if batch_size < 1:
            raise ConfigurationError(f"--batch_size is {batch_size}; expected at least 1.")
        self.batch_size = min(batch_size, len(images), _batch_that_fits(model))
        self._model = model
        self._loss = loss
        self._images = images
        self._labels = np.asarray(labels).reshape(len(labels))
        self._variables = list(model.trainable_variables if variables is None else variables)
        self._run_batch = self._compile()

    def evaluate(self, weights: Weights) -> tuple[float, float]:
        """Set the weights and return (accuracy, mean loss) over all examples.

        Args:
            weights: one array per variable, or a function that sets them itself.

        Returns:
            Accuracy is correct / total. Loss is NaN or infinite when the model has diverged.

        Raises:
            ValueError: another number of arrays than variables.
        """
        if callable(weights):
            weights()
        else:
            for variable, value in zip(self._variables, weights, strict=True):
                variable.assign(value)
        correct, losses = 0, []
        for start in range(0, len(self._images), self.batch_size):
            images, labels = self._batch(start)
            num_valid = min(self.batch_size, len(self._images) - start)
            batch_correct, batch_loss = self._run_batch(images, labels, np.int32(num_valid))
            correct += int(batch_correct)
            losses.append(float(batch_loss) * num_valid)
        return correct / len(self._images), math.fsum(losses) / len(self._images)

    def _batch(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a full batch; the last one is filled up, so that one compiled shape serves all."""
        chosen = np.arange(start, start + self.batch_size) % len(self._images)
        if start + self.batch_size <= len(self._images):
            return self._images[start : chosen[-1] + 1], self._labels[start : chosen[-1] + 1]
        return self._images[chosen], self._labels[chosen]

    def _compile(self) -> Any:
        """Return a function of (images, labels, valid) giving correct answers and mean loss."""
        import tensorflow as tf

        def run_batch(images: Any, labels: Any, num_valid: Any) -> Any:
            outputs = self._model(images, training=False)[:num_valid]
            labels = labels[:num_valid]
            if outputs.shape.rank != 2 or outputs.shape[-1] == 1:
                raise ConfigurationError(
                    f"Model {self._model.name!r} gives outputs of shape {outputs.shape}; expected "
                    "one value per class, [n, classes], with at least two classes."
                )
            answers = tf.argmax(outputs, axis=-1, output_type=tf.int64)
            correct = tf.reduce_sum(tf.cast(answers == tf.cast(labels, tf.int64), tf.int32))
            return correct, tf.reduce_mean(_loss_values(self._loss, labels, outputs))

        def signature(array: np.ndarray) -> Any:
            return tf.TensorSpec((self.batch_size, *array.shape[1:]), array.dtype)

        shapes = [signature(self._images), signature(self._labels), tf.TensorSpec((), tf.int32)]
        return tf.function(run_batch, input_signature=shapes, autograph=False)


def _loss_values(loss: Any, labels: Any, outputs: Any) -> Any:
    """Return the loss of each example (a Keras loss would reduce it in its own way)."""
    import keras

    if isinstance(loss, keras.losses.Loss):
        return loss.call(labels, outputs)
    return loss(labels, outputs)


def _batch_that_fits(model: Any) -> int:
    """Return how many examples' layer outputs fit in ``_MEMORY_BYTES``, at least 1."""
    try:
        shapes = [layer.output.shape for layer in model.layers]
        num_values = sum(math.prod(shape[1:]) for shape in shapes)
    except (AttributeError, TypeError):  # a subclassed model, several outputs, an open dimension
        return _UNKNOWN_MODEL_BATCH
    return max(1, _MEMORY_BYTES // (4 * max(1, num_values)))

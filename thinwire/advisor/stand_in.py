"""Model with a script model's tensor shapes and little computation, to measure links.

`thinwire.advisor.script` writes a copy of this file and appends the tensor shapes of the script's
model.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

SHAPES: list[list[int]] = []  # shape of each trainable tensor of the script's model
EXAMPLES = 1  # number of examples in the training set


class StandInTensors(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A Keras layer that holds all tensors of the model; their gradients are constant noise."""

    def build(self, input_shape: Any) -> None:
        """Create the layer's tensors and their constant gradients."""
        generator = np.random.default_rng(1)
        self.tensors = [self.add_weight(shape=shape, initializer="zeros") for shape in SHAPES]
        self.factors = [generator.normal(0, 1e-3, shape).astype(np.float32) for shape in SHAPES]

    def call(self, inputs: Any) -> Any:
        """Return the layer's outputs [N, 2] float32, which are equal for all inputs."""
        parts = zip(self.tensors, self.factors, strict=True)
        return inputs * 0 + sum(keras.ops.sum(tensor * factor) for tensor, factor in parts)


def first_output(labels: Any, outputs: Any) -> Any:
    """Return the loss [N] float32, which is linear in the outputs, so its gradient is constant."""
    return outputs[:, 0]


def build_model() -> keras.Model:
    """Return the compiled Keras model of one `StandInTensors` layer."""
    model = keras.Sequential([keras.Input((2,)), StandInTensors()])
    model.compile(loss=first_output)
    return model


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test examples whose inputs and labels are all zero."""
    inputs, labels = np.zeros((EXAMPLES, 2), np.float32), np.zeros(EXAMPLES, np.int32)
    return (inputs, labels), (inputs[:2], labels[:2])

"""Stands in for a script's model while links are measured: the same tensors, next to no work.

`thinwire.advisor.script` writes a copy of this file with the model's shapes at its end.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

SHAPES: list[list[int]] = []  # of the tensors
EXAMPLES = 1  # in the training set


class StandInTensors(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """All tensors; the gradient of each is random, and stays the same."""

    def build(self, input_shape: Any) -> None:
        """Make the tensors."""
        del input_shape
        generator = np.random.default_rng(1)
        self.tensors = [self.add_weight(shape=shape, initializer="zeros") for shape in SHAPES]
        self.factors = [generator.normal(0, 1e-3, shape).astype(np.float32) for shape in SHAPES]

    def call(self, inputs: Any) -> Any:
        """Return [N, 2], the same for all inputs."""
        parts = zip(self.tensors, self.factors, strict=True)
        return inputs * 0 + sum(keras.ops.sum(tensor * factor) for tensor, factor in parts)


def first_output(labels: Any, outputs: Any) -> Any:
    """Return a loss [N] whose gradient never changes."""
    del labels
    return outputs[:, 0]


def build_model() -> keras.Model:
    """Return the model."""
    model = keras.Sequential([keras.Input((2,)), StandInTensors()])
    model.compile(loss=first_output)
    return model


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return examples that hold nothing: training and test."""
    inputs, labels = np.zeros((EXAMPLES, 2), np.float32), np.zeros(EXAMPLES, np.int32)
    return (inputs, labels), (inputs[:2], labels[:2])

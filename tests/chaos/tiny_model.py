"""A model (`--model`) of 180 entries in four tensors, small enough to record every message."""

import keras
import numpy as np


def build_model():
    """Return a perceptron of 8 inputs, 12 hidden units and 4 outputs."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(12, activation="tanh", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ],
        name="tiny",
    )


def load_data():
    """Return points of four kinds around centres as ((x_train, y_train), (x_test, y_test))."""
    rng = np.random.default_rng(1)
    y = rng.integers(4, size=800)
    x = rng.normal(size=(4, 8))[y] + 0.4 * rng.normal(size=(800, 8))
    return (x[:600], y[:600]), (x[600:], y[600:])

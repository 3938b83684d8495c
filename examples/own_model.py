"""Your own model and data, for ``thinwire cluster --model=examples/own_model.py``."""

import keras
import numpy as np

from thinwire import W_global


def build_model():
    """Return the model. An uncompiled model must output logits; else compile it with a loss."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="logits"),
    ]
    model = keras.Sequential(layers, name="own_model")
    # Only the variables in W_global are shared; all other variables stay local to a worker.
    W_global.extend(model.trainable_variables)
    return model


def load_data():
    """Return noisy stripes of four classes as ((x_train, y_train), (x_test, y_test))."""
    rng = np.random.default_rng(1)
    y = rng.integers(4, size=2500)
    patterns = np.sin(np.arange(8) * np.arange(1, 5)[:, None])[:, :, None, None]
    x = patterns[y] + rng.normal(size=(2500, 8, 8, 1))
    return (x[:2000], y[:2000]), (x[2000:], y[2000:])

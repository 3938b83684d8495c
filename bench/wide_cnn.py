"""A wider CNN for the DGT bench: 10,441,546 parameters, nearly all in one layer.

``--model=bench/wide_cnn.py --dataset=fashion_mnist``
"""

from __future__ import annotations

import keras

from thinwire import W_global


def build_model() -> keras.Model:
    """Return the network: images [N, 28, 28, 1] float32 to logits [N, 10]."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1), name="images"),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv1"),
            keras.layers.MaxPooling2D(2, name="pool"),
            keras.layers.Conv2D(64, 3, activation="relu", name="conv2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(1344, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="wide_cnn",
    )
    W_global.extend(model.trainable_variables)
    return model

"""The network of Keras' mnist_cnn example; 1,199,882 parameters for 28 x 28 x 1, 10 classes.

Differences: the network ends in logits, and the loss applies the softmax.
"""

from __future__ import annotations

import keras


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, image_depth), name="images"),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv1"),
            keras.layers.Conv2D(64, 3, activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool"),
            keras.layers.Dropout(0.25, name="dropout1"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dropout(0.5, name="dropout2"),
            keras.layers.Dense(nb_classes, name="logits"),
        ],
        name="mnist_cnn",
    )

"""A small multilayer perceptron; 109,386 parameters for images of 28 x 28 x 1 and 10 outputs."""

from __future__ import annotations

import keras


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: examples [N, size, size, depth] float32 to outputs [N, nb_classes]."""
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, image_depth), name="images"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, activation="relu", name="hidden1"),
            keras.layers.Dense(64, activation="relu", name="hidden2"),
            keras.layers.Dense(nb_classes, name="outputs"),
        ],
        name="mlp",
    )

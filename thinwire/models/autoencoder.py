"""Autoencoder with a bottleneck of 32 numbers; 209,968 parameters for images of 28 x 28 x 1."""

from __future__ import annotations

import math

import keras

_CODE = 32


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to images of the same shape."""
    shape = (image_size, image_size, image_depth)
    return keras.Sequential(
        [
            keras.Input(shape, name="images"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, activation="relu", name="encoder"),
            keras.layers.Dense(_CODE, activation="relu", name="code"),
            keras.layers.Dense(128, activation="relu", name="decoder"),
            keras.layers.Dense(math.prod(shape), name="pixels"),
            keras.layers.Reshape(shape, name="images_again"),
        ],
        name="autoencoder",
    )

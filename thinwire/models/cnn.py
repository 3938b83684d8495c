"""The convolutional network of the AdaComp paper: two convolutions and one hidden layer.

The network of the AdaComp paper has 421,642 parameters for images of 28 x 28 x 1 and 10 classes.

Source: the network of AdaComp's original program. Differences: variables keep their shapes instead
of being declared one-dimensional, and the batch size is not fixed.
"""

from __future__ import annotations

import keras


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, image_depth), name="images"),
            _convolution(32, "conv1"),
            keras.layers.MaxPooling2D(2, padding="same", name="pool1"),
            _convolution(64, "conv2"),
            keras.layers.MaxPooling2D(2, padding="same", name="pool2"),
            keras.layers.Flatten(name="flatten"),
            _dense(128, "relu", "hidden"),
            _dense(nb_classes, None, "logits"),
        ],
        name="cnn",
    )


def _convolution(filters: int, name: str) -> keras.Layer:
    return keras.layers.Conv2D(
        filters,
        3,
        padding="same",
        activation="relu",
        name=name,
        # Each layer needs a new initializer: one initializer draws equal numbers at each call.
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.1),
        bias_initializer=keras.initializers.Constant(0.1),
    )


def _dense(units: int, activation: str | None, name: str) -> keras.Layer:
    return keras.layers.Dense(
        units,
        activation=activation,
        name=name,
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.1),
        bias_initializer=keras.initializers.Constant(0.1),
    )

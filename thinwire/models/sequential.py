"""The small networks, each a plain sequence of layers.

The number of parameters in a docstring holds for images of 28 x 28 x 1 and 10 classes.
"""

from __future__ import annotations

import math
from typing import Any

import keras


def build_mlp(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a small multilayer perceptron: examples [N, size, size, depth] to [N, nb_classes].

    The network has 109,386 parameters.
    """
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


def build_autoencoder(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return an autoencoder: images [N, size, size, depth] to images, over a code of 32 numbers.

    The network has 209,968 parameters.
    """
    shape = (image_size, image_size, image_depth)
    return keras.Sequential(
        [
            keras.Input(shape, name="images"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, activation="relu", name="encoder"),
            keras.layers.Dense(32, activation="relu", name="code"),
            keras.layers.Dense(128, activation="relu", name="decoder"),
            keras.layers.Dense(math.prod(shape), name="pixels"),
            keras.layers.Reshape(shape, name="images_again"),
        ],
        name="autoencoder",
    )


def build_gru(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a recurrent token model (GRU): tokens [N, T] int32 to logits [N, T, nb_classes].

    The logits are of the next tokens. The network has 25,024 parameters for a vocabulary of 64
    tokens.
    """
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="tokens"),
            keras.layers.Embedding(nb_classes, 32, name="embedding"),
            keras.layers.GRU(64, return_sequences=True, name="gru"),
            keras.layers.Dense(nb_classes, name="logits"),
        ],
        name="gru",
    )


def build_lenet(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return LeNet-5 with ReLU and max pooling: images [N, size, size, depth] to logits.

    The network has 61,706 parameters.
    """
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, image_depth), name="images"),
            keras.layers.Conv2D(6, 5, padding="same", activation="relu", name="conv1"),
            keras.layers.MaxPooling2D(2, name="pool1"),
            keras.layers.Conv2D(16, 5, activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(120, activation="relu", name="hidden1"),
            keras.layers.Dense(84, activation="relu", name="hidden2"),
            keras.layers.Dense(nb_classes, name="logits"),
        ],
        name="lenet",
    )


def build_mnist_cnn(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network of Keras' mnist_cnn example: images [N, size, size, depth] to logits.

    The network has 1,199,882 parameters. Differences: the network ends in logits, and the loss
    applies the softmax.
    """
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


def build_cnn(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the convolutional network of the AdaComp paper: images to logits [N, nb_classes].

    The network has two convolutions, one hidden layer and 421,642 parameters.

    Source: the network of AdaComp's original program. Differences: variables keep their shapes
    instead of being declared one-dimensional, and the batch size is not fixed.
    """
    convolution = {"padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, image_depth), name="images"),
            keras.layers.Conv2D(32, 3, name="conv1", **convolution, **_adacomp_start()),
            keras.layers.MaxPooling2D(2, padding="same", name="pool1"),
            keras.layers.Conv2D(64, 3, name="conv2", **convolution, **_adacomp_start()),
            keras.layers.MaxPooling2D(2, padding="same", name="pool2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, "relu", name="hidden", **_adacomp_start()),
            keras.layers.Dense(nb_classes, name="logits", **_adacomp_start()),
        ],
        name="cnn",
    )


def _adacomp_start() -> dict[str, Any]:
    """Return the initial weights and biases of a layer of the AdaComp paper's network."""
    # Each layer needs a new initializer: one initializer draws equal numbers at each call.
    return {
        "kernel_initializer": keras.initializers.TruncatedNormal(stddev=0.1),
        "bias_initializer": keras.initializers.Constant(0.1),
    }

"""LeNet-5 with ReLU and max pooling; 61,706 parameters for 28 x 28 x 1, 10 classes."""

from __future__ import annotations

import keras


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
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

"""AlexNet as one tower for 224 x 224 images; 57,029,322 parameters for 1 channel and 10 classes.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
arXiv:1404.5997, the one-tower layer list. Differences: no local response normalization, as in the
AlexNets of the deep-learning libraries. The first layer resizes images of another size.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from thinwire.models import blocks

_SIZE = 224


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth, _SIZE)
    x = _convolution(x, 64, 11, "conv1", strides=4, padding=2)
    x = blocks.max_pool(x, "pool1")
    x = _convolution(x, 192, 5, "conv2")
    x = blocks.max_pool(x, "pool2")
    x = _convolution(x, 384, 3, "conv3")
    x = _convolution(x, 256, 3, "conv4")
    x = _convolution(x, 256, 3, "conv5")
    x = blocks.max_pool(x, "pool5")
    x = layers.Flatten(name="flatten")(x)
    for number in (6, 7):
        x = layers.Dense(4096, activation="relu", name=f"hidden{number}")(x)
        x = layers.Dropout(0.5, name=f"dropout{number}")(x)
    logits = layers.Dense(nb_classes, name="logits")(x)
    return keras.Model(inputs, logits, name="alexnet")


def _convolution(x: Any, filters: int, kernel: int, name: str, **options: int) -> Any:
    return blocks.convolution(x, filters, kernel, name, bias=True, activation="relu", **options)

"""The network Inception with batch normalization, reduced for small images.

The small Inception network has 1,651,114 parameters for 3 channels and 10 classes.

Source: Ioffe and Szegedy, "Batch normalization", arXiv:1502.03167, in the reduced form that MXNet
calls *inception-bn-28-small* and Grouping-SGD trains on CIFAR-10. As in MXNet, convolutions have a
bias and normalization has no trained scale. Differences: the last pooling is global, which is equal
to MXNet's pooling for images of 28 x 28 and permits other image sizes. Kernels start from Xavier's
uniform distribution.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from thinwire.models import blocks

_EPSILON = 1e-3


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _convolution(x, 96, 3, "stem")
    x = _block(x, 32, 32, "a1")
    x = _block(x, 32, 48, "a2")
    x = _reduce(x, 80, "a3")
    for number, (filters1, filters3) in enumerate(((112, 48), (96, 64), (80, 80), (48, 96)), 1):
        x = _block(x, filters1, filters3, f"b{number}")
    x = _reduce(x, 96, "b5")
    x = _block(x, 176, 160, "c1")
    x = _block(x, 176, 160, "c2")
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="inception_small")


def _convolution(x: Any, filters: int, kernel: int, name: str, strides: int = 1) -> Any:
    """Apply a convolution, then batch normalization with a trained shift, then ReLU."""
    x = blocks.convolution(x, filters, kernel, f"{name}_conv", strides=strides, bias=True)
    norm = layers.BatchNormalization(
        momentum=blocks.MOMENTUM, epsilon=_EPSILON, scale=False, name=f"{name}_norm"
    )
    return blocks.relu(norm(x), f"{name}_relu")


def _block(x: Any, one: int, three: int, name: str) -> Any:
    """Concatenate a 1 x 1 and a 3 x 3 convolution with `one` and `three` output channels."""
    ways = [_convolution(x, one, 1, f"{name}_one"), _convolution(x, three, 3, f"{name}_three")]
    return blocks.concatenate(ways, f"{name}_concat")


def _reduce(x: Any, filters: int, name: str) -> Any:
    """Halve the images' height and width by a convolution and a max pooling, side by side."""
    convolved = _convolution(x, filters, 3, f"{name}_three", strides=2)
    pooled = blocks.max_pool(x, f"{name}_pool", padding=1)
    return blocks.concatenate([convolved, pooled], f"{name}_concat")

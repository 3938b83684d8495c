"""MobileNet v1 (3,216,650 parameters for 1 channel, 10 classes) and v2 (2,237,184 parameters).

Source: Howard et al., "MobileNets", arXiv:1704.04861, table 1 (v1); Sandler et al., "MobileNetV2",
arXiv:1801.04381, table 2 (v2). Differences: the layout follows Gluon's model zoo. In v1 all
activations are ReLU. In v2 all activations are ReLU6, the first block has an expansion (of factor
1), and the classifier is a 1 x 1 convolution without bias.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from thinwire.models import blocks

#: (output channels, stride) of each of MobileNet v1's 13 depthwise-separable blocks.
_SEPARABLE = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)

#: Groups of MobileNet v2's 17 inverted residuals: (expansion, channels, blocks, first stride).
_INVERTED = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def build_mobilenet_v1(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return MobileNet v1: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _norm_relu(blocks.convolution(x, 32, 3, "stem_conv", strides=2), "stem")
    for number, (channels, strides) in enumerate(_SEPARABLE, 1):
        depthwise, pointwise = f"block{number}_depthwise", f"block{number}_pointwise"
        x = _norm_relu(blocks.depthwise_convolution(x, f"{depthwise}_conv", strides), depthwise)
        x = _norm_relu(blocks.convolution(x, channels, 1, f"{pointwise}_conv"), pointwise)
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="mobilenet_v1")


def build_mobilenet_v2(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return MobileNet v2: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _norm_relu(blocks.convolution(x, 32, 3, "stem_conv", strides=2), "stem", limit=6.0)
    number = 0
    for expansion, channels, size, first_strides in _INVERTED:
        for position in range(size):
            number += 1
            strides = first_strides if position == 0 else 1
            x = _inverted_residual(x, expansion, channels, strides, f"block{number}")
    x = _norm_relu(blocks.convolution(x, 1280, 1, "head_conv"), "head", limit=6.0)
    x = layers.GlobalAveragePooling2D(keepdims=True, name="average")(x)
    logits = layers.Flatten(name="flatten")(blocks.convolution(x, nb_classes, 1, "logits"))
    return keras.Model(inputs, logits, name="mobilenet_v2")


def _inverted_residual(x: Any, expansion: int, channels: int, strides: int, name: str) -> Any:
    """Expand, convolve each channel and project linearly; add `x` if the shapes agree."""
    expand, depthwise, project = (f"{name}_{part}" for part in ("expand", "depthwise", "project"))
    inner = blocks.convolution(x, x.shape[-1] * expansion, 1, f"{expand}_conv")
    inner = _norm_relu(inner, expand, limit=6.0)
    inner = blocks.depthwise_convolution(inner, f"{depthwise}_conv", strides)
    inner = _norm_relu(inner, depthwise, limit=6.0)
    inner = blocks.convolution(inner, channels, 1, f"{project}_conv")
    inner = blocks.normalise(inner, f"{project}_norm")
    if strides > 1 or x.shape[-1] != channels:
        return inner
    return blocks.add([x, inner], f"{name}_add")


def _norm_relu(x: Any, name: str, limit: float | None = None) -> Any:
    return blocks.relu(blocks.normalise(x, f"{name}_norm"), f"{name}_relu", limit)

"""Residual networks: ResNet-18 v1, ResNet-50 v1 and v2, and ResNet-18 for CIFAR.

With 1 channel and 10 classes, ResNet-18 v1 has 11,175,370 parameters, ResNet-50 v1 has 23,541,130
and ResNet-50 v2 has 23,514,698. The ResNet-18 for CIFAR has 11,173,962 parameters for 3 channels.
An image of 28 x 28 pixels is reduced to sizes 14 and 7 in a ResNet's stem, and to 7, 4, 2 and 1 in
the stages.

Source: He et al., "Deep residual learning for image recognition", arXiv:1512.03385, table 1 (v1);
"Identity mappings in deep residual networks", arXiv:1603.05027, figure 1b (v2). Differences: the
layout follows Gluon's model zoo where the papers leave a choice. In bottlenecks of v1 the stride is
on the first 1 x 1 convolution, and both 1 x 1 convolutions have a bias. In v2 the stride is on the
3 x 3 convolution, and the input is normalized without scale and shift. Shortcuts that change the
shape are 1 x 1 convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from thinwire.models import blocks

#: Function that applies one residual block: (x, channels, strides, name) -> output.
Block = Callable[[Any, int, int, str], Any]

_BASIC_CHANNELS = (64, 128, 256, 512)
_BOTTLENECK_CHANNELS = (256, 512, 1024, 2048)


def build_resnet18_v1(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return ResNet-18 v1: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _stages(_stem(x), _basic_block, _BASIC_CHANNELS, (2, 2, 2, 2))
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="resnet18_v1")


def build_resnet50_v1(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return ResNet-50 v1: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _stages(_stem(x), _bottleneck, _BOTTLENECK_CHANNELS, (3, 4, 6, 3))
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="resnet50_v1")


def build_resnet50_v2(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return ResNet-50 v2: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _stem(blocks.normalise(x, "input_norm", affine=False))
    x = _stages(x, _preactivated_bottleneck, _BOTTLENECK_CHANNELS, (3, 4, 6, 3))
    x = _norm_relu(x, "final")
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="resnet50_v2")


def build_resnet18_cifar(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return ResNet-18 for small images, with a 3 x 3 stem of stride 1 and no max pooling."""
    inputs, x = blocks.images(image_size, image_depth)
    x = _norm_relu(blocks.convolution(x, 64, 3, "stem_conv"), "stem")
    x = _stages(x, _basic_block, _BASIC_CHANNELS, (2, 2, 2, 2))
    return keras.Model(inputs, blocks.average_and_classify(x, nb_classes), name="resnet18_cifar")


def _stem(x: Any) -> Any:
    x = _norm_relu(blocks.convolution(x, 64, 7, "stem_conv", strides=2), "stem")
    return blocks.max_pool(x, "stem_pool", padding=1)


def _stages(x: Any, block: Block, channels: Sequence[int], sizes: Sequence[int]) -> Any:
    """Stack the residual blocks of all stages; later stages halve the images' size."""
    for stage, (width, size) in enumerate(zip(channels, sizes, strict=True), 1):
        for number in range(1, size + 1):
            strides = 2 if stage > 1 and number == 1 else 1
            x = block(x, width, strides, f"stage{stage}_block{number}")
    return x


def _basic_block(x: Any, channels: int, strides: int, name: str) -> Any:
    residual = blocks.convolution(x, channels, 3, f"{name}_conv1", strides=strides)
    residual = _norm_relu(residual, name, 1)
    residual = blocks.convolution(residual, channels, 3, f"{name}_conv2")
    return _join(x, residual, channels, strides, name, last=2)


def _bottleneck(x: Any, channels: int, strides: int, name: str) -> Any:
    inner = channels // 4
    residual = blocks.convolution(x, inner, 1, f"{name}_conv1", strides=strides, bias=True)
    residual = _norm_relu(residual, name, 1)
    residual = _norm_relu(blocks.convolution(residual, inner, 3, f"{name}_conv2"), name, 2)
    residual = blocks.convolution(residual, channels, 1, f"{name}_conv3", bias=True)
    return _join(x, residual, channels, strides, name, last=3)


def _join(x: Any, residual: Any, channels: int, strides: int, name: str, last: int) -> Any:
    """Normalize the residual branch of a block, add the shortcut from `x`, and apply ReLU."""
    residual = blocks.normalise(residual, f"{name}_norm{last}")
    if strides > 1 or x.shape[-1] != channels:
        x = blocks.convolution(x, channels, 1, f"{name}_shortcut_conv", strides=strides)
        x = blocks.normalise(x, f"{name}_shortcut_norm")
    return blocks.relu(blocks.add([x, residual], f"{name}_add"), f"{name}_relu{last}")


def _preactivated_bottleneck(x: Any, channels: int, strides: int, name: str) -> Any:
    inner = channels // 4
    active = _norm_relu(x, name, 1)
    residual = blocks.convolution(active, inner, 1, f"{name}_conv1")
    residual = _norm_relu(residual, name, 2)
    residual = blocks.convolution(residual, inner, 3, f"{name}_conv2", strides=strides)
    residual = _norm_relu(residual, name, 3)
    residual = blocks.convolution(residual, channels, 1, f"{name}_conv3")
    if strides > 1 or x.shape[-1] != channels:
        x = blocks.convolution(active, channels, 1, f"{name}_shortcut_conv", strides=strides)
    return blocks.add([x, residual], f"{name}_add")


def _norm_relu(x: Any, name: str, number: int | str = "") -> Any:
    """Apply batch normalization and ReLU; `number` is the two layers' number in their block."""
    return blocks.relu(blocks.normalise(x, f"{name}_norm{number}"), f"{name}_relu{number}")

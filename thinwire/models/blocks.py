"""Building blocks of the larger networks: input, convolutions, pools, normalization, classifier.

Thinwire's built-in networks pad images explicitly and symmetrically. Keras' padding "same" adds the
odd row and column of a convolution or pool with stride 2 only at the bottom right. With Keras'
padding "same", a feature map would be shifted by a pixel relative to the published networks.
Kernels start from Xavier's uniform distribution (limit sqrt(6 / (fan in + fan out))) and biases
from zero. Xavier's uniform kernels and zero biases are Keras' defaults; each layer gets its own
initializer.

Every function of the module `blocks` takes and returns symbolic tensors [N, height, width,
channels] float32. The caller of a building block names its layers, because Keras' automatic names
count up within a process, but a variable's path must be the same on every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

#: Momentum of batch normalization: fraction of a moving statistic that each batch retains.
MOMENTUM = 0.9
EPSILON = 1e-5


def images(image_size: int, image_depth: int, resize_to: int | None = None) -> tuple[Any, Any]:
    """Return the model's input tensor, and the tensor of resized images for its first layer.

    Args:
        image_size: Height and width of a stored image, in pixels.
        image_depth: Number of channels of an image.
        resize_to: Height and width in pixels to which the images are resized bilinearly. None: the
            images keep their size.
    """
    inputs = keras.Input((image_size, image_size, image_depth), name="images")
    if resize_to is None or resize_to == image_size:
        return inputs, inputs
    resize = layers.Resizing(resize_to, resize_to, interpolation="bilinear", name="resize")
    return inputs, resize(inputs)


def convolution(
    x: Any,
    filters: int,
    kernel: int | tuple[int, int],
    name: str,
    *,
    strides: int = 1,
    padding: int | None = None,
    bias: bool = False,
    activation: str | None = None,
) -> Any:
    """Apply a 2D convolution with symmetric zero padding.

    Args:
        x: Input tensor [N, height, width, channels] float32.
        filters: Number of output channels.
        kernel: Height and width of the kernel in pixels; odd if `padding` is None.
        name: Name of the convolution layer, from which the padding layer's name is derived.
        strides: Stride of the convolution along height and width.
        padding: Number of rows and columns of zeros on each side; None: (kernel - 1) / 2.
        bias: True to add a trained bias to each output channel.
        activation: Keras' name of the activation; None for no activation.
    """
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    margins = ((height - 1) // 2, (width - 1) // 2) if padding is None else (padding, padding)
    # With stride 1 and an odd kernel, Keras' padding "same" is also symmetric and avoids a copy.
    is_same = strides == 1 and margins == ((height - 1) / 2, (width - 1) / 2)
    if not is_same:
        x = pad(x, margins, name)
    layer = layers.Conv2D(
        filters,
        (height, width),
        strides=strides,
        padding="same" if is_same else "valid",
        use_bias=bias,
        activation=activation,
        name=name,
    )
    return layer(x)


def depthwise_convolution(x: Any, name: str, strides: int = 1) -> Any:
    """Convolve each channel with a separate 3 x 3 kernel (depthwise), without bias."""
    if strides > 1:
        x = pad(x, (1, 1), name)
    padding = "valid" if strides > 1 else "same"
    layer = layers.DepthwiseConv2D(3, strides=strides, padding=padding, use_bias=False, name=name)
    return layer(x)


def pad(x: Any, margins: tuple[int, int], name: str) -> Any:
    """Add rows and columns of zeros around the images `x`; return `x` if both margins are 0."""
    return layers.ZeroPadding2D(margins, name=f"{name}_pad")(x) if any(margins) else x


def normalise(x: Any, name: str, epsilon: float = EPSILON, affine: bool = True) -> Any:
    """Apply batch normalization; `affine` adds a trained scale and shift per channel."""
    layer = layers.BatchNormalization(
        momentum=MOMENTUM, epsilon=epsilon, center=affine, scale=affine, name=name
    )
    return layer(x)


def max_pool(x: Any, name: str, padding: int = 0) -> Any:
    """Apply max pooling over 3 x 3 positions with stride 2.

    The pooling pads with zeros, so the input `x` must not be negative if `padding` is not 0.
    """
    return layers.MaxPooling2D(3, strides=2, name=name)(pad(x, (padding, padding), name))


def average_pool(x: Any, name: str) -> Any:
    """Apply 3 x 3 average pooling with stride 1; each mean includes the zeros of the padding."""
    return layers.AveragePooling2D(3, strides=1, name=name)(pad(x, (1, 1), name))


def relu(x: Any, name: str, limit: float | None = None) -> Any:
    """Apply ReLU; `limit` is the largest output value, None for no limit."""
    return layers.ReLU(max_value=limit, name=name)(x)


def add(parts: Sequence[Any], name: str) -> Any:
    """Return the sum of the branches of a residual block."""
    return layers.Add(name=name)(parts)


def concatenate(parts: Sequence[Any], name: str) -> Any:
    """Concatenate the branches of an Inception block along the channels."""
    return layers.Concatenate(name=name)(parts)


def average_and_classify(x: Any, nb_classes: int) -> Any:
    """Apply global average pooling, then a dense layer; return the logits [N, nb_classes]."""
    x = layers.GlobalAveragePooling2D(name="average")(x)
    return layers.Dense(nb_classes, name="logits")(x)

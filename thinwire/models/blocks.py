"""Building blocks of the larger networks: padded convolutions and pools, normalisation, both ends.

Padding is explicit and symmetric. Keras' "same" puts the odd row and column of a convolution or
pool with stride 2 at the bottom right only, which shifts the image by a pixel against the networks
as published. Kernels start from Xavier's uniform distribution (limit sqrt(6 / (fan in + fan
out))), biases from zero: Keras' defaults, a new initialiser for each layer.

Every function takes and returns symbolic tensors [N, height, width, channels] float32. Names are
given by the caller, because Keras' automatic ones count up within a process, and a variable's path
has to be the same on every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

#: Share of the moving statistics that a batch leaves in place.
MOMENTUM = 0.9
EPSILON = 1e-5


def images(image_size: int, image_depth: int, resize_to: int | None = None) -> tuple[Any, Any]:
    """Return the model's input and what its first layer reads.

    Args:
        image_size: Height and width of an image as it is stored and sent, in pixels.
        image_depth: Channels.
        resize_to: Height and width the network works with, reached bilinearly; None: as stored.
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
    """Convolve; `padding` is the rows and columns of zeros on each side, by default (kernel-1)/2.

    Args:
        x: Input.
        filters: Output channels.
        kernel: Height and width, odd where `padding` is left out.
        name: Of the layer; the padding's is derived from it.
        strides: Of both directions.
        padding: 0 for none.
        bias: Whether it adds one.
        activation: As Keras names it.
    """
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    margins = ((height - 1) // 2, (width - 1) // 2) if padding is None else (padding, padding)
    # With stride 1 and an odd kernel "same" is symmetric too, and saves the padded copy.
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
    """Convolve each channel with a 3 x 3 kernel of its own, without bias."""
    if strides > 1:
        x = pad(x, (1, 1), name)
    padding = "valid" if strides > 1 else "same"
    layer = layers.DepthwiseConv2D(3, strides=strides, padding=padding, use_bias=False, name=name)
    return layer(x)


def pad(x: Any, margins: tuple[int, int], name: str) -> Any:
    """Put rows and columns of zeros on each side; none for margins of 0."""
    return layers.ZeroPadding2D(margins, name=f"{name}_pad")(x) if any(margins) else x


def normalise(x: Any, name: str, epsilon: float = EPSILON, affine: bool = True) -> Any:
    """Normalise over the batch; `affine` adds a trained scale and shift per channel."""
    layer = layers.BatchNormalization(
        momentum=MOMENTUM, epsilon=epsilon, center=affine, scale=affine, name=name
    )
    return layer(x)


def max_pool(x: Any, name: str, padding: int = 0) -> Any:
    """Take the maximum of 3 x 3 with stride 2; `x` is not negative where `padding` is not 0."""
    return layers.MaxPooling2D(3, strides=2, name=name)(pad(x, (padding, padding), name))


def average_pool(x: Any, name: str) -> Any:
    """Take the mean of 3 x 3 with stride 1; zeros beyond the border count."""
    return layers.AveragePooling2D(3, strides=1, name=name)(pad(x, (1, 1), name))


def relu(x: Any, name: str, limit: float | None = None) -> Any:
    """Cut at 0, and at `limit` where one is given."""
    return layers.ReLU(max_value=limit, name=name)(x)


def add(parts: Sequence[Any], name: str) -> Any:
    """Add the branches of a residual block."""
    return layers.Add(name=name)(parts)


def concatenate(parts: Sequence[Any], name: str) -> Any:
    """Put the branches of an Inception block side by side, channel after channel."""
    return layers.Concatenate(name=name)(parts)


def average_and_classify(x: Any, nb_classes: int) -> Any:
    """Take the mean over all places, then one dense layer: logits [N, nb_classes]."""
    x = layers.GlobalAveragePooling2D(name="average")(x)
    return layers.Dense(nb_classes, name="logits")(x)

"""Inception v3 on 299 x 299 images; 21,805,482 parameters for 1 channel and 10 classes.

Source: Szegedy et al., "Rethinking the Inception architecture for computer vision",
arXiv:1512.00567, table 1 and figures 5, 6, 7 and 10. Differences: as in Gluon's model zoo, there is
no auxiliary classifier, and the dropout before the classifier is 0.5. The first layer resizes
images of another size.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from thinwire.models import blocks

_SIZE = 299
_EPSILON = 1e-3

_ROW, _COLUMN = (1, 7), (7, 1)


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: images [N, size, size, depth] float32 to logits [N, nb_classes]."""
    inputs, x = blocks.images(image_size, image_depth, _SIZE)
    x = _stem(x)
    for number, pooled in enumerate((32, 64, 64), 1):
        x = _block_35(x, pooled, f"a{number}")
    x = _reduce_35(x, "b")
    for number, inner in enumerate((128, 160, 160, 192), 1):
        x = _block_17(x, inner, f"c{number}")
    x = _reduce_17(x, "d")
    for number in (1, 2):
        x = _block_8(x, f"e{number}")
    x = layers.GlobalAveragePooling2D(name="average")(x)  # mean over 8 x 8 pixels
    x = layers.Dropout(0.5, name="dropout")(x)
    logits = layers.Dense(nb_classes, name="logits")(x)
    return keras.Model(inputs, logits, name="inception_v3")


def _convolution(
    x: Any,
    filters: int,
    kernel: int | tuple[int, int],
    name: str,
    strides: int = 1,
    padding: int | None = None,
) -> Any:
    """Apply a convolution (without bias), then batch normalization, then ReLU."""
    x = blocks.convolution(x, filters, kernel, f"{name}_conv", strides=strides, padding=padding)
    return blocks.relu(blocks.normalise(x, f"{name}_norm", _EPSILON), f"{name}_relu")


def _stem(x: Any) -> Any:
    x = _convolution(x, 32, 3, "stem1", strides=2, padding=0)
    x = _convolution(x, 32, 3, "stem2", padding=0)
    x = _convolution(x, 64, 3, "stem3")
    x = blocks.max_pool(x, "stem_pool1")
    x = _convolution(x, 80, 1, "stem4")
    x = _convolution(x, 192, 3, "stem5", padding=0)
    return blocks.max_pool(x, "stem_pool2")


def _pooled(x: Any, filters: int, name: str) -> Any:
    return _convolution(blocks.average_pool(x, f"{name}_pool"), filters, 1, f"{name}_pooled")


def _block_35(x: Any, pooled: int, name: str) -> Any:
    """Build the block of figure 5 of the Inception v3 paper, for inputs of 35 x 35 pixels."""
    five = _convolution(x, 48, 1, f"{name}_five1")
    five = _convolution(five, 64, 5, f"{name}_five2")
    double = _convolution(x, 64, 1, f"{name}_double1")
    double = _convolution(double, 96, 3, f"{name}_double2")
    double = _convolution(double, 96, 3, f"{name}_double3")
    ways = [_convolution(x, 64, 1, f"{name}_one"), five, double, _pooled(x, pooled, name)]
    return blocks.concatenate(ways, f"{name}_concat")


def _reduce_35(x: Any, name: str) -> Any:
    """Build the size reduction of figure 10 of the Inception v3 paper, from 35 x 35 to 17 x 17."""
    three = _convolution(x, 384, 3, f"{name}_three", strides=2, padding=0)
    double = _convolution(x, 64, 1, f"{name}_double1")
    double = _convolution(double, 96, 3, f"{name}_double2")
    double = _convolution(double, 96, 3, f"{name}_double3", strides=2, padding=0)
    return blocks.concatenate([three, double, blocks.max_pool(x, f"{name}_pool")], f"{name}_concat")


def _block_17(x: Any, inner: int, name: str) -> Any:
    """Build the block of figure 6 of the Inception v3 paper, for inputs of 17 x 17 pixels."""
    seven = _convolution(x, inner, 1, f"{name}_seven1")
    seven = _convolution(seven, inner, _ROW, f"{name}_seven2")
    seven = _convolution(seven, 192, _COLUMN, f"{name}_seven3")
    double = _convolution(x, inner, 1, f"{name}_double1")
    for number, kernel in enumerate((_COLUMN, _ROW, _COLUMN), 2):
        double = _convolution(double, inner, kernel, f"{name}_double{number}")
    double = _convolution(double, 192, _ROW, f"{name}_double5")
    ways = [_convolution(x, 192, 1, f"{name}_one"), seven, double, _pooled(x, 192, name)]
    return blocks.concatenate(ways, f"{name}_concat")


def _reduce_17(x: Any, name: str) -> Any:
    """Build Inception v3's size reduction with a 7 x 7 branch, from 17 x 17 to 8 x 8."""
    three = _convolution(x, 192, 1, f"{name}_three1")
    three = _convolution(three, 320, 3, f"{name}_three2", strides=2, padding=0)
    seven = _convolution(x, 192, 1, f"{name}_seven1")
    seven = _convolution(seven, 192, _ROW, f"{name}_seven2")
    seven = _convolution(seven, 192, _COLUMN, f"{name}_seven3")
    seven = _convolution(seven, 192, 3, f"{name}_seven4", strides=2, padding=0)
    return blocks.concatenate([three, seven, blocks.max_pool(x, f"{name}_pool")], f"{name}_concat")


def _block_8(x: Any, name: str) -> Any:
    """Build the block of figure 7 of the Inception v3 paper, for inputs of 8 x 8 pixels."""
    three = _convolution(x, 384, 1, f"{name}_three")
    double = _convolution(x, 448, 1, f"{name}_double1")
    double = _convolution(double, 384, 3, f"{name}_double2")
    ways = [
        _convolution(x, 320, 1, f"{name}_one"),
        *_split(three, f"{name}_three"),
        *_split(double, f"{name}_double"),
        _pooled(x, 192, name),
    ]
    return blocks.concatenate(ways, f"{name}_concat")


def _split(x: Any, name: str) -> tuple[Any, Any]:
    row = _convolution(x, 384, (1, 3), f"{name}_row")
    return row, _convolution(x, 384, (3, 1), f"{name}_column")

"""From pixels 0..255 to the float32 a network takes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from data import SCALINGS
from ops.types import ConfigurationError

_CHUNK_BYTES = 1 << 22  # of float32: small enough to stay in cache between the passes
#: Scaling -> mean and standard deviation of red, green and blue over a training set, of 0..1.
CHANNELS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def scale(images: NDArray[np.uint8], scaling: str) -> NDArray[np.float32]:
    """Scale images.

    Args:
        images: [N, height, width, channels] uint8.
        scaling: "standardize": each image to mean 0 and variance 1, its standard deviation taken as
            at least 1/sqrt(its number of values), as ``tf.image.per_image_standardization`` does;
            "unit": divide by 255; "cifar10", "imagenet": divide by 255, then subtract that set's
            mean of each channel and divide by its standard deviation.

    Returns:
        float32 of the same shape.

    Raises:
        ConfigurationError: Unknown scaling, or one of three channels for other images.
    """
    check(scaling, images.shape[-1])
    if scaling == "standardize":
        return _standardize(images)
    factor, offset = factor_and_offset(scaling)
    scaled = np.multiply(images, factor, dtype=np.float32)
    if scaling in CHANNELS:
        scaled += offset
    return scaled


def check(scaling: str, image_depth: int) -> None:
    """Raise ConfigurationError for an unknown scaling, or one that does not fit the channels."""
    if scaling not in SCALINGS:
        raise ConfigurationError(
            f"--scaling {scaling} is not known; expected one of {', '.join(SCALINGS)}."
        )
    if scaling in CHANNELS and image_depth != 3:
        raise ConfigurationError(
            f"--scaling {scaling} is for images of 3 channels, these have {image_depth}; choose "
            "another, such as standardize."
        )


def factor_and_offset(scaling: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return what a scaling other than "standardize" multiplies pixels by, and then adds.

    Returns:
        Each float32, [1] or [channels].
    """
    mean, deviation = (np.array(values) for values in CHANNELS.get(scaling, ((0.0,), (1.0,))))
    return (1 / (255 * deviation)).astype(np.float32), (-mean / deviation).astype(np.float32)


def _standardize(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    num_values = math.prod(images.shape[1:])
    scaled = np.empty((len(images), num_values), dtype=np.float32)
    flat = images.reshape(len(images), num_values)
    step = max(1, _CHUNK_BYTES // (4 * num_values))
    for start in range(0, len(images), step):
        chunk = scaled[start : start + step]
        np.subtract(
            flat[start : start + step],
            flat[start : start + step].mean(axis=1, keepdims=True, dtype=np.float32),
            out=chunk,
        )
        variance = np.einsum("ij,ij->i", chunk, chunk) / num_values
        deviation = np.maximum(np.sqrt(variance), 1 / math.sqrt(num_values))
        chunk /= deviation[:, np.newaxis].astype(np.float32)
    return scaled.reshape(images.shape)

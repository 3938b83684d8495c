"""From pixels 0..255 to the float32 a network takes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from data import SCALINGS
from ops.types import ConfigurationError

_CHUNK_BYTES = 1 << 22  # of float32: small enough to stay in cache between the passes


def scale(images: NDArray[np.uint8], scaling: str) -> NDArray[np.float32]:
    """Scale images.

    Args:
        images: [N, height, width, channels] uint8.
        scaling: "standardize": each image to mean 0 and variance 1, its standard deviation taken as
            at least 1/sqrt(its number of values), as ``tf.image.per_image_standardization`` does;
            "unit": divide by 255.

    Returns:
        float32 of the same shape.

    Raises:
        ConfigurationError: Unknown scaling.
    """
    if scaling not in SCALINGS:
        raise ConfigurationError(
            f"--scaling {scaling} is not known; expected one of {', '.join(SCALINGS)}."
        )
    if scaling == "unit":
        return np.multiply(images, np.float32(1 / 255), dtype=np.float32)
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

"""Images that are made when they are indexed, where an array of all of them would be too large.

A `Lazy` is indexed like an array of float32 and has two more methods: `subset` returns a part of
it, and `feed` the training images in the order of a worker's cursor. `scale` turns pixels 0..255
into the float32 that a network takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.choices import SCALINGS
from thinwire.data.pipeline.cursor import Cursor, uniforms
from thinwire.ops.types import ConfigurationError

_CHUNK_BYTES = 1 << 22  # of float32: small enough to stay in cache between the passes
PADDING = 4  # pixels of crop_flip, on each side
#: (positions [B] int64, place of the first in the walk) -> [B, ...] float32, an array or a tensor.
Feed = Callable[[NDArray[np.int64], int], Any]
Chosen = NDArray[np.int64] | slice
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
    check_scaling(scaling, images.shape[-1])
    if scaling == "standardize":
        return _standardize(images)
    factor, offset = factor_and_offset(scaling)
    scaled = np.multiply(images, factor, dtype=np.float32)
    if scaling in CHANNELS:
        scaled += offset
    return scaled


def check_scaling(scaling: str, image_depth: int) -> None:
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


class Lazy:
    """Base of images that are not in memory as the network takes them.

    Attributes:
        shape: (N, height, width, channels).
        dtype: float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        """Return the number of images."""
        return self.shape[0]

    def __getitem__(self, chosen: Chosen) -> Any:
        """Return images as an evaluation sees them: [B, ...] float32."""
        raise NotImplementedError

    def subset(self, chosen: NDArray[np.int64]) -> Lazy:
        """Return a part, in the order given."""
        raise NotImplementedError

    def feed(self, cursor: Cursor) -> Feed:
        """Return what makes the training images of a cursor's batches."""
        return lambda chosen, place: self[chosen]

    def walk(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Any]:
        """Yield batch after batch as an evaluation sees them."""
        return (self[chosen] for chosen in batches)


def subset(images: Any, chosen: NDArray[np.int64]) -> Any:
    """Return a part of an array or of lazy images."""
    return images.subset(chosen) if isinstance(images, Lazy) else images[chosen]


def feed_of(images: Any, cursor: Cursor) -> Feed:
    """Return what makes the training images of a cursor's batches, of an array or lazy images."""
    if isinstance(images, Lazy):
        return images.feed(cursor)
    return lambda chosen, place: images[chosen]


class Augmented(Lazy):
    """Images in memory as bytes; every batch is cropped, mirrored and scaled anew.

    Args:
        images: [N, height, width, channels] uint8.
        scaling: One of ``data.SCALINGS``.
    """

    def __init__(self, images: NDArray[np.uint8], scaling: str) -> None:
        super().__init__(images.shape)
        self._images, self._scaling = images, scaling

    def __getitem__(self, chosen: Chosen) -> NDArray[np.float32]:
        """Return images as they are stored, scaled."""
        return scale(self._images[chosen], self._scaling)

    def subset(self, chosen: NDArray[np.int64]) -> Augmented:
        """Return a copy of a part."""
        return Augmented(self._images[chosen], self._scaling)

    def feed(self, cursor: Cursor) -> Feed:
        """Crop and mirror by the example's place in the walk."""

        def augmented(chosen: NDArray[np.int64], place: int) -> NDArray[np.float32]:
            draws = uniforms(cursor.seed, place, len(chosen), 3)
            return scale(crop_flip(self._images[chosen], draws), self._scaling)

        return augmented


def crop_flip(images: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Shift each image by up to ``PADDING`` pixels each way, black beyond it, and mirror half.

    Args:
        images: [B, height, width, channels] uint8.
        draws: [B, 3] in [0, 1): of the row, of the column, of mirroring.

    Returns:
        uint8 of the same shape.
    """
    count, height, width, _ = images.shape
    margin = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), margin, margin, (0, 0)))
    corners = (draws[:, :2] * (2 * PADDING + 1)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    # A window is [channels, height, width]; the channels go last again.
    cropped = windows[np.arange(count), corners[:, 0], corners[:, 1]].transpose(0, 2, 3, 1)
    mirrored = draws[:, 2] < 0.5
    return np.where(mirrored[:, None, None, None], cropped[:, :, ::-1], cropped)


class Repeated(Lazy):
    """A few images in memory that stand for many: image i is number i modulo their count.

    Args:
        images: [n, height, width, channels] float32, scaled.
        positions: [N] int64, which image each one is before the modulo.
    """

    def __init__(self, images: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        super().__init__((len(positions), *images.shape[1:]))
        self._images, self._positions = images, positions

    def __getitem__(self, chosen: Chosen) -> NDArray[np.float32]:
        """Return copies of the images."""
        return self._images[self._positions[chosen] % len(self._images)]

    def subset(self, chosen: NDArray[np.int64]) -> Repeated:
        """Return a part that shares the images."""
        return Repeated(self._images, self._positions[chosen])

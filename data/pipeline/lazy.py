"""Lazy images: image arrays that compute their values when indexed, to save memory.

A `Lazy` object is indexed like a float32 array of images. The method `subset` of a `Lazy` object
selects images. The method `feed` of a `Lazy` object returns the training images in the order of a
worker's cursor. The function `scale` turns pixels 0..255 into the float32 input of a network.
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

#: Size of a chunk of float32 values that are scaled together. A chunk should stay in the CPU's
#: cache between passes.
_CHUNK_BYTES = 1 << 22
PADDING = 4  # number of pixels that crop_flip adds on each side of an image
#: Function of (positions [B] int64, cursor's place before the batch) that returns the batch's
#: images: [B, ...] float32, an array or a tensor.
Feed = Callable[[NDArray[np.int64], int], Any]
Chosen = NDArray[np.int64] | slice
#: Scaling -> mean and standard deviation of the red, green and blue values of the training set,
#: for pixels in 0..1.
CHANNELS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def scale(images: NDArray[np.uint8], scaling: str) -> NDArray[np.float32]:
    """Scale the pixels of images for the input of a network.

    Args:
        images: Images to process, [N, height, width, channels] uint8.
        scaling: "standardize": scale each image to mean 0 and variance 1. The divisor is the
            image's standard deviation, but at least 1/sqrt(number of values in the image), as in
            ``tf.image.per_image_standardization``.
            "unit": divide by 255.
            "cifar10", "imagenet": divide by 255, then subtract the mean of each channel and divide
            by the standard deviation of each channel (`CHANNELS`).

    Returns:
        The scaled images, float32, of the same shape.

    Raises:
        ConfigurationError: The scaling is unknown, or needs three channels but the images have
            another number of channels.
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
    """Raise ConfigurationError if the scaling is unknown or does not fit the number of channels."""
    if scaling not in SCALINGS:
        raise ConfigurationError(
            f"--scaling {scaling} is not known; expected one of {', '.join(SCALINGS)}."
        )
    if scaling in CHANNELS and image_depth != 3:
        raise ConfigurationError(
            f"--scaling {scaling} is for images of 3 channels, but the images of this data set "
            f"have {image_depth}; choose another scaling, for example standardize."
        )


def factor_and_offset(scaling: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the factor and the offset of any scaling of pixels except "standardize".

    The scaled value of a pixel is ``pixel * factor + offset``.

    Returns:
        Factor and offset, each float32 of shape [1] or [channels].
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
    """Base class of image sets that scale their images only when the images are indexed.

    Attributes:
        shape: Shape of the image set: (N, height, width, channels).
        dtype: Data type of the images when indexed: float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        """Return the number of images in the image set."""
        return self.shape[0]

    def __getitem__(self, chosen: Chosen) -> Any:
        """Return scaled images without augmentation, for evaluation: [B, ...] float32."""
        raise NotImplementedError

    def subset(self, chosen: NDArray[np.int64]) -> Lazy:
        """Return the images of the set at the positions ``chosen``, in the order of ``chosen``."""
        raise NotImplementedError

    def feed(self, cursor: Cursor) -> Feed:
        """Return a function that computes the training images of a cursor's batches."""
        return lambda chosen, place: self[chosen]

    def walk(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Any]:
        """Yield the images of each batch without augmentation, for evaluation."""
        return (self[chosen] for chosen in batches)


def subset(images: Any, chosen: NDArray[np.int64]) -> Any:
    """Return the images at the positions ``chosen`` in a set of images (an array or a `Lazy`)."""
    return images.subset(chosen) if isinstance(images, Lazy) else images[chosen]


def feed_of(images: Any, cursor: Cursor) -> Feed:
    """Return a function that computes the training images of a cursor's batches.

    The images are an array or a `Lazy` (images that are computed when indexed).
    """
    if isinstance(images, Lazy):
        return images.feed(cursor)
    return lambda chosen, place: images[chosen]


class Augmented(Lazy):
    """Images in memory as uint8, which are cropped, mirrored and scaled for every training batch.

    Args:
        images: Images to process, [N, height, width, channels] uint8.
        scaling: Scaling of the pixels, one of ``data.SCALINGS``.
    """

    def __init__(self, images: NDArray[np.uint8], scaling: str) -> None:
        super().__init__(images.shape)
        self._images, self._scaling = images, scaling

    def __getitem__(self, chosen: Chosen) -> NDArray[np.float32]:
        """Return scaled images of the set, which are neither cropped nor mirrored."""
        return scale(self._images[chosen], self._scaling)

    def subset(self, chosen: NDArray[np.int64]) -> Augmented:
        """Return a copy of the images at the positions ``chosen``."""
        return Augmented(self._images[chosen], self._scaling)

    def feed(self, cursor: Cursor) -> Feed:
        """Return a function that crops and mirrors images at random by their place in the cursor's
        sequence.
        """

        def augmented(chosen: NDArray[np.int64], place: int) -> NDArray[np.float32]:
            draws = uniforms(cursor.seed, place, len(chosen), 3)
            return scale(crop_flip(self._images[chosen], draws), self._scaling)

        return augmented


def crop_flip(images: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Shift each image by up to ``PADDING`` pixels in each direction, and mirror half the images.

    In a shifted image, the pixels outside the original image are black.

    Args:
        images: Images of a batch, [B, height, width, channels] uint8.
        draws: Random numbers of each image for the row, the column and the mirroring, [B, 3]
            float64 in [0, 1).

    Returns:
        The shifted and mirrored images, uint8, [B, height, width, channels].
    """
    count, height, width, _ = images.shape
    margin = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), margin, margin, (0, 0)))
    corners = (draws[:, :2] * (2 * PADDING + 1)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    # A sliding window of an image has the shape [channels, height, width]. The transpose moves the
    # channels to the end.
    cropped = windows[np.arange(count), corners[:, 0], corners[:, 1]].transpose(0, 2, 3, 1)
    mirrored = draws[:, 2] < 0.5
    return np.where(mirrored[:, None, None, None], cropped[:, :, ::-1], cropped)


class Repeated(Lazy):
    """A large artificial image set that repeats a few stored images.

    Image i of the large set is the stored image ``positions[i] % n``.

    Args:
        images: Stored images, [n, height, width, channels] float32, scaled.
        positions: Number of each image of the large set, [N] int64, whose modulo n selects a stored
            image.
    """

    def __init__(self, images: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        super().__init__((len(positions), *images.shape[1:]))
        self._images, self._positions = images, positions

    def __getitem__(self, chosen: Chosen) -> NDArray[np.float32]:
        """Return copies of the stored images that the image numbers ``chosen`` stand for."""
        return self._images[self._positions[chosen] % len(self._images)]

    def subset(self, chosen: NDArray[np.int64]) -> Repeated:
        """Return the images at the positions ``chosen``, without a copy of the stored images."""
        return Repeated(self._images, self._positions[chosen])

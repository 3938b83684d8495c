"""Images that are made when they are asked for, where an array of all of them would be too much.

They are indexed like an array of float32 and know two more things: how to be a part of themselves,
and how to feed a worker's training in the order of its cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.cursor import Cursor
from data.draws import uniforms
from data.scaling import scale

#: (positions [B] int64, place of the first in the walk) -> [B, ...] float32, an array or a tensor.
Feed = Callable[[NDArray[np.int64], int], Any]
Chosen = NDArray[np.int64] | slice

PADDING = 4  # pixels of crop_flip, on each side


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
        del cursor
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

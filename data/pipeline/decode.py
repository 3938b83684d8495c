"""Decodes and crops images with tf.data, on several cores, ahead of training.

The pixels of a decoded training image depend only on the image file, the seed and the example's
place in the cursor's sequence. A position in the sequence of training images can be saved as two
integers, and resumed training uses the pixels of uninterrupted training. The function `random_box`
computes a random crop from the image's size in the file header and from random numbers.

Source: the random area and aspect ratio of Szegedy et al., "Going deeper with convolutions",
arXiv:1409.4842, section 6: area 0.08 to 1, ratio 3/4 to 4/3, ten attempts. If no attempt fits, the
crop is the largest middle part with a ratio from 3/4 to 4/3. He et al., arXiv:1512.03385, section
3.4, for the middle crop of the evaluation.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.pipeline.cursor import Cursor, uniforms
from thinwire.data.pipeline.lazy import Chosen, Feed, Lazy, factor_and_offset
from thinwire.data.readers.imagenet import DEPTH, EncodedImages
from thinwire.ops.types import ConfigurationError

_ATTEMPTS = 10
#: Number of random numbers per example: area, ratio, row and column of each attempt to crop, and
#: mirroring.
WIDTH = 4 * _ATTEMPTS + 1
_LEAST_AREA, _RATIO = 0.08, 4 / 3

_PNG = b"\x89PNG\r\n\x1a\n"
#: JPEG markers of segments that hold the image's size (SOF: baseline, progressive and others). The
#: markers C4, C8 and CC start other segments.
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: JPEG markers that have no length field.
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})

#: Ratio of the shorter side of a resized evaluation image to the side of its crop.
_MARGIN = 256 / 224
_MOST_THREADS = 16
_BATCHES_AHEAD = 2
_READERS = 8  # number of threads that read image files ahead

#: Box, a rectangle of an image: top, left, height and width, in pixels.
Box = tuple[int, int, int, int]
#: Request of one batch: positions [B] int64, and random numbers [B, WIDTH] float64,
#: or None for middle crops.
BatchRequest = tuple[NDArray[np.int64], NDArray[np.float64] | None]
#: Files of one batch: encoded images, box of each image [B, 4] int32, and
#: True for each mirrored image [B].
_Parts = tuple[list[bytes], NDArray[np.int32], NDArray[np.bool_]]


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return the height and the width of a JPEG or PNG image, in pixels.

    Raises:
        ValueError: ``encoded`` is neither a JPEG nor a PNG image, or ends before the image's size.
    """
    try:
        if encoded.startswith(_PNG):
            width, height = struct.unpack_from(">II", encoded, 16)
        else:
            height, width = _jpeg_size(encoded)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the image ends after {len(encoded)} bytes, inside its header") from error
    if not height or not width:
        raise ValueError(f"image header announces {height} x {width} pixels; expected at least 1")
    return height, width


def _jpeg_size(encoded: bytes) -> tuple[int, int]:
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"image is no JPEG or PNG: starts with {encoded[:4].hex(' ') or '(none)'}")
    at = 2
    while True:
        if encoded[at] != 0xFF:
            raise ValueError("the image's header is damaged")
        while encoded[at] == 0xFF:  # any number of FF bytes may precede a JPEG marker
            at += 1
        marker = encoded[at]
        at += 1
        if marker in _SIZE_MARKERS:
            height, width = struct.unpack_from(">HH", encoded, at + 3)
            return height, width
        if marker not in _BARE_MARKERS:
            at += struct.unpack_from(">H", encoded, at)[0]


def random_box(height: int, width: int, draws: Sequence[float]) -> Box:
    """Return the box (top, left, height, width) of a random crop of an image.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        draws: At least WIDTH - 1 uniform random numbers in [0, 1), which determine the crop of the
            image.
    """
    for attempt in range(_ATTEMPTS):
        area, ratio, row, column = draws[4 * attempt : 4 * attempt + 4]
        pixels = (_LEAST_AREA + (1 - _LEAST_AREA) * area) * height * width
        # Ratio of the crop's width to its height.
        shape = math.exp((2 * ratio - 1) * math.log(_RATIO))
        high, wide = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 1 <= high <= height and 1 <= wide <= width:
            return int(row * (height - high + 1)), int(column * (width - wide + 1)), high, wide
    high, wide = min(height, round(width * _RATIO)), min(width, round(height * _RATIO))
    return (height - high) // 2, (width - wide) // 2, high, wide


def is_mirrored(draws: Sequence[float]) -> bool:
    """Return True if the random numbers of an image mean to mirror it, with probability 1/2."""
    return draws[WIDTH - 1] < 0.5


class Decoded(Lazy):
    """Images in files, which are read and decoded only when they are indexed.

    Args:
        source: Object that reads the encoded images.
        chosen: Positions of the images in ``source``, [N] int64.
        size: Height and width of a decoded image, in pixels.
        scaling: Scaling of the pixels, one of ``data.SCALINGS``.
        augment: Augmentation, "resized_crop_flip" for random crops in training, or "none" for
            middle crops.
    """

    def __init__(
        self,
        source: EncodedImages,
        chosen: NDArray[np.int64],
        size: int,
        scaling: str,
        augment: str,
    ) -> None:
        super().__init__((len(chosen), size, size, DEPTH))
        self._source, self._chosen = source, chosen
        self.scaling, self.augment = scaling, augment

    def __getitem__(self, chosen: Chosen) -> Any:
        """Return the middle crops of images: tensor [B, size, size, 3] float32."""
        positions = np.arange(len(self))[chosen] if isinstance(chosen, slice) else chosen
        return next(self.walk([positions]))

    def subset(self, chosen: NDArray[np.int64]) -> Decoded:
        """Return the set of the images at the positions ``chosen``, without decoding the images."""
        part = self._chosen[chosen]
        return Decoded(self._source, part, self.shape[1], self.scaling, self.augment)

    def walk(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Any]:
        """Yield the middle crops of the images of each batch; decode the next batches ahead."""
        return self._decoded(((batch, None) for batch in batches), is_random=False)

    def feed(self, cursor: Cursor) -> Feed:
        """Return a function that computes a cursor's batches and decodes the next batches ahead.

        The function begins to decode again if the cursor's position jumps.
        """
        stream: Iterator[Any] = iter(())
        # Number of the cursor's examples before the next batch of `stream`; None if unknown.
        next_place: int | None = None

        def images_of(chosen: NDArray[np.int64], place: int) -> Any:
            nonlocal stream, next_place
            if place != next_place:
                stream = self.stream(chosen, place, cursor.fork())
            # If decoding fails, the generator of batches has ended. The place None makes the next
            # call start a new generator.
            next_place = None
            images = next(stream)
            next_place = place + len(chosen)
            return images

        return images_of

    def stream(self, chosen: NDArray[np.int64], place: int, ahead: Cursor) -> Iterator[Any]:
        """Yield the training images of the batch ``chosen`` and of all later batches of a cursor.

        Args:
            chosen: Positions of the images of the first batch, [B] int64.
            place: Number of the cursor's examples before the first batch.
            ahead: Cursor at its position after the first batch.
        """
        is_random = self.augment != "none"

        def requests() -> Iterator[BatchRequest]:
            first, positions = place, chosen
            while True:
                draws = uniforms(ahead.seed, first, len(positions), WIDTH) if is_random else None
                yield positions, draws
                first, positions = ahead.place, ahead.next()

        return self._decoded(requests(), is_random)

    def _decoded(self, batches: Iterator[BatchRequest], is_random: bool) -> Iterator[Any]:
        """Yield the decoded images of each batch: tensor [B, size, size, 3] float32.

        Raises:
            ConfigurationError: An image file cannot be read or decoded.
        """
        import tensorflow as tf

        # Positions of the batches that were read but not yet yielded, oldest first. If decoding
        # fails, the first entry is the batch in which the error occurred.
        pending: list[NDArray[np.int64]] = []
        image = _image_function(is_random, self.shape[1], self.scaling)
        with tf.device("/CPU:0"):
            pipeline = tf.data.Dataset.from_generator(
                lambda: self._parts(batches, pending),
                output_signature=(
                    tf.TensorSpec([None], tf.string),
                    tf.TensorSpec([None, 4], tf.int32),
                    tf.TensorSpec([None], tf.bool),
                ),
            )
            pipeline = pipeline.flat_map(functools.partial(_of_batch, image))
            pipeline = pipeline.prefetch(_BATCHES_AHEAD).with_options(_options())
            iterator = iter(pipeline)
        while True:
            try:
                images = next(iterator, None)
            except tf.errors.OpError as error:
                raise self._explained(pending[:1], error) from error
            if images is None:
                return
            del pending[0]
            yield images

    def _parts(
        self, batches: Iterator[BatchRequest], pending: list[NDArray[np.int64]]
    ) -> Iterator[_Parts]:
        """Yield the encoded images of each batch; append the positions of the batch to
        `pending`.
        """
        with ThreadPoolExecutor(_READERS) as readers:
            for chosen, draws in batches:
                pending.append(chosen)
                encoded = list(readers.map(self.read, chosen))
                boxes = np.zeros((len(chosen), 4), np.int32)
                mirrored = np.zeros(len(chosen), np.bool_)
                for row, numbers in enumerate(() if draws is None else draws.tolist()):
                    boxes[row] = random_box(*image_size(encoded[row]), numbers)
                    mirrored[row] = is_mirrored(numbers)
                yield encoded, boxes, mirrored

    def read(self, position: Any) -> bytes:
        """Return the encoded (JPEG or PNG) image at a position."""
        return self._source.read(int(self._chosen[position]))

    def _explained(self, batches: list[NDArray[np.int64]], error: Exception) -> Exception:
        """Decode a batch's images one by one; return an error that names the first damaged
        image.
        """
        import tensorflow as tf

        for position in (row for batch in batches for row in batch):
            try:
                encoded = self.read(position)
                image_size(encoded)
                tf.io.decode_image(encoded, DEPTH, expand_animations=False)
            except (OSError, ValueError, tf.errors.OpError) as cause:
                name = self._source.name(int(self._chosen[position]))
                return ConfigurationError(
                    f"Image {name} cannot be used: {getattr(cause, 'message', cause)}. Expected a "
                    "complete JPEG or PNG. Fetch the image again, or remove it on all nodes."
                )
        return ConfigurationError(f"A batch of images cannot be decoded: {error}")


def _of_batch(image: Callable[..., Any], *batch: Any) -> Any:
    """Return a tf.data.Dataset with one element: a batch's images, decoded on several cores."""
    import tensorflow as tf

    images = tf.data.Dataset.from_tensor_slices(batch)
    images = images.map(image, num_parallel_calls=_num_threads(), deterministic=True)
    return images.batch(tf.size(batch[0], tf.int64))


@functools.lru_cache(maxsize=16)
def _image_function(is_random: bool, size: int, scaling: str) -> Callable[..., Any]:
    """Return a traced function (encoded, box [4] int32, mirrored) -> [size, size, 3] float32."""
    import tensorflow as tf

    def image(encoded: Any, box: Any, mirrored: Any) -> Any:
        pixels = _cropped(encoded, box, mirrored, size) if is_random else _middle(encoded, size)
        return _scaled(tf.ensure_shape(pixels, [size, size, DEPTH]), scaling)

    signature = [
        tf.TensorSpec([], tf.string),
        tf.TensorSpec([4], tf.int32),
        tf.TensorSpec([], tf.bool),
    ]
    function: Callable[..., Any] = tf.function(image, input_signature=signature, autograph=False)
    return function


def _cropped(encoded: Any, box: Any, mirrored: Any, size: int) -> Any:
    """Crop an image, resize the crop to ``size`` and optionally mirror it; pixels are float32 in
    0..255.
    """
    import tensorflow as tf

    top, left, height, width = tf.unstack(box)

    def of_other() -> Any:  # some of ImageNet's .JPEG files contain PNG images
        image = tf.io.decode_image(encoded, DEPTH, expand_animations=False)
        return image[top : top + height, left : left + width]

    image = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.decode_and_crop_jpeg(encoded, box, channels=DEPTH),
        of_other,
    )
    image = tf.ensure_shape(image, [None, None, DEPTH])
    image = tf.image.resize(image, [size, size], antialias=True)
    return tf.cond(mirrored, lambda: image[:, ::-1], lambda: image)


def _middle(encoded: Any, size: int) -> Any:
    """Resize an image's shorter side to size * 256/224 and crop the middle; pixels are float32 in
    0..255.
    """
    import tensorflow as tf

    image = tf.io.decode_image(encoded, DEPTH, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, DEPTH])
    shape = tf.cast(tf.shape(image)[:2], tf.float64)
    shorter = round(size * _MARGIN)
    target = tf.cast(tf.round(shape * (shorter / tf.reduce_min(shape))), tf.int32)
    image = tf.image.resize(image, target, antialias=True)
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    return image[top : top + size, left : left + size]


def _scaled(image: Any, scaling: str) -> Any:
    """Scale float32 pixels in 0..255 as ``thinwire.data.pipeline.lazy.scale`` scales uint8
    pixels.
    """
    import tensorflow as tf

    if scaling == "standardize":
        return tf.image.per_image_standardization(image)
    factor, offset = factor_and_offset(scaling)
    return image * factor + offset


def _num_threads() -> int:
    """Return the number of threads that decode image files."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _options() -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.deterministic = True
    # The decoder needs a private thread pool: with --threads=1, training and decoding would
    # otherwise share one thread.
    options.threading.private_threadpool_size = _num_threads()
    return options

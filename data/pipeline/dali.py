"""Training images by NVIDIA DALI instead of tf.data, where it is installed; it is no requirement.

The crops are the same to the pixel; resizing and thereby the values differ a little from those of
tf.data. Evaluations stay with tf.data, so that accuracies can be compared. DALI decodes on the
CPU here: a worker's GPU is left to the training.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.pipeline.cursor import Cursor, uniforms
from thinwire.data.pipeline.decode import BATCHES_AHEAD, WIDTH, Decoded, Parts, num_threads
from thinwire.data.pipeline.lazy import Feed, factor_and_offset
from thinwire.ops.types import ConfigurationError

#: Of each image of a batch: encoded, top and left, height and width, whether mirrored.
_Arrays = tuple[list[Any], list[Any], list[Any], list[Any]]


class DaliDecoded(Decoded):
    """Images whose training crops DALI decodes."""

    def feed(self, cursor: Cursor) -> Feed:
        """Decode what the cursor is going to deal out, ahead of it.

        Raises:
            ConfigurationError: DALI is not installed, or lacks the preprocessing.
        """
        if self.augment == "none" or self.scaling == "standardize":
            raise ConfigurationError(
                f"--input_pipeline=dali does not know --augment={self.augment} with "
                f"--scaling={self.scaling}; expected random crops and a scaling by channels or "
                "unit. Leave them out, or --input_pipeline."
            )
        try:
            importlib.import_module("nvidia.dali.fn")
        except (ImportError, OSError) as error:
            raise ConfigurationError(
                f"--input_pipeline=dali: NVIDIA DALI cannot be imported ({error}). Install "
                "nvidia-dali-cuda120, or the package for your CUDA, into this environment, or "
                "leave --input_pipeline out to take tf.data."
            ) from error
        return super().feed(cursor)

    def stream(self, batches: Iterator[tuple[NDArray[np.int64], int]], seed: int) -> Iterator[Any]:
        """Yield the training images of (positions, place): [B, size, size, 3] float32."""
        pending: list[NDArray[np.int64]] = []
        draws = ((at, uniforms(seed, place, len(at), WIDTH)) for at, place in batches)
        parts = self.parts(draws, pending)
        first = next(parts)
        pipeline = self._pipeline(map(_for_dali, itertools.chain([first], parts)), len(pending[0]))
        while True:
            try:
                (images,) = pipeline.run()
            except (RuntimeError, ValueError, OSError) as error:
                raise self.explained(pending, error) from error
            del pending[0]
            yield np.array(images.as_tensor())

    def _pipeline(self, parts: Iterator[_Arrays], batch_size: int) -> Any:
        """Build the pipeline that turns these into images."""
        fn, types = (importlib.import_module(f"nvidia.dali.{name}") for name in ("fn", "types"))
        factor, offset = factor_and_offset(self.scaling)
        pipeline = importlib.import_module("nvidia.dali.pipeline").Pipeline(
            batch_size=batch_size,
            num_threads=num_threads(),
            device_id=None,
            prefetch_queue_depth=BATCHES_AHEAD,
        )
        with pipeline:
            encoded, corners, sizes, mirrored = fn.external_source(
                source=parts, num_outputs=4, dtype=[types.UINT8, *3 * [types.INT32]]
            )
            images = fn.decoders.image_slice(
                encoded,
                corners,
                sizes,
                axes=[0, 1],
                normalized_anchor=False,
                normalized_shape=False,
                adjust_orientation=False,
                output_type=types.RGB,
            )
            size = list(self.shape[1:3])
            images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.FLOAT,
                output_layout="HWC",
                mirror=mirrored,
                mean=(-offset / factor).tolist(),
                std=(1 / factor).tolist(),
            )
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline


def _for_dali(parts: Parts) -> _Arrays:
    encoded, boxes, mirrored = parts
    images = [np.frombuffer(one, np.uint8) for one in encoded]
    return images, list(boxes[:, :2]), list(boxes[:, 2:]), list(mirrored.astype(np.int32))

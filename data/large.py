"""Data sets that are not kept in memory: ImageNet's files, and a stand-in that needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging
from numpy.typing import NDArray

from data import imagenet, synthetic
from data.dali import DaliDecoded
from data.decoding import Decoded
from data.lazy import Lazy, Repeated
from data.scaling import check, scale
from ops.types import ConfigurationError

#: Images of imagenet_synthetic as it counts them, and how many different ones there are.
NUM_SYNTHETIC = {"train": 1_281_167, "test": 1_000}
_NUM_DIFFERENT = 256
_READERS = {"tfdata": Decoded, "dali": DaliDecoded}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to load, all chosen; see ``data.datasets.load``."""

    name: str
    data_dir: str | None
    image_size: int
    image_depth: int
    nb_classes: int
    scaling: str
    augment: str
    input_pipeline: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a data set as a run uses it."""

    images: NDArray[np.float32] | Lazy  # [N, height, width, channels] float32
    labels: NDArray[np.int32]  # [N] int32
    file_offsets: NDArray[np.int64] | None = None  # [files + 1] int64


def load(wanted: Wanted, part: str) -> Part:
    """Return one part of a set in ``LARGE``; nothing is decoded yet.

    Raises:
        ConfigurationError: Files are missing, damaged, or do not fit the network's sizes.
    """
    return LARGE[wanted.name](wanted, part)


def _imagenet(wanted: Wanted, part: str) -> Part:
    if wanted.image_depth != imagenet.DEPTH:
        raise ConfigurationError(
            f"Data set imagenet has images of {imagenet.DEPTH} channels; this is --image_depth "
            f"{wanted.image_depth}. Set --image_depth {imagenet.DEPTH}, and --image_size and "
            "--nb_classes, usually 224 and 1000."
        )
    check(wanted.scaling, wanted.image_depth)
    source = imagenet.find(wanted.data_dir, part, wanted.nb_classes)
    images = _READERS[wanted.input_pipeline](
        source,
        np.arange(len(source.labels)),
        wanted.image_size,
        wanted.scaling,
        wanted.augment,
    )
    return Part(images, source.labels, source.file_offsets)


def _imagenet_synthetic(wanted: Wanted, part: str) -> Part:
    """As many images as ImageNet has, so that an epoch lasts as long; 256 different ones."""
    if wanted.data_dir is not None:
        raise ConfigurationError(
            f"--data_dir {wanted.data_dir} was given, but --dataset imagenet_synthetic is "
            "generated and reads no files. Leave --data_dir out, or choose --dataset imagenet."
        )
    images, labels = synthetic.generate(
        part,
        wanted.image_size,
        wanted.image_depth,
        wanted.nb_classes,
        wanted.seed,
        num_examples=_NUM_DIFFERENT,
    )
    positions = np.arange(NUM_SYNTHETIC[part])
    logging.info("data: %d different images stand for %d", len(labels), len(positions))
    repeated = Repeated(scale(images, wanted.scaling), positions)
    return Part(repeated, labels[positions % len(labels)])


LARGE: Mapping[str, Callable[[Wanted, str], Part]] = {
    "imagenet": _imagenet,
    "imagenet_synthetic": _imagenet_synthetic,
}

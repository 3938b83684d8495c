"""Generated images: a coarse pattern for each class under strong noise. No files needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_EXAMPLES = {"train": 4000, "test": 1000}
_COARSE = 4  # a pattern has 4 x 4 patches
_NOISE = 80.0  # standard deviation, in grey levels
_CHUNK = 256


def generate(
    part: str,
    image_size: int,
    image_depth: int,
    nb_classes: int,
    seed: int,
    num_examples: int | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the images and labels of one part; the same arguments give the same data anywhere.

    Args:
        part: "train" or "test"; both show the same patterns under different noise.
        image_size: Height and width in pixels.
        image_depth: Channels.
        nb_classes: Classes, equally frequent.
        seed: Seeds patterns, labels and noise.
        num_examples: How many; None for ``NUM_EXAMPLES`` of the part.

    Returns:
        Images uint8 [N, image_size, image_size, image_depth] and labels int32 [N].
    """
    coarse = np.random.default_rng([seed, 0]).uniform(
        40, 216, size=(nb_classes, _COARSE, _COARSE, image_depth)
    )
    patch = np.arange(image_size) * _COARSE // image_size
    patterns = coarse[:, patch][:, :, patch].astype(np.float32)
    rng = np.random.default_rng([seed, 1 + list(NUM_EXAMPLES).index(part)])
    count = NUM_EXAMPLES[part] if num_examples is None else num_examples
    labels = rng.permutation(np.arange(count, dtype=np.int32) % nb_classes)
    images = np.empty((len(labels), *patterns.shape[1:]), dtype=np.uint8)
    for start in range(0, len(labels), _CHUNK):
        noisy = patterns[labels[start : start + _CHUNK]]
        noisy += _NOISE * rng.standard_normal(noisy.shape, dtype=np.float32)
        images[start : start + _CHUNK] = np.clip(noisy, 0, 255)
    return images, labels

"""Random numbers of an example by its place in a worker's walk: the same however it got there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_PURPOSE = 0x6175676D656E74  # tells these draws from others with the same seed


def uniforms(seed: int, place: int, count: int, width: int) -> NDArray[np.float64]:
    """Return draws for consecutive examples.

    A row depends on the seed and its own place alone, not on the batch it is drawn with.

    Args:
        seed: Of the worker's walk.
        place: How many examples were dealt out before the first one.
        count: Examples.
        width: Draws of each example.

    Returns:
        [count, width] float64 in [0, 1).

    >>> bool((uniforms(1, 10, 4, 3)[2] == uniforms(1, 12, 1, 3)[0]).all())
    True
    """
    blocks = -(-width // 4)  # the generator counts in blocks of four numbers
    generator = np.random.Philox(key=[seed, _PURPOSE], counter=place * blocks)
    raw = generator.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :width]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Which rank of a block travels on which channel, and in which order blocks are ranked.

Source: DGT's ranking and channel map; docs/methods/dgt.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Float32, Int64


def num_first(num_blocks: int, k: float) -> int:
    """Return R, how many ranks the fraction k makes reliable: k n, rounded half up.

    The product is a float32, as in the original: rounding decides whole blocks.

    >>> num_first(5, 0.5), num_first(90, 0.35)
    (3, 32)
    """
    return math.floor(float(np.float32(k) * np.float32(num_blocks)) + 0.5)


def channels_by_rank(
    num_ranked: int, num_ends: int, k: float, num_channels: int, num_forced: int = 0
) -> NDArray[np.uint8]:
    """Return the channel of each rank, best first: 0 is reliable, then 1 to `num_channels`.

    With ``n = num_ranked + num_ends`` blocks and ``R = floor(k n + 0.5)``, rank j goes to channel 0
    below R, else to ``1 + floor((j - R) C / (n - 1 - R))``. That is for one end; where more blocks
    are reliable because they are ends, as many fewer are for their rank.

    Args:
        num_ranked: Blocks that have a rank.
        num_ends: Last blocks of tensors, which are reliable whatever they hold; at least 1.
        k: Fraction of blocks to be reliable.
        num_channels: C, at least 1.
        num_forced: Best ranks that are reliable in any case.

    >>> "".join(map(str, channels_by_rank(10, 1, 0.0, 3)))
    '1111222333'
    """
    reliable = num_first(num_ranked + num_ends, k) - (num_ends - 1)
    reliable = min(max(reliable, num_forced, 0), num_ranked)
    behind = np.arange(num_ranked - reliable)
    channels = np.zeros(num_ranked, np.uint8)
    channels[reliable:] = 1 + behind * num_channels // max(1, behind.size)
    return channels


def best_first(scores: Float32, is_first: NDArray[np.bool_]) -> Int64:
    """Return positions [m] int64 by descending score, ties by position.

    Args:
        scores: [m] float32, finite.
        is_first: [m] bool: to be put before all others.
    """
    return np.lexsort((-scores, ~is_first))  # lexsort is stable


def at_random(seed: tuple[int, ...], is_first: NDArray[np.bool_]) -> Int64:
    """Return positions [m] int64 in an order that depends on nothing but the seed and m."""
    order = np.random.default_rng(seed).permutation(is_first.size)
    return order[np.argsort(~is_first[order], kind="stable")]

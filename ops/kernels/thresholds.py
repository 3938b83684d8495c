"""Selection by a threshold: about k entries of largest magnitude, for less work than exactly k."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ops.kernels import select
from ops.kernels.accumulate import accumulate

if TYPE_CHECKING:
    from ops.types import Float32, Int64

EXACT_BELOW = 4096  # entries
SAMPLED_FRACTION = 0.01
TOO_MANY, TOO_FEW = 1.3, 0.8  # times k
LOWERED, ROUNDS = 0.8, 10


def sampled_top_k(x: Float32, k: int, rng: np.random.Generator) -> tuple[Int64, Float32]:
    """Return the entries that reach the k-th largest magnitude as a sample has it.

    The sample is a hundredth of the entries, or the 2 n / k that have two entries above the
    threshold. Where more than 1.3 k reach it the k largest of those are taken; where fewer than 0.8
    k do, it is lowered by a fifth, at most ten times.

    Args:
        x: [n] float32, finite.
        k: How many, 1 to n.
        rng: For the place where the sample begins.

    Returns:
        Ascending indices [m] int64 and their values [m] float32, never zeros.

    Source: the program of the authors of "Deep Gradient Compression", ICLR 2018.
    """
    wanted = max(math.ceil(SAMPLED_FRACTION * x.size), math.ceil(2 * x.size / k))
    if wanted >= x.size:
        return select.top_k(x, k)
    stride = x.size // wanted
    sample = np.abs(x[int(rng.integers(stride)) :: stride])
    rank = max(1, round(k * sample.size / x.size))
    threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
    for _ in range(ROUNDS):
        if not threshold > 0:
            return select.top_k(x, k)
        indices, values = select.at_least(x, threshold)
        if indices.size > TOO_MANY * k:
            kept = select.largest(values, k)
            return indices.take(kept), values.take(kept)
        if indices.size >= TOO_FEW * k:
            break
        threshold *= np.float32(LOWERED)
    return indices, values


def feedback_carried(
    residual: Float32, addend: Float32, k: int, factor: float = 1.0, threshold: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Do `carried_top_k` of a residual plus an addend, and take out what is selected.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then zero where selected.
        addend: [n] float32, finite.
        k: How many there should be, 1 to n.
        factor: Of the addend.
        threshold: Of the step before; 0: not known.
    """
    if threshold > 0 and residual.size > EXACT_BELOW:
        indices, values = select.add_at_least(residual, addend, np.float32(threshold), factor)
        if TOO_FEW * k <= indices.size <= TOO_MANY * k:
            residual[indices] = 0
            return indices, values, select.magnitude_at(np.abs(values), k)
    else:
        accumulate(residual, addend, factor)
    indices, values, threshold = carried_top_k(residual, k, threshold)
    residual[indices] = 0
    return indices, values, threshold


def carried_top_k(x: Float32, k: int, threshold: float) -> tuple[Int64, Float32, float]:
    """Return the entries that reach a threshold, and the threshold for next time.

    The next one is where k of these entries were above it; if there were fewer, it is lowered along
    the slope of the magnitudes that were found. Where more than 1.3 k reach it the k largest of
    those are taken; where fewer than 0.8 k do, the k largest of all.

    Args:
        x: [n] float32, finite.
        k: How many there should be, 1 to n.
        threshold: Of the time before; 0: not known.

    Returns:
        Ascending indices [m] int64, their values [m] float32, never zeros, and the threshold.
    """
    if threshold > 0 and x.size > EXACT_BELOW:
        indices, values = select.at_least(x, np.float32(threshold))
        if indices.size >= TOO_FEW * k:
            following = select.magnitude_at(np.abs(values), k)
            if indices.size > TOO_MANY * k:
                kept = select.largest(values, k)
                indices, values = indices.take(kept), values.take(kept)
            return indices, values, following
    indices, values = select.top_k(x, k)
    return indices, values, float(np.abs(values).min()) if indices.size == k else 0.0

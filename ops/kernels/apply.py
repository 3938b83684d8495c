"""Applying updates in numpy, and AdaComp's per-entry staleness.

Arithmetic is float32 in this order everywhere: product = rate * value, then theta - product. The
TensorFlow bodies keep the order, so both agree bit for bit above the subnormal range (which
TensorFlow's threads flush to zero).

Source: AdaComp's update of the parameter server; docs/methods/adacomp.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ops.types import Float32, Int64

_REGION = 1 << 19  # entries of scratch in use at a time: stays in cache however large the model


def apply_sparse(theta: Float32, indices: Int64, values: Float32, rate: float | Float32) -> None:
    """Do ``theta[indices] -= rate * values`` in place.

    Args:
        theta: [n] float32.
        indices: [k] int64, unique.
        values: [k] float32.
        rate: One rate, or [k] float32 with one per entry.
    """
    np.subtract.at(theta, indices, scale(values, rate))


def apply_dense(theta: Float32, values: Float32, rate: float | Float32) -> None:
    """Do ``theta -= rate * values`` in place; all [n] float32, the rate a number or [n]."""
    theta -= scale(values, rate)


def scale(values: Float32, rate: float | Float32) -> Float32:
    """Return ``rate * values`` in float32."""
    return np.multiply(values, np.asarray(rate, np.float32))


def damp(sigma: NDArray[Any]) -> Float32:
    """Return the share of the learning rate that an entry hit sigma times gets: 1 / max(1, sigma).

    Args:
        sigma: [k] integers.
    """
    return np.float32(1) / np.maximum(sigma, 1).astype(np.float32)


def hits(
    window: Sequence[NDArray[Any] | None],
    indices: Int64 | None,
    scratch: NDArray[Any],
) -> NDArray[np.int32]:
    """Count how many index sets of a window hold each entry: the per-entry staleness sigma.

    Costs O(length of the window * k). The scratch is walked in regions that stay in cache.

    Args:
        window: Ascending, unique positions [k] of any integer dtype; None is a dense update, which
            holds every entry.
        indices: [k] int64 entries asked for, ascending; None asks for all.
        scratch: [n] integers for a shard of n entries, all zero; all zero again afterwards.

    Returns:
        [k] (or [n]) int32.
    """
    sparse = [touched for touched in window if touched is not None]
    num_dense = len(window) - len(sparse)
    sigma = np.full(scratch.size if indices is None else indices.size, num_dense, np.int32)
    if indices is None:
        for touched in sparse:
            np.add.at(sigma, touched.astype(np.int64), np.int32(1))
        return sigma
    most = int(np.iinfo(scratch.dtype).max)
    for first in range(0, len(sparse), most):
        _add_hits(sparse[first : first + most], indices, scratch, sigma)
    return sigma


def _add_hits(
    window: Sequence[NDArray[Any]],
    indices: Int64,
    scratch: NDArray[Any],
    sigma: NDArray[np.int32],
) -> None:
    """Add to sigma [k] how many sets hold each entry; no more sets than scratch can count."""
    edges = np.arange(0, scratch.size + _REGION, _REGION)
    asked = indices.searchsorted(edges)
    stops = [touched.searchsorted(edges.astype(touched.dtype)) for touched in window]
    counter = scratch[:_REGION]
    one = scratch.dtype.type(1)
    for region, start in enumerate(edges[:-1].tolist()):
        mine = slice(asked[region], asked[region + 1])
        if mine.start == mine.stop:
            continue
        positions = [
            touched[stop[region] : stop[region + 1]].astype(np.int64) - start
            for touched, stop in zip(window, stops, strict=True)
        ]
        for touched in positions:
            counter[touched] += one
        sigma[mine] += counter.take(indices[mine] - start)
        for touched in positions:
            counter[touched] = 0

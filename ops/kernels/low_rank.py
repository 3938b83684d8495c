"""Matrices as products of two thin ones, in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ops.types import Float32

_TILE_ENTRIES = 1 << 15  # a tile of the product and its addend stay in cache
_LARGEST = np.float32(1e37)  # leaves room for sums and rounding below float32's 3.4e38


def entries(left: Float32, right: Float32, first: int, size: int) -> Float32:
    """Return some entries of ``left @ right.T``, counted row by row.

    Every entry is summed by itself and in one order, so that any cut of a matrix decodes to the
    very same bits on every machine; a product by BLAS does not promise that.

    Args:
        left: [rows, rank] float32, rank at least 1.
        right: [columns, rank] float32.
        first: First entry.
        size: How many.

    Returns:
        [size] float32; not finite where factors or sums are not.
    """
    rows, rank = left.shape
    across = np.ascontiguousarray(right.T)  # [rank, columns]
    product = np.empty((rows, across.shape[1]), np.float32)
    height = max(1, _TILE_ENTRIES // across.shape[1])
    addend = np.empty((min(height, rows), across.shape[1]), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for top in range(0, rows, height):
            tile, down = product[top : top + height], left[top : top + height]
            np.multiply(down[:, :1], across[0], out=tile)
            for number in range(1, rank):
                term = addend[: len(tile)]
                np.multiply(down[:, number, None], across[number], out=term)
                tile += term
    return product.reshape(-1)[first : first + size]


def power_step(matrix: Float32, right: Float32) -> tuple[Float32, Float32] | None:
    """Approximate M by one step of subspace iteration: P = orthonormal(M Q), then Q = M^T P.

    Args:
        matrix: M [rows, columns] float32, finite.
        right: Q [columns, rank] float32, rank at most rows; only what it spans matters.

    Returns:
        P [rows, rank] and the new Q [columns, rank], float32; None where they leave the range of
        float32.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1. Differences:
    Householder's QR instead of Gram-Schmidt; it is at ease with columns that depend on each other.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        image = matrix @ right
        if not np.isfinite(image).all():
            return None
        left = np.linalg.qr(image)[0].astype(np.float32, copy=False)
        following = matrix.T @ left
        if not (np.abs(following) < _LARGEST).all():
            return None
    return left, following


def directed(right: Float32, rng: np.random.Generator) -> Float32:
    """Return the columns with a largest magnitude of 1; columns of zeros are drawn anew.

    A column of zeros would give zeros for ever; the length of the others is without meaning and
    would sooner or later leave the range of float32.

    Args:
        right: [columns, rank] float32, finite.
        rng: Drawn from only where there is a column of zeros.
    """
    largest = np.abs(right).max(axis=0)
    empty = largest == 0
    largest[empty] = 1
    scaled: Float32 = right / largest
    if empty.any():
        scaled[:, empty] = rng.standard_normal((len(right), int(empty.sum())), np.float32)
    return scaled

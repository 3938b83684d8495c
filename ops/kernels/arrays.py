"""What codecs need of arrays besides selection and coding, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ops.types import Float32


def zeros(sizes: Sequence[int]) -> list[Float32]:
    """Return an array [n] of zeros for each size; side by side in memory."""
    return np.split(np.zeros(sum(sizes), np.float32), np.cumsum(sizes)[:-1])


def first_not_finite(tensors: Sequence[Float32]) -> int | None:
    """Return the number of the first of [n] float32 arrays with NaN or infinity; None: none."""
    from ops.wire import all_finite

    for number, tensor in enumerate(tensors):
        if not all_finite(tensor):
            return number
    return None


def joined(tensors: Sequence[Float32]) -> Float32:
    """Return [n] float32 arrays, one after the other, in a new array."""
    return np.concatenate([np.empty(0, np.float32), *tensors])


def norm(tensor: Float32) -> float:
    """Return the L2 norm of a finite [n] float32."""
    with np.errstate(over="ignore"):
        square = float(np.dot(tensor, tensor))
    if 1e-30 < square < math.inf:
        return math.sqrt(square)
    largest = float(np.max(np.abs(tensor), initial=0.0))  # squares leave the range of float32
    return largest * float(np.linalg.norm(tensor / np.float32(largest))) if largest else 0.0


def as_saved(state: Any) -> Any:
    """Return a state as plain data; its arrays are that already."""
    return state


def as_kept(saved: Any, fresh: Any) -> Any:
    """Return what `as_saved` gave as state again, its arrays where those of a fresh state are."""
    del fresh
    return saved

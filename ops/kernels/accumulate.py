"""Adding to a buffer that outlives the step, in pieces that stay in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ops.types import Float32

_PIECE = 1 << 16  # entries: target, addend and product of a piece stay in the second-level cache


def accumulate(target: Float32, addend: Float32, factor: float = 1.0, decay: float = 1.0) -> None:
    """Do ``target = decay * target + factor * addend`` in place, each product rounded.

    Args:
        target: [n] float32.
        addend: [n] float32.
        factor: Of the addend.
        decay: Of the target.
    """
    product = np.empty(min(_PIECE, target.size) if factor != 1 else 0, np.float32)
    for start in range(0, target.size, _PIECE):
        piece, more = target[start : start + _PIECE], addend[start : start + _PIECE]
        if decay != 1:
            piece *= np.float32(decay)
        if factor != 1:
            more = np.multiply(more, np.float32(factor), out=product[: more.size])
        piece += more

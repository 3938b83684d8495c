"""Weight decay and clipping of a worker's gradient, on the host or on a framework's device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels.numpy_ops import is_on_device
from thinwire.ops.kernels.numpy_select import accumulate

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


def decay(gradient: Any, weights: Float32, weight_decay: float) -> None:
    """Add `weight_decay` times the weights [n] to a gradient [n], in place (coupled decay).

    Args:
        gradient: [n] float32 array of numpy or on a device, as kernels return arrays.
        weights: [n] float32 weights.
        weight_decay: Coefficient; 0 leaves the gradient unchanged.
    """
    if not weight_decay:
        return
    if is_on_device(gradient):
        gradient += weights * np.float32(weight_decay)
    else:
        accumulate(gradient, np.asarray(weights), weight_decay)


def clip(gradient: Any, norm_limit: float) -> None:
    """Scale a gradient [n] in place to an L2 norm of at most `norm_limit`; 0 for no limit."""
    if not norm_limit:
        return
    if is_on_device(gradient):
        size = load_kernels(gradient.kernels).norm(gradient)
    else:
        size = float(np.sqrt(np.dot(gradient, gradient)))
    if size > norm_limit:
        gradient *= np.float32(norm_limit / size)

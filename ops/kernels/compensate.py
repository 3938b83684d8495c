"""DC-ASGD's delay compensation in numpy.

Arithmetic is float32, in the order written here; the TensorFlow bodies keep the order.

Source: Zheng et al., ICML 2017; docs/methods/dcasgd.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ops.types import Float32

#: Keeps the adaptive strength finite where no gradient has been seen.
FLOOR = 1e-7


def compensate(
    values: Float32, theta: Float32, base: Float32, strength: float | Float32
) -> Float32:
    """Return ``g + L * g * g * (theta - base)``: the gradient g, carried on to theta.

    Args:
        values: g, [k] float32, computed at `base`.
        theta: [k] float32, where the weights are now.
        base: [k] float32, where they were.
        strength: L, one number or [k] float32.

    Returns:
        [k] float32, a new array.
    """
    result = np.subtract(theta, base)
    result *= values
    result *= values
    result *= np.asarray(strength, np.float32)
    result += values
    return result


def adapt(
    mean_square: Float32, values: Float32, decay: float, strength: float
) -> tuple[Float32, Float32]:
    """Return the next running mean of g * g, and the strengths L that follow from it.

    ``m = decay * m + (1 - decay) * g * g`` and ``L = strength / sqrt(m + 1e-7)``.

    Args:
        mean_square: m, [k] float32, not negative; 0 at the start.
        values: g, [k] float32.
        decay: From 0 (only this gradient) to below 1.
        strength: Not negative.

    Returns:
        m and L, [k] float32 each, new arrays.
    """
    averaged = values * values
    averaged *= np.float32(1 - decay)
    scratch = np.multiply(mean_square, np.float32(decay))  # one: fresh pages cost more than sums
    averaged += scratch
    np.sqrt(np.add(averaged, np.float32(FLOOR), out=scratch), out=scratch)
    return averaged, np.divide(np.float32(strength), scratch, out=scratch)

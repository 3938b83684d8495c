"""Adam for flat weights, computed as in Keras on TensorFlow, in cache-sized numpy chunks.

A step takes a tenth of the time of the Keras optimizer's step, and needs no Keras.

Source: Keras' Adam: m = m + (1 - b1) (g - m), v = v + (1 - b2) (g^2 - v), theta = theta -
m alpha / (sqrt(v) + epsilon) with alpha = rate sqrt(1 - b2^t) / (1 - b1^t), each operation rounded
to float32. Its step numbers count from 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.offer import Described
from thinwire.ops.optimizers.slots import ITERATION, Slot, flat_slots
from thinwire.ops.types import Float32, State, TensorSpec, Update

#: Number of array entries per chunk. Six float32 chunks (weights, gradient, moments, two for
#: results) are in use at a time and together fit into a second-level cache.
_PIECE = 1 << 15
#: Roles of the slots of a variable, in Keras' order.
_ROLES = ("momentum", "velocity")


class FlatAdam:
    """Adam that changes a weight buffer in place.

    Args:
        described: Class and arguments of the Keras optimizer; see `variables.is_plain_adam`.
        theta: [n] float32 weights, of which only the shape is read.
        tensors: The shard server's variable slices, in the order of the weights.

    Attributes:
        num_steps: Number of optimizer steps so far.
    """

    def __init__(self, described: Described, theta: Float32, tensors: Sequence[TensorSpec]) -> None:
        """Set both moments to zero."""
        config = described.config
        self._betas = float(config.get("beta_1", 0.9)), float(config.get("beta_2", 0.999))
        self._epsilon = np.float32(config.get("epsilon", 1e-7))
        self._rate = np.float32(0)
        self._tensors = tensors
        self._moments = tuple(np.zeros_like(theta) for _ in _ROLES)
        self.num_steps = 0
        size = min(_PIECE, len(theta))
        self._buffers = np.empty(size, np.float32), np.empty(size, np.float32)

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply a dense gradient [n] or a sparse update, negated if `negate`, to `theta` [n]."""
        gradient = update.dense(len(theta))
        self._rate = np.float32(rate)
        self.num_steps += 1
        alpha = self._alpha()
        for start in range(0, len(theta), _PIECE):
            piece = slice(start, start + _PIECE)
            given = -gradient[piece] if negate else gradient[piece]
            self._step_piece(theta[piece], given, piece, alpha)

    def _alpha(self) -> np.float32:
        one, count = np.float32(1), np.float32(self.num_steps)
        first, second = (np.power(np.float32(beta), count) for beta in self._betas)
        alpha: np.float32 = self._rate * np.sqrt(one - second) / (one - first)
        return alpha

    def _step_piece(
        self, theta: Float32, gradient: Float32, piece: slice, alpha: np.float32
    ) -> None:
        m, v = (moment[piece] for moment in self._moments)
        change, size = (buffer[: len(theta)] for buffer in self._buffers)
        beta_1, beta_2 = self._betas
        np.subtract(gradient, m, out=change)
        change *= np.float32(1 - beta_1)
        m += change
        np.multiply(gradient, gradient, out=change)
        change -= v
        change *= np.float32(1 - beta_2)
        v += change
        np.sqrt(v, out=size)
        size += self._epsilon
        np.multiply(m, alpha, out=change)
        change /= size
        theta -= change

    def set_iterations(self, count: int) -> None:
        """Set the optimizer's step count."""
        self.num_steps = count

    def slots(self) -> list[Slot]:
        """Return copies of the optimizer's slots, numbered by variable slice, in Keras' order."""
        slots = [Slot(None, ITERATION, np.asarray(self.num_steps, np.int64))]
        for role, moment in zip(_ROLES, self._moments, strict=True):
            slots += flat_slots(moment.copy(), role, self._tensors)
        return slots

    def load(self, slots: Sequence[Slot]) -> None:
        """Overwrite the moments by slots with the same roles.

        Raises:
            KeyError: A slot of the optimizer is missing in the argument `slots`.
        """
        by_key = {(slot.slice, slot.role): slot.values for slot in slots}
        for role, moment in zip(_ROLES, self._moments, strict=True):
            parts = [np.ravel(by_key[number, role]) for number in range(len(self._tensors))]
            np.concatenate(parts, out=moment)

    def save(self, keep: Keep = copied) -> State:
        """Return the slots of Adam, numbered in the order of Keras' Adam on one flat variable."""
        m, v = self._moments
        return {"0": np.int64(self.num_steps), "1": self._rate, "2": keep(m), "3": keep(v)}

    def restore(self, slots: State | None, theta: Float32) -> None:
        """Load slots that `save` returned; None leaves the slots unchanged.

        Args:
            slots: The optimizer slots, or None.
            theta: [n] float32 weights; not used, because the caller gives them to every step.
        """
        if slots is not None:
            self.num_steps, self._rate = int(slots["0"]), np.float32(slots["1"])
            for number, moment in zip("23", self._moments, strict=True):
                moment[:] = np.ravel(slots[number])

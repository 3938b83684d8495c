"""The dynamic loss scale of a run, for mixed precision training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.slots import SCALE_STREAK, Slot
from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival

#: Upper bound of the loss scale. 2**120 is finite in float32, and gradients overflow at far smaller
#: scales.
_LARGEST = 2.0**120


class LossScaler:
    """Halves the loss scale after an overflow; doubles the scale after many updates without
    overflow.

    Source: `keras.optimizers.LossScaleOptimizer`. Differences: an overflow at an earlier scale does
    not halve the present scale. Only asynchronous workers can report an overflow that late.

    Attributes:
        scale: Factor by which workers multiply the loss for the next gradients; 0 if the training
            script does not scale losses.
    """

    def __init__(self, policy: LossScale | None) -> None:
        """Start with the settings' initial loss scale; None: the training script scales no
        losses.
        """
        self._policy = policy
        self.scale = policy.initial if policy else 0.0
        self._streak = policy.streak if policy else 0

    def skips(self, arrivals: Sequence[Arrival]) -> bool:
        """Count a merged round; return whether an overflow prevents the round's optimizer step."""
        if self._policy is None:
            return False
        overflowed = [arrival for arrival in arrivals if arrival.head.overflow]
        if not overflowed:
            self._streak += 1
            if self._streak >= self._policy.growth_steps:
                self.scale, self._streak = min(self.scale * 2, _LARGEST), 0
            return False
        # Several asynchronous workers may overflow at the same loss scale. The first report halves
        # the scale; later reports name the old scale and must not halve the scale again.
        if any(arrival.head.loss_scale == self.scale for arrival in overflowed):
            self.scale, self._streak = self.scale / 2, 0
        return True

    def slots(self) -> list[Slot]:
        """Return the variables of Keras's LossScaleOptimizer except its scale: the count of steps
        without overflow.
        """
        if self._policy is None:
            return []
        return [Slot(None, SCALE_STREAK, np.asarray(self._streak, np.int32))]

    def state_dict(self) -> State:
        """Return the loss scale and the count of steps without overflow, for a checkpoint."""
        return {"scale": self.scale, "streak": self._streak}

    def load_state_dict(self, state: State) -> None:
        """Restore the loss scale and the count of steps without overflow from a checkpoint."""
        self.scale, self._streak = state["scale"], state["streak"]

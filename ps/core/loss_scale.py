"""The dynamic loss scale of a run, which its shard 0 keeps for all workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers.slots import SCALE_STREAK, Slot
from thinwire.ops.types import State
from thinwire.ops.weighting.base import Arrival

#: The largest scale, far above what any gradient survives.
_LARGEST = 2.0**120


class LossScaler:
    """Halves the scale when gradients overflow, and doubles it after a streak of whole updates.

    Source: `keras.optimizers.LossScaleOptimizer`. Differences: an overflow at an earlier scale than
    the present one, which only asynchronous workers can report, halves nothing.

    Attributes:
        scale: The factor of the loss from now on; 0: none.
    """

    def __init__(self, policy: LossScale | None) -> None:
        """Begin with the script's scale; None: losses are not scaled."""
        self._policy = policy
        self.scale = policy.initial if policy else 0.0
        self._streak = policy.streak if policy else 0

    def skips(self, arrivals: Sequence[Arrival]) -> bool:
        """Count one release; return whether an overflow keeps it from being applied."""
        if self._policy is None:
            return False
        overflowed = [arrival for arrival in arrivals if arrival.overflow]
        if not overflowed:
            self._streak += 1
            if self._streak >= self._policy.growth_steps:
                self.scale, self._streak = min(self.scale * 2, _LARGEST), 0
            return False
        if any(arrival.loss_scale == self.scale for arrival in overflowed):
            self.scale, self._streak = self.scale / 2, 0
        return True

    def slots(self) -> list[Slot]:
        """Return what the script's LossScaleOptimizer would hold beside the scale."""
        if self._policy is None:
            return []
        return [Slot(None, SCALE_STREAK, np.asarray(self._streak, np.int32))]

    def state_dict(self) -> State:
        """Return the state, all of which outlives a restart."""
        return {"scale": self.scale, "streak": self._streak}

    def load_state_dict(self, state: State) -> None:
        """Take back what `state_dict` gave."""
        self.scale, self._streak = state["scale"], state["streak"]

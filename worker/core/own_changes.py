"""The model of a script that steps itself: the shards' model plus the worker's unsent changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.kernels.numpy_ops import aligned, all_finite

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class OwnChanges:
    """One worker's changes of the weights that the shards have not received yet.

    The script's model must include the unsent changes. Otherwise the script would compute a similar
    change at every step until the first change is sent, and the sum would be too large. With the
    unsent changes in its model, a single worker trains exactly as Keras without Thinwire, for any
    codec. The method is the error reset of Xie et al., "CSER: Communication-efficient SGD with
    Error Reset", NeurIPS 2020, at every step.

    Attributes:
        unsent: [n] float32 sum of the unsent changes of all steps.
        weights: [n] float32 weights before the next step: `base` + `unsent`.
        step_taken: [n] float32 weights before the newest step minus the weights after the step. The
            codec codes this array, which stays constant until the next step.
        is_ahead: True if the newest step is not coded yet.

    Args:
        base: [n] float32 model as received from the shards.
    """

    def __init__(self, base: Float32) -> None:
        self._base = base
        self.weights, self.step_taken, self.unsent = (aligned(len(base)) for _ in range(3))
        self.is_ahead = False

    def step(self, values: Float32, loss: float | None, statistics: Float32 | None = None) -> None:
        """Record a step of the script.

        Args:
            values: [n] weights after the step, which started at `weights`.
            loss: Loss of the step's mini-batch; None if unknown.
            statistics: [m] moving statistics after the step; None if they are not averaged.

        Raises:
            NonFiniteUpdate: A value is NaN or infinite. This object is unchanged.
        """
        finite = loss is None or bool(np.isfinite(loss))
        finite = finite and (statistics is None or all_finite(statistics))
        if not (finite and all_finite(values)):
            raise NonFiniteUpdate(
                "the weights after a step of the script's optimizer, or the loss, are NaN or "
                "infinite. Lower the optimizer's learning rate, or clip its gradients (clipnorm, "
                "global_clipnorm)."
            )
        np.subtract(self.weights, values, out=self.step_taken)
        self.unsent -= self.step_taken
        self.catch_up()
        self.is_ahead = True

    def catch_up(self) -> None:
        """Update `weights` after a change of the base or of `unsent`."""
        np.add(self._base, self.unsent, out=self.weights)

    def forget(self) -> None:
        """Drop the unsent changes, as the codec drops its residual."""
        self.unsent.fill(0.0)

"""Model of a script whose own optimizer steps: the shards' model plus unsent changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.kernels.numpy_ops import aligned, all_finite

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class OwnChanges:
    """Changes of weights that one worker has made and the shards have not received yet.

    The script's model must include the changes of weights that were not sent yet. Without the
    unsent changes, the script would compute a similar change at every step until the first change
    is sent, and the sum would be too large. With the unsent changes in its model, a single worker
    trains exactly as Keras without Thinwire, for any codec. Including unsent changes is the
    error reset of Xie et al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS
    2020, at every step.

    Attributes:
        unsent: [n] float32 sum of the changes of weights that no push has sent yet, over all steps.
        weights: [n] float32 weights before the next step: `base` + `unsent`.
        step_taken: [n] float32 weights before the newest step minus the weights after it, which the
            codec encodes. The array stays constant until the next step.
        is_ahead: True if the codec has not encoded the newest step yet.

    Args:
        base: [n] float32 weights of the model as received from the shards.
    """

    def __init__(self, base: Float32) -> None:
        self._base = base
        self.weights, self.step_taken, self.unsent = (aligned(len(base)) for _ in range(3))
        self.is_ahead = False

    def step(self, values: Float32, loss: float | None, statistics: Float32 | None = None) -> None:
        """Record a training step that the script's own optimizer has taken.

        Args:
            values: [n] weights after the step of the script's optimizer, which started at
                `weights`.
            loss: Mean loss of the mini-batch of the step; None if unknown.
            statistics: [m] moving statistics after the step; None if shard 0 does not average
                statistics.

        Raises:
            NonFiniteUpdate: A weight, the loss or a statistic is NaN or infinite. The recorded
                changes stay as before the step.
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
        """Set `weights` to `base` + `unsent` again after a change of `base` or of `unsent`."""
        np.add(self._base, self.unsent, out=self.weights)

    def forget(self) -> None:
        """Drop the unsent changes of weights when the codec drops its residual (unsent values)."""
        self.unsent.fill(0.0)

"""What a script that steps itself trains on: the shards' model with its own unsent changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.kernels.numpy_ops import aligned, all_finite

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class OwnChanges:
    """One worker's changes of the weights that the shards do not have yet.

    A script whose model lacks them repeats them at every step until they are sent, and what comes
    of it then is too much. So they stay in its model: the residual is what the others do not know
    yet, and one worker trains as Keras alone, whatever it sends. It is the error reset of Xie et
    al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020, at every step.

    Attributes:
        unsent: [n] float32, of all steps so far.
        weights: [n] float32 to begin the next step at: the base and what is unsent.
        step_taken: [n] float32 weights before the newest step minus those after it, which is what
            travels; it stays as it is until the next step.
        is_ahead: Whether that step is yet to be coded.

    Args:
        base: [n] float32 the model as received from the shards.
    """

    def __init__(self, base: Float32) -> None:
        self._base = base
        self.weights, self.step_taken, self.unsent = (aligned(len(base)) for _ in range(3))
        self.is_ahead = False

    def step(self, values: Float32, loss: float | None, statistics: Float32 | None = None) -> None:
        """Go on from a step of the script.

        Args:
            values: [n] the weights that it has made of `weights`.
            loss: Of its mini-batch; None: unknown.
            statistics: [m] the moving statistics after it, where they are averaged.

        Raises:
            NonFiniteUpdate: NaN or infinity; nothing has changed.
        """
        finite = loss is None or bool(np.isfinite(loss))
        finite = finite and (statistics is None or all_finite(statistics))
        if not (finite and all_finite(values)):
            raise NonFiniteUpdate(
                "a step of the script's optimizer made NaN or infinity, or the loss is; expected "
                "finite values. Lower its learning rate, or clip its gradients (clipnorm, "
                "global_clipnorm)."
            )
        np.subtract(self.weights, values, out=self.step_taken)
        self.unsent -= self.step_taken
        self.catch_up()
        self.is_ahead = True

    def catch_up(self) -> None:
        """Begin the next step at what the shards have sent since."""
        np.add(self._base, self.unsent, out=self.weights)

    def forget(self) -> None:
        """Drop what is unsent: the codec has, too."""
        self.unsent.fill(0.0)

"""A worker's local steps since its last exchange: the weights they lead to, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.optimizers.base import LocalStep
from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32, ModelSpec


class LocalRound:
    """The local optimizer, and the mini-batches of its steps since the last exchange.

    Attributes:
        num_steps: Mini-batches of this round.
        samples: Examples in them.
        batch_parts: Parts of the script's batches that they are.
        slots: The optimizer's state; empty without local steps.

    Args:
        optimizer: Of the local weights.
        base: [n] float32 the model as received from the shards; a
            `thinwire.ops.kernels.device.DeviceArray` if steps are of the device, like the others.
        start: [n] float32 where the local steps begin: the base, or ahead of it.
        weights: [n] float32 after the local steps; without local steps the base itself.
        spec: The shared model.
        kernels: Of where the gradients are.
    """

    def __init__(
        self,
        optimizer: LocalStep,
        base: Float32,
        start: Float32,
        weights: Float32,
        spec: ModelSpec,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._optimizer, self._base, self._start, self._weights = optimizer, base, start, weights
        self._moves = weights is not base
        self.slots: State = optimizer.init(len(base), spec) if self._moves else {}
        self.num_steps = self.samples = self.batch_parts = 0
        self._losses: list[float] = []
        self._saved_round: State | None = None
        self._saved_slots: State | None = None

    @property
    def loss(self) -> float | None:
        """The mean of the mini-batches' losses; None where none is known."""
        return float(np.mean(self._losses)) if self._losses else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to merge of these local steps: no example was in them."""
        return self._moves and not self.samples

    def step(self, values: Float32, learning_rate: float) -> None:
        """Take a step of the local optimizer on the local weights.

        Args:
            values: [n] float32 gradient; where the caller steps, the weights after its step.
            learning_rate: The scheduled one.

        Raises:
            NonFiniteUpdate: The values hold NaN or infinity.
        """
        # The codec sees it only after all local steps.
        if self._kernels.first_not_finite([values]) is not None:
            raise NonFiniteUpdate(
                "a local step holds NaN or infinity; expected finite values. Lower the learning "
                "rate, or clip gradients (--clip_norm, or clipnorm of a script's optimizer)."
            )
        self.slots = self._optimizer.step(
            self._weights, values, learning_rate, self.slots, self._base
        )

    def record(self, samples: int, loss: float | None, batch_parts: int = 0) -> None:
        """Count a mini-batch; the loss of no example is no loss."""
        self.num_steps += 1
        self.samples += samples
        self.batch_parts += batch_parts
        if samples and loss is not None:
            self._losses.append(loss)

    def restart(self) -> None:
        """Begin the next round at its start."""
        if self._moves:
            self._weights[:] = self._start
            self.slots = self._optimizer.restart(self._weights, self.slots)
        self.num_steps = self.samples = self.batch_parts = 0
        self._losses = []

    def pack(self) -> Float32:
        """Return the part of the optimizer's state that is averaged over the workers."""
        return self._optimizer.pack(self.slots)

    def unpack(self, means: Float32) -> None:
        """Adopt the averages of that part."""
        self.slots = self._optimizer.unpack(means, self.slots)

    def forget(self) -> None:
        """Reset the state that the optimizer accumulated from gradients."""
        self.slots = self._optimizer.forget(self._weights, self.slots)

    def save(self, versions: Sequence[int], statistics: Float32) -> State:
        """Return the state that survives this process, with the steps not yet pushed.

        Args:
            versions: Of the shards' model, at which the round began.
            statistics: [m] float32 moving statistics after the last step.
        """
        slots = self._optimizer.save(self.slots) if self.slots else {}
        if not self.num_steps:
            return {"round": None, "slots": slots}
        steps = {
            "weights": np.array(self._weights),
            "statistics": statistics.copy(),
            "versions": list(versions),
            "local_steps": self.num_steps,
            "samples": self.samples,
            "batch_parts": self.batch_parts,
            "losses": list(self._losses),
        }
        return {"round": steps, "slots": slots}

    def restore(self, state: State, fits: bool) -> None:
        """Keep what `save` returned for `resume`; the steps only if they `fit` the shards."""
        self._saved_slots = state["slots"]
        if fits:
            self._saved_round = state["round"]

    def resume(self, versions: Sequence[int]) -> Float32 | None:
        """Continue from the restored state, with the steps if they began at these versions.

        Returns:
            The moving statistics after these steps; None if there are none.
        """
        saved, self._saved_round = self._saved_round, None
        slots, self._saved_slots = self._saved_slots, None
        fits = saved is not None and saved["versions"] == versions
        if saved is not None and fits:
            self._weights[:] = saved["weights"]
            self.num_steps, self.samples = saved["local_steps"], saved["samples"]
            self.batch_parts = saved.get("batch_parts", 0)  # an earlier version has none
            self._losses = list(saved["losses"])
        if slots and (fits or self._optimizer.outlives_rounds):
            self.slots = self._optimizer.restore(slots, self._weights, self.slots)
        return saved["statistics"] if saved is not None and fits else None

"""A worker's local steps since its last exchange: the local weights, and the step counts."""

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
    """A worker's local optimizer, and counts of its mini-batches since the last exchange.

    Attributes:
        num_steps: Number of mini-batches in the present round of local steps.
        samples: Number of examples in all mini-batches since the last exchange.
        batch_parts: Number of parts of the script's batches since the last exchange. Each batch of
            the script has nb_workers parts, one per worker.
        slots: State arrays of the local optimizer; empty if the worker takes no local steps.

    Args:
        optimizer: Optimizer that updates the worker's local weights between two exchanges.
        base: [n] float32 model as received from the shards. `base`, `start` and `weights` are
            `thinwire.ops.kernels.device.DeviceArray` if steps are computed on the device.
        start: [n] float32 weights before the first local step: `base`, or `base` plus a part of the
            residual (unsent changes).
        weights: [n] float32 weights after the local steps. If the training method has no local
            steps, the same array as `base`.
        spec: Paths, shapes and dtypes of the shared model's variables.
        kernels: Set of array functions (`thinwire.ops.kernels`) for the host or the device that
            holds the gradients.
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
        """Mean loss of the round's mini-batches; None if no loss is known."""
        return float(np.mean(self._losses)) if self._losses else None

    @property
    def is_empty(self) -> bool:
        """True if the round's local steps had no example, so that there is no change to push."""
        return self._moves and not self.samples

    def step(self, values: Float32, learning_rate: float) -> None:
        """Take one step of the worker's local optimizer, which changes the local weights.

        Args:
            values: [n] float32 gradient. If a script's own optimizer updates the weights, the
                weights after its step.
            learning_rate: Learning rate of the run's schedule for this local step.

        Raises:
            NonFiniteUpdate: The array `values` holds NaN or infinity.
        """
        # Check the array `values` before the local step. The codec checks only the sum of all local
        # steps. By then, the weights and the optimizer's slots would hold NaN and could not be
        # restored.
        if self._kernels.first_not_finite([values]) is not None:
            raise NonFiniteUpdate(
                "the values of a local step hold NaN or infinity. Lower the learning "
                "rate, or clip gradients (--clip_norm, or clipnorm of a script's optimizer)."
            )
        self.slots = self._optimizer.step(
            self._weights, values, learning_rate, self.slots, self._base
        )

    def record(self, samples: int, loss: float | None, batch_parts: int = 0) -> None:
        """Count a mini-batch. `record` ignores the loss of a mini-batch without examples."""
        self.num_steps += 1
        self.samples += samples
        self.batch_parts += batch_parts
        if samples and loss is not None:
            self._losses.append(loss)

    def restart(self) -> None:
        """Start the next round of local steps: reset the local weights and all counts."""
        if self._moves:
            self._weights[:] = self._start
            self.slots = self._optimizer.restart(self._weights, self.slots)
        self.num_steps = self.samples = self.batch_parts = 0
        self._losses = []

    def pack(self) -> Float32:
        """Return the local optimizer's values that shard 0 averages over the workers."""
        return self._optimizer.pack(self.slots)

    def unpack(self, means: Float32) -> None:
        """Replace the local optimizer's values, as from `pack`, by their means over the workers."""
        self.slots = self._optimizer.unpack(means, self.slots)

    def forget(self) -> None:
        """Reset the slots of the local optimizer, in which gradients have accumulated."""
        self.slots = self._optimizer.forget(self._weights, self.slots)

    def save(self, versions: Sequence[int], statistics: Float32) -> State:
        """Return the state of the round, including the local steps that no push has sent yet.

        Args:
            versions: For each shard, the version of the shard's model at the start of the round of
                local steps.
            statistics: [m] float32 moving statistics after the last local step.
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
        """Store a state of local steps from `save`, for a later call of `resume`.

        Args:
            state: State of the round of local steps that `save` returned in an earlier process of
                this worker.
            fits: True if the shards applied exactly the pushes up to the step at which the state
                was saved. If False, the saved local steps are dropped.
        """
        self._saved_slots = state["slots"]
        if fits:
            self._saved_round = state["round"]

    def resume(self, versions: Sequence[int]) -> Float32 | None:
        """Continue the round of local steps from the state that `restore` has stored.

        The saved local steps are used only if they started at the shards' present versions. If the
        shards have newer versions, the saved local steps would be applied to weights that other
        workers have changed.

        Args:
            versions: For each shard, the present version of the shard's model.

        Returns:
            [m] float32 moving statistics after the restored steps; None if no steps are restored.
        """
        saved, self._saved_round = self._saved_round, None
        slots, self._saved_slots = self._saved_slots, None
        fits = saved is not None and saved["versions"] == versions
        if saved is not None and fits:
            self._weights[:] = saved["weights"]
            self.num_steps, self.samples = saved["local_steps"], saved["samples"]
            self.batch_parts = saved["batch_parts"]
            self._losses = list(saved["losses"])
        if slots and (fits or self._optimizer.outlives_rounds):
            self.slots = self._optimizer.restore(slots, self._weights, self.slots)
        return saved["statistics"] if saved is not None and fits else None

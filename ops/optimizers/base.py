"""Interfaces of optimizers: for a merged update on the PS, and for a mini-batch on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.types import Kind, Policy, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64, ModelSpec


class ServerUpdate(Policy, Protocol):
    """The PS's optimizer policy: applies merged updates of workers to a shard's weights."""

    @property
    def optimizer(self) -> str:
        """The value of --server_optimizer that selects this policy."""

    @property
    def described(self) -> Described:
        """Class and arguments of the Keras optimizer that does the steps.

        Raises:
            ConfigurationError: No worker has sent the script's optimizer yet, or no Keras class
                does the same steps.
        """

    @property
    def momentum(self) -> float:
        """Momentum of the optimizer; 0 means no momentum."""
        return 0.0

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay of the optimizer; 0 means no decay."""
        return 0.0

    @property
    def keeps_sparse(self) -> bool:
        """True if a sparse update changes only the entries that the update names."""
        return False

    @property
    def awaits_offer(self) -> bool:
        """True if this is a placeholder until a worker offers the script's optimizer."""
        return False

    @property
    def needs_whole_variables(self) -> bool:
        """True if the placement must not cut a variable into parts on several shards."""
        return False

    @property
    def needs_one_shard(self) -> bool:
        """True if a step depends on all variables of the model together."""
        return False

    @property
    def needs_dense(self) -> bool:
        """True if the optimizer divides by zero when workers send only a part of a gradient."""
        return False

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers in this policy; each optimizer steps different variables."""
        return 1

    def adds(self, kind: Kind) -> bool:
        """Return True if an update of kind `kind` is added to the weights, times a rate."""

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return the factor f if `apply` only computes ``theta -= f * update``.

        Args:
            kind: Kind of the update: a gradient, or a change of weights by local steps.
            rate: Learning rate, as passed to `apply`.

        Returns:
            The factor f, the same for every weight. None if the step does more than subtract the
            scaled update.
        """

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard's flat weights.

        Args:
            theta: [n] float32, the shard's weights.
            spec: Path and shape of each slice of the shard; a slice that is a part of a variable
                is flat. None means that all weights are one flat slice.
        """

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return a copy of this policy with optimizers that start with the given slots.

        This is used for a script's optimizers that took steps before the run.

        Args:
            slots: For each optimizer, its slots. A slot's slice number counts the shard's slices of
                that optimizer's variables.
        """

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate of the next update.

        Args:
            scheduled: Learning rate of the run's schedule (--lr_schedule).
            batches: Number of the script's batches that the optimizer's schedule has counted.
            state: The optimizer's state from `init`.
            number: Index of the optimizer, for a script with several optimizers.
        """

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the step at which the script's learning rate schedule is evaluated.

        Args:
            batches: Number of the script's batches that the optimizer's schedule has counted.
            state: The optimizer's state from `init`.
            number: Index of the optimizer, for a script with several optimizers.
        """

    def outer_rate(self, fraction: float) -> float:
        """Return the outer rate when `fraction` (0..1) of the run's budget is spent."""

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Use the learning rate `rate`, which a script has set, for all later steps."""

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply an update to the weights `theta` in place: one optimizer step.

        Args:
            theta: [n] float32, the shard's weights.
            update: The merged update: a weighted mean of the workers' updates.
            kind: Kind of the update: a gradient, or a change of weights by local steps.
            rate: Return value of `rate` for a gradient, of `outer_rate` for a change of weights.
            kernels: Kernels that apply an update.
            state: The optimizer's state from `init`.
            number: Index of the optimizer, for a script with several optimizers.

        Returns:
            The indices of the weights that changed (None if all weights may have changed), and the
            new state.
        """

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of each of a script's optimizers; [] without a script."""

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the optimizer's state as plain data.

        Args:
            state: The optimizer's state from `init`.
            keep: Function that copies a large array, or returns a placeholder for the array.
        """

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the state's arrays that a step changes in place and `save` gives to `keep`."""

    def set_weights(self, theta: Float32, state: State) -> None:
        """Continue from weights `theta` [n] that other code has set; keep the optimizer's slots."""

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned; the shard's weights are `theta` [n]."""


class LocalStep(Policy, Protocol):
    """The policy for a worker's local optimizer steps between two pushes."""

    @property
    def optimizer(self) -> str:
        """The value of --local_optimizer that selects this policy."""

    @property
    def brings_weights(self) -> bool:
        """True if the worker's script does the steps and submits weights instead of gradients."""

    @property
    def prox_mu(self) -> float:
        """FedProx's mu: mu (w - b) is added to each gradient of a round that began at b; 0: off."""

    @property
    def outlives_rounds(self) -> bool:
        """True if this worker's optimizer slots are kept from round to round."""

    def num_averaged(self, num_parameters: int) -> int:
        """Return the number of optimizer slot values that the worker sends with each push."""

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's slots for zero weights; `restart` loads the weights of a round.

        Args:
            num_parameters: Number of weights of the shared model.
            spec: Paths and shapes of the shared variables. None: all weights are one flat variable.
        """

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Do one local optimizer step: change the worker's `weights` [n] in place.

        Args:
            weights: [n] float32, the worker's weights.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights`.
            scheduled_rate: Learning rate of the run's schedule.
            state: The optimizer's slots.
            base: [n] float32, the weights at the start of the round.
        """

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the gradient [n] to push for one mini-batch, and the learning rate for it.

        Args:
            base: [n] float32, the weights before the mini-batch.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights`.
            rate: Learning rate of the run's schedule.
        """

    def restart(self, weights: Float32, state: State) -> State:
        """Begin a round of local steps at `weights` [n]."""

    def forget(self, weights: Float32, state: State) -> State:
        """Reset the optimizer's slots, which depend on gradients; continue at `weights` [n]."""

    def pack(self, state: State) -> Float32:
        """Return a copy of the slot values that the PS averages over workers: [num_averaged]."""

    def unpack(self, averaged: Float32, state: State) -> State:
        """Replace this worker's optimizer slots by averages over all workers, [num_averaged]."""

    def save(self, state: State) -> State:
        """Return copies of the optimizer's slots as plain data."""

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Load slots that `save` returned; the weights are `weights` [n]."""

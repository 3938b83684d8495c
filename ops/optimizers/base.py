"""Interfaces of optimizers: for a released update on the PS, and for a mini-batch on a worker."""

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
    """The PS's optimizer policy: it applies released updates to a shard's weights.

    By default an optimizer has neither momentum nor weight decay, and no special needs.
    """

    @property
    def optimizer(self) -> str:
        """The value of --server_optimizer that selects this policy."""

    @property
    def described(self) -> Described:
        """Class and arguments of the Keras optimizer.

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
        """Return True if an update of this kind is added to the weights, times a rate."""

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return the factor f if `apply` computes just ``theta -= f * update``.

        Args:
            kind: Kind of the update: gradient, or change of weights.
            rate: Learning rate, as passed to `apply`.

        Returns:
            The factor, the same for every entry. None if the step does more than subtract the
            scaled update.
        """

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard's flat weights.

        Args:
            theta: [n] float32, the shard's weights.
            spec: Path and shape of each slice of the shard; a slice that is a part of a variable
                is flat. None means one slice.
        """

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return a copy of this policy whose optimizers start with the given slots.

        Used for a script's optimizers that took steps before the run.

        Args:
            slots: The slots of each optimizer. A slot's slice number counts the shard's slices of
                that optimizer's variables.
        """

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate of the next update.

        Args:
            scheduled: Learning rate of the run's schedule (--lr_schedule).
            batches: Number of the script's batches that the optimizer's schedule has counted.
            state: The state from `init`.
            number: Index of the optimizer, if a script has several.
        """

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the step at which the script's learning rate schedule is evaluated.

        Args:
            batches: Number of the script's batches that the optimizer's schedule has counted.
            state: The state from `init`.
            number: Index of the optimizer, if a script has several.
        """

    def outer_rate(self, fraction: float) -> float:
        """Return the rate for changes of weights when `fraction` (0..1) of the budget is spent."""

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Use a rate that a script has set, for all further steps."""

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
        """Step the weights `theta` in place.

        Args:
            theta: [n] float32, the shard's weights.
            update: The released update: a weighted mean of the workers' updates.
            kind: Kind of the update: gradient, or change of weights.
            rate: Return value of `rate` for a gradient, of `outer_rate` for a change of weights.
            kernels: Kernels that apply an update.
            state: The state from `init`.
            number: Index of the optimizer, if a script has several.

        Returns:
            The indices of the entries that changed (None if all entries may have changed), and the
            new state.
        """

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of each script optimizer; an empty list without a script."""

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the state as plain data.

        Args:
            state: The state from `init`.
            keep: Function that copies a large array, or returns a placeholder for the array.
        """

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the arrays that a step changes in place and that `save` passes to `keep`."""

    def set_weights(self, theta: Float32, state: State) -> None:
        """Continue from weights `theta` [n] that other code has changed; the slots stay."""

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load a state that `save` returned; the weights are `theta` [n]."""


class LocalStep(Policy, Protocol):
    """The policy for a worker's local steps between two exchanges."""

    @property
    def optimizer(self) -> str:
        """The value of --local_optimizer that selects this policy."""

    @property
    def brings_weights(self) -> bool:
        """True if the caller does the steps and submits weights instead of gradients."""

    @property
    def prox_mu(self) -> float:
        """FedProx's mu; mu (w - b) is added to each gradient of a round from b. 0 means off."""

    @property
    def outlives_rounds(self) -> bool:
        """True if the slots stay on this worker from round to round."""

    def num_averaged(self, num_parameters: int) -> int:
        """Return the number of slot values that the worker sends with each push."""

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the slots at zero weights; `restart` loads the weights of a round.

        Args:
            num_parameters: Number of entries of the shared model.
            spec: Paths and shapes of the shared variables. None means one flat variable.
        """

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Do one local step: change `weights` [n] in place.

        Args:
            weights: [n] float32, the worker's weights.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights`.
            scheduled_rate: Learning rate of the run's schedule.
            state: The slots.
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
        """Begin a round at `weights` [n]."""

    def forget(self, weights: Float32, state: State) -> State:
        """Clear everything that the slots accumulated from gradients; continue at `weights` [n]."""

    def pack(self, state: State) -> Float32:
        """Return a copy of the slot values that the PS averages: [num_averaged] float32."""

    def unpack(self, averaged: Float32, state: State) -> State:
        """Replace this worker's slots by averages [num_averaged]."""

    def save(self, state: State) -> State:
        """Return copies of the slots as plain data."""

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Load slots that `save` returned; the weights are `weights` [n]."""

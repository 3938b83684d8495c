"""Interfaces of optimizers on the parameter server, and of optimizers for workers' local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.policy import Policy
from thinwire.ops.types import Kind, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64, ModelSpec


class ServerUpdate(Policy, Protocol):
    """Optimizer policy of the parameter server: applies merged updates to a shard's weights."""

    @property
    def optimizer(self) -> str:
        """Value of the flag --server_optimizer that selects the optimizer policy."""

    @property
    def described(self) -> Described:
        """Class and arguments of the Keras optimizer that does the steps of the optimizer policy.

        Raises:
            ConfigurationError: No worker has sent the script's optimizer yet, or no Keras optimizer
                does the policy's steps.
        """

    @property
    def momentum(self) -> float:
        """Momentum coefficient of the optimizer; 0 means no momentum."""
        return 0.0

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay of the optimizer; 0 means no decay."""
        return 0.0

    @property
    def keeps_sparse(self) -> bool:
        """True if a sparse update changes only weights for which the update has a value."""
        return False

    @property
    def awaits_offer(self) -> bool:
        """True for the placeholder policy in use until a worker sends the script's optimizer."""
        return False

    @property
    def needs_whole_variables(self) -> bool:
        """True if no variable may be divided among several shard servers."""
        return False

    @property
    def needs_one_shard(self) -> bool:
        """True if an optimizer step depends on all variables of the model together."""
        return False

    @property
    def needs_dense(self) -> bool:
        """True if the optimizer would divide by zero when workers send sparse gradients."""
        return False

    @property
    def num_optimizers(self) -> int:
        """Number of a script's optimizers in the policy, each for different variables."""
        return 1

    def adds(self, kind: Kind) -> bool:
        """Return True if the optimizer only adds updates of a kind, times a rate, to weights."""

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return the factor f if `apply` only computes ``theta -= f * update``, else None.

        Args:
            kind: Kind of the workers' update: a gradient, or a change of weights by local steps.
            rate: Learning rate of the optimizer step, as passed to `apply`.

        Returns:
            The factor f, the same for every weight. None if the step does more than subtract the
            scaled update.
        """

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's initial state for the shard server's flat weights.

        Args:
            theta: [n] float32, the shard server's weights.
            spec: Path and shape of each variable slice of the shard server; a slice that is a part
                of a variable is flat. None means that all weights are one flat slice.
        """

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return a copy of the policy whose optimizers start with the given optimizer slots.

        `starting_at` is for a script's optimizers that did steps before the run started.

        Args:
            slots: Optimizer slots of each optimizer. The slice number of an optimizer slot counts
                the shard server's slices of that optimizer's variables.
        """

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate of the server optimizer's next step.

        Args:
            scheduled: Learning rate of the run's schedule (--lr_schedule).
            batches: Number of the script's mini-batches that the optimizer's schedule has counted.
            state: The server optimizer's state from `init`.
            number: Index of the optimizer among the script's optimizers.
        """

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the argument (batches or steps) of the script's learning rate schedule.

        Args:
            batches: Number of the script's mini-batches that the optimizer's schedule has counted.
            state: The server optimizer's state from `init`.
            number: Index of the optimizer among the script's optimizers.
        """

    def outer_rate(self, fraction: float) -> float:
        """Return the factor on changes of weights at `fraction` (0..1) of the run's budget."""

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Use a learning rate that a script has set for all later steps of the optimizer."""

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
        """Apply a merged update to the weights `theta` in place: one optimizer step.

        Args:
            theta: [n] float32, the shard server's weights.
            update: The merged update: a weighted mean of the workers' updates.
            kind: Kind of the workers' update: a gradient, or a change of weights by local steps.
            rate: Factor on the update: the result of the method `rate` for a gradient, of
                `outer_rate` for a change of weights.
            kernels: Kernels (array functions) that apply an update to the weights.
            state: The server optimizer's state from `init`.
            number: Index of the optimizer among the script's optimizers.

        Returns:
            The indices of the weights that changed (None if all weights may have changed), and the
            new state.
        """

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of a script's optimizers; [] if flags set the optimizer."""

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the server optimizer's state as plain data.

        Args:
            state: The server optimizer's state from `init`.
            keep: Function that copies a large array of optimizer slots, or returns a snapshot of
                the array.
        """

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the state arrays that a step changes, and that `save` passes to `keep`."""

    def set_weights(self, theta: Float32, state: State) -> None:
        """Step from weights `theta` [n] that other code has set; do not change optimizer slots."""

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned, and the weights `theta` [n]."""


class LocalStep(Policy, Protocol):
    """Policy of a worker's local optimizer steps between two pushes."""

    @property
    def optimizer(self) -> str:
        """Value of the flag --local_optimizer that selects the policy of local steps."""

    @property
    def brings_weights(self) -> bool:
        """True if the worker's script does the local steps and submits weights, not gradients."""

    @property
    def prox_mu(self) -> float:
        """Coefficient mu of FedProx's proximal term, which is added to each gradient; 0: none."""

    @property
    def outlives_rounds(self) -> bool:
        """True if a worker's optimizer slots are kept from one round of local steps to the next."""

    def num_averaged(self, num_parameters: int) -> int:
        """Return the number of optimizer slot values in each push, for averaging over workers."""

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the local optimizer's initial slots; `restart` sets the weights of a round.

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
                `brings_weights` is True.
            scheduled_rate: Learning rate of the run's schedule (--lr_schedule).
            state: The local optimizer's slots (momentum and others).
            base: [n] float32, the weights at the start of the round of local steps.
        """

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the gradient [n] to push for a mini-batch, and the gradient's learning rate.

        Args:
            base: [n] float32, the weights before the mini-batch.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights` is True.
            rate: Learning rate of the run's schedule (--lr_schedule).
        """

    def restart(self, weights: Float32, state: State) -> State:
        """Prepare the local optimizer for a round of local steps from `weights` [n]."""

    def forget(self, weights: Float32, state: State) -> State:
        """Reset the local optimizer's slots to their initial values; continue at `weights` [n]."""

    def pack(self, state: State) -> Float32:
        """Return a copy of the optimizer slot values that the PS averages: [num_averaged]."""

    def unpack(self, averaged: Float32, state: State) -> State:
        """Replace the worker's optimizer slots by averages [num_averaged] over all workers."""

    def save(self, state: State) -> State:
        """Return copies of the local optimizer's slots as plain data."""

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Load local optimizer slots that `save` returned, for a worker with `weights` [n]."""

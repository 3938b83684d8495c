"""The interfaces of steps: a released update on the PS, a mini-batch on a worker."""

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
    """How the PS steps."""

    @property
    def optimizer(self) -> str:
        """Its value of --server_optimizer."""

    @property
    def described(self) -> Described:
        """The Keras optimizer; raises ConfigurationError where it has not come yet."""

    @property
    def momentum(self) -> float:
        """Of the optimizer; 0: none."""

    @property
    def weight_decay(self) -> float:
        """Decoupled; 0: none."""

    @property
    def keeps_sparse(self) -> bool:
        """Whether a sparse update changes only its own entries."""

    @property
    def awaits_offer(self) -> bool:
        """Whether it stands for the optimizer of a script that has not come yet."""

    @property
    def needs_whole_variables(self) -> bool:
        """Whether no shard may hold a part of a variable."""

    @property
    def needs_one_shard(self) -> bool:
        """Whether a step depends on all variables of the model together."""

    @property
    def needs_dense(self) -> bool:
        """Whether gradients of which only a part is sent make it divide by zero."""

    @property
    def num_optimizers(self) -> int:
        """How many optimizers it is, each with variables of its own."""

    def adds(self, kind: Kind) -> bool:
        """Return whether updates of this kind are simply added."""

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return what `apply` multiplies an update by, if all it does then is to subtract it.

        Args:
            kind: What its values mean.
            rate: As `apply` takes it.

        Returns:
            The factor, the same for every entry; None: the step is another one.
        """

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the state for the shard's flat weights.

        Args:
            theta: [n] float32.
            spec: What they are, slice by slice: path and shape, flat where a slice is a part of a
                variable; not given: one slice.
        """

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return this for a script's optimizers that have moved before.

        Args:
            slots: Of each, by slice of what the shard holds of its variables.
        """

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate of the next update.

        Args:
            scheduled: By the run's own schedule.
            batches: The script's batches that this optimizer's schedule has counted before.
            state: From `init`.
            number: Number of the optimizer, where a script has several.
        """

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the count that a schedule of the script is read at.

        Args:
            batches: As `rate` takes them.
            state: From `init`.
            number: Number of the optimizer, where a script has several.
        """

    def outer_rate(self, fraction: float) -> float:
        """Return the rate of changes of weights when `fraction` (0..1) of the budget is spent."""

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Step with this rate from now on: a script has set it."""

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
        """Step `theta` in place.

        Args:
            theta: [n] float32.
            update: The released, weighted mean.
            kind: What its values mean.
            rate: What `rate` has returned, of gradients; `outer_rate`, of changes of weights.
            kernels: That apply it.
            state: From `init`.
            number: Number of the optimizer, where a script has several.

        Returns:
            The entries that changed (None: all), and the state.
        """

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of what each of a script's own optimizers would hold; none: no script."""

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the state as plain data; `keep` makes what stands for a large array."""

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the arrays of which `save` keeps something, and which a step changes."""

    def set_weights(self, theta: Float32, state: State) -> None:
        """Go on from weights `theta` [n] that something else has changed; the slots stay."""

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load what `save` returned; the weights are `theta`."""


class LocalStep(Policy, Protocol):
    """How a worker's own weights change between two exchanges."""

    @property
    def optimizer(self) -> str:
        """Its value of --local_optimizer."""

    @property
    def brings_weights(self) -> bool:
        """Whether the caller steps, and submits weights in the place of gradients."""

    @property
    def prox_mu(self) -> float:
        """The mu of FedProx, which adds mu (w - b) to gradients of a round from b; 0: nothing."""

    @property
    def outlives_rounds(self) -> bool:
        """Whether the slots are this worker's own from round to round."""

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many values of the slots travel with each push."""

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the slots at zero weights; `restart` brings the right ones.

        Args:
            num_parameters: Of the shared model.
            spec: Their paths and shapes; not given: one flat variable.
        """

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Step `weights` [n] in place by what a mini-batch brought [n].

        Args:
            weights: [n] float32.
            values: [n] float32.
            scheduled_rate: The learning rate.
            state: The slots.
            base: [n] float32 the weights that the round began at.
        """

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the gradient [n] that a mini-batch brought, and the learning rate it goes with.

        Args:
            base: [n] float32 the weights before it.
            values: [n] float32 what it brought.
            rate: The scheduled one.
        """

    def restart(self, weights: Float32, state: State) -> State:
        """Begin a round at `weights` [n]."""

    def forget(self, weights: Float32, state: State) -> State:
        """Clear what the slots accumulated from gradients."""

    def pack(self, state: State) -> Float32:
        """Return what is averaged: [num_averaged] float32, a copy."""

    def unpack(self, averaged: Float32, state: State) -> State:
        """Take over averages [num_averaged] as this worker's slots."""

    def save(self, state: State) -> State:
        """Return the slots as plain data; copies."""

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Take back what `save` gave, at `weights` [n]."""


class FlatOptimizer(Protocol):
    """An optimizer with slots on a flat buffer of weights [n] float32."""

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply one gradient [n] or sparse update to `theta`, or its opposite."""

    def save(self, keep: Keep = copied) -> State:
        """Return the slots as plain data; `keep` makes what stands for a large array."""

    def changing(self) -> Sequence[Any]:
        """Return the arrays of which `save` keeps something, and which a step changes."""

    def set_weights(self, theta: Float32) -> None:
        """Go on from weights that something else has changed; the slots stay."""

    def restore(self, slots: State, theta: Float32) -> None:
        """Load what `save` returned; the weights are `theta`."""

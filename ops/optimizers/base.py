"""The interface of server updates: a released update becomes new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import Kind, Policy, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64


class ServerUpdate(Policy, Protocol):
    """How the PS steps."""

    @property
    def optimizer(self) -> str:
        """Its value of --server_optimizer."""

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
    def feeds_deltas(self) -> bool:
        """Whether changes of weights are given to an optimizer instead of being added."""

    def adds(self, kind: Kind) -> bool:
        """Return whether updates of this kind are simply added."""

    def init(self, theta: Float32) -> State:
        """Return the state for the shard's flat weights [n] float32."""

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
    ) -> tuple[Int64 | None, State]:
        """Step `theta` in place.

        Args:
            theta: [n] float32.
            update: The released, weighted mean.
            kind: What its values mean.
            rate: Scheduled learning rate, used for gradients.
            kernels: That apply it.
            state: From `init`.

        Returns:
            The entries that changed (None: all), and the state.
        """


class FlatOptimizer(Protocol):
    """An optimizer with slots on a flat buffer of weights [n] float32."""

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply one gradient [n] or sparse update to `theta`, or its opposite."""

    def save(self) -> State:
        """Return copies of the slots, as plain data."""

    def restore(self, slots: State, theta: Float32) -> None:
        """Load what `save` returned; the weights are `theta`."""

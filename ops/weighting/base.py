"""The interface of weightings, which scale stale updates.

A weighting gets the workers' updates that a shard merges in one release. With each update comes the
version of the weights at which the update was computed. The weighting returns the scaled updates.
The state of a weighting is plain data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import Block, Policy, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.ops.wire.blocks import WireBlock


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One worker's update at the moment when the shard merges it with other workers' updates."""

    worker: int
    update: Update
    base_version: int  # version of the shard's weights that the worker had when it pushed
    step: int = 0  # step number of the push; 0: unknown
    lag: int = 0  # base_version minus the version at which the update was computed
    samples: int = 0  # number of training examples behind the update; 0: unknown
    learning_rate: float | None = None  # learning rate set by the user's script; None: not set
    loss_scale: float = 0.0  # factor on the loss when the update was computed; 0: no factor
    overflow: bool = False  # True if the gradient overflowed at `loss_scale`: the update is empty
    optimizer: int = 0  # number of the script's optimizer that applies the update
    batch_parts: int = 0  # consumed parts of the script's batches; nb_workers parts are one batch
    change: Update | None = None  # weight changes that the user's script made itself; None: none
    blocks: tuple[Block | WireBlock, ...] | None = None  # coded update; None: must not be relayed

    @property
    def computed_at(self) -> int:
        """Version of the shard's weights at which the worker computed the update."""
        return self.base_version - self.lag


@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """The shard's data that a weighting may use when the shard merges updates."""

    version: int  # T: number of updates that the shard has applied so far
    oldest_base: int  # oldest version of the weights from which a live worker may still push
    kernels: Kernels
    theta: Float32  # [n] float32, read-only: the shard's weights before this release
    copies: Mapping[int, Float32]  # version -> the weights [n] at it; empty without `needs_copies`
    # Worker -> weights [n] that the worker has. Only workers that get sparse replies are listed,
    # and only if `Weighting.needs_copies`.
    replicas: Mapping[int, Float32] = dataclasses.field(default_factory=dict)


class Weighting(Policy, Protocol):
    """Scales the workers' updates that a shard merges in one release."""

    @property
    def needs_copies(self) -> bool:
        """True if the shard must keep the weights that it last sent to each worker."""

    def init(self, size: int, version: int = 0) -> State:
        """Return the weighting's state before the shard applies an update.

        Args:
            size: The shard's number of weights.
            version: Number of updates that the run has already applied to an earlier model.
        """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals with scaled updates, without dropped ones; and the new state."""


def staleness(version: int, computed_at: int) -> int:
    """Return Y = max(1, T - v + 1): T is `version`, v is `computed_at`; Y = 1 means fresh."""
    return max(1, version - computed_at + 1)

"""The interface of weightings, which scale stale updates.

A weighting gets the updates of one release, with the version at which each update was computed,
and returns the scaled updates. Its state is plain data.
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
    """One worker's update at the moment of its release."""

    worker: int
    update: Update
    base_version: int  # shard version that the worker held when it pushed
    step: int = 0  # step number of the push; 0: unknown
    lag: int = 0  # base_version minus the version at which the update was computed
    samples: int = 0  # number of training examples behind the update; 0: unknown
    learning_rate: float | None = None  # learning rate set by the script; None: not set
    loss_scale: float = 0.0  # factor of the loss when the update was computed; 0: no factor
    overflow: bool = False  # the gradient overflowed at this loss scale, and the update is empty
    optimizer: int = 0  # number of the script's optimizer that applies the update
    batch_parts: int = 0  # consumed parts of the script's batches; nb_workers parts are one batch
    change: Update | None = None  # weight changes that the script made itself
    blocks: tuple[Block | WireBlock, ...] | None = None  # coded update, if it may be relayed

    @property
    def computed_at(self) -> int:
        """Shard version at which the update was computed."""
        return self.base_version - self.lag


@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """State of the shard that a weighting may use."""

    version: int  # T: updates applied so far
    oldest_base: int  # smallest base version that a live worker may still push from
    kernels: Kernels
    theta: Float32  # [n], read-only: the weights before this release
    copies: Mapping[int, Float32]  # version -> weights [n] of it, if `needs_copies`
    # Worker -> weights [n] that the worker holds, for workers with sparse replies (if needed).
    replicas: Mapping[int, Float32] = dataclasses.field(default_factory=dict)


class Weighting(Policy, Protocol):
    """Scales the updates of a release."""

    @property
    def needs_copies(self) -> bool:
        """True if the shard must keep the weights that it last sent to each worker."""

    def init(self, size: int, version: int = 0) -> State:
        """Return the state before any update.

        Args:
            size: The shard's number of entries.
            version: Number of updates that the run has already applied, to another model.
        """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals with scaled updates, without the arrivals that are dropped."""


def staleness(version: int, computed_at: int) -> int:
    """Return Y = max(1, T - v + 1): T is `version`, v is `computed_at`; Y = 1 means fresh."""
    return max(1, version - computed_at + 1)

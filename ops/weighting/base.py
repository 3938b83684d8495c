"""The interface of weightings: what is a stale update worth?

A weighting sees the updates of one release together with the version each was computed at, and
returns them scaled. State is plain data.
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
    step: int = 0  # of the push; 0: not known
    lag: int = 0  # versions from the one the update was computed at to base_version
    samples: int = 0  # examples behind it; 0: not known
    learning_rate: float | None = None  # the rate that a script has set; None: it has not
    loss_scale: float = 0.0  # of the loss that it was computed with; 0: none
    overflow: bool = False  # it overflowed at that scale, and is empty
    optimizer: int = 0  # which of a script's optimizers steps with it
    batch_parts: int = 0  # of the script's batches; nb_workers parts are one batch
    change: Update | None = None  # of the weights, by the script itself
    blocks: tuple[Block | WireBlock, ...] | None = None  # of it as coded, if it may be relayed

    @property
    def computed_at(self) -> int:
        """Shard version the update was computed at."""
        return self.base_version - self.lag


@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """What a weighting may know of the shard."""

    version: int  # T: updates applied so far
    oldest_base: int  # smallest base version a live worker may still push from
    kernels: Kernels
    theta: Float32  # [n], read-only: the weights before this release
    copies: Mapping[int, Float32]  # version -> theta [n] then, of what workers hold if needed
    # Worker -> [n], the weights that it really holds, where replies to it are sparse (if needed).
    replicas: Mapping[int, Float32] = dataclasses.field(default_factory=dict)


class Weighting(Policy, Protocol):
    """What scales the updates of a release."""

    @property
    def needs_copies(self) -> bool:
        """Whether the shard must keep the weights that each worker was last sent."""

    def init(self, size: int, version: int = 0) -> State:
        """Return the state before any update.

        Args:
            size: The shard's number of entries.
            version: Updates that were applied before, to another model.
        """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals with their updates scaled, without those that are dropped."""


def staleness(version: int, computed_at: int) -> int:
    """Return Y = max(1, T - v + 1), v the version an update was computed at; 1 means fresh."""
    return max(1, version - computed_at + 1)

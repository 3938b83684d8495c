"""Interface of weighting policies, which scale stale updates.

A weighting policy gets the workers' updates that a shard server merges in one round. With each
worker's update, the weighting policy gets the version of the weights at which the update was
computed. A weighting policy returns the scaled updates of the workers. The state of a weighting
policy is plain data that the calling shard server stores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.policy import Policy
from thinwire.ops.push_head import NO_HEAD, PushHead
from thinwire.ops.types import Block, Float32, State, Update

if TYPE_CHECKING:
    from thinwire.ops.wire.blocks import WireBlock


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A worker's update that a shard server merges, with the version at which it was computed."""

    worker: int
    update: Update
    base_version: int  # version of the shard server's weights that the worker had when it pushed
    lag: int = 0  # base_version minus the version of the weights at which the update was computed
    # numbers of the push; the defaults mean that the numbers are unknown or not set
    head: PushHead = NO_HEAD
    change: Update | None = None  # weight changes that the user's script made itself; None: none
    # coded update for relaying to other workers; None: must not be relayed
    blocks: tuple[Block | WireBlock, ...] | None = None

    @property
    def computed_at(self) -> int:
        """Version of the shard server's weights at which the worker computed the update."""
        return self.base_version - self.lag


@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """The shard server's data that a weighting may use when the server merges updates."""

    version: int  # number of updates that the shard server has applied so far (T in papers)
    # oldest version of the weights from which a live worker may still push an update
    oldest_base: int
    kernels: Kernels
    theta: Float32  # [n] float32, read-only: the shard server's weights before this round's update
    # version -> the weights [n] at this version; empty without `needs_copies`
    copies: Mapping[int, Float32]
    # Worker -> weights [n] that the worker has. Only workers that get sparse replies are listed,
    # and only if `Weighting.needs_copies`.
    replicas: Mapping[int, Float32] = dataclasses.field(default_factory=dict)


class Weighting(Policy, Protocol):
    """Policy that scales the workers' updates that a shard server merges in one round."""

    @property
    def needs_copies(self) -> bool:
        """True if the shard server must store the weights that it sent last to each worker."""

    def init(self, size: int, version: int = 0) -> State:
        """Return the weighting policy's state before the shard server applies an update.

        Args:
            size: Number of weights of the shard server.
            version: Version of the shard server's first weights: the number of updates that the run
                has already applied, for example to an earlier model.
        """

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the scaled updates, without dropped ones, and the weighting policy's new state."""


def staleness(version: int, computed_at: int) -> int:
    """Return the staleness max(1, version - computed_at + 1) of an update; 1 means fresh."""
    return max(1, version - computed_at + 1)

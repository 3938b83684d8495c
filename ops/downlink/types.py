"""Data types of the downlink: a worker's request for the model, and the shard's reply."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Literal

from thinwire.ops.frozen import BeforeChange, Keep, copied, unguarded
from thinwire.ops.types import Block, Update

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32
    from thinwire.ops.wire.blocks import WireBlock


class Operation(enum.Enum):
    """How a reply changes the worker's weights; the numbers are also used on the wire."""

    NONE = 0
    FULL = 1
    SET = 2
    ADD = 3
    SET_REST = 4  # SET, after the worker has added its own push to its weights
    RELAY = 5  # decode the updates of rounds and apply their means


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A worker's request for the model: a pull, or a push that awaits its reply."""

    worker: int
    step: int  # step of the push; 0 for a pull
    base_version: int | None  # version of the worker's weights; None: unknown to this shard
    push_bytes: int = 0  # bytes of the coded push
    is_urgent: bool = False  # True: other requests wait, so the shard's CPU time matters most


@dataclasses.dataclass(frozen=True)
class ShardView:
    """The shard's data that a down codec can read."""

    theta: Float32  # [n], read-only
    version: int  # T: number of updates applied so far
    kernels: Kernels
    offsets: tuple[int, ...]  # start of each slice in theta, then n
    keep: Keep = copied  # returns the current content of a shard's array, for a reply
    before_change: BeforeChange = unguarded  # to be called before a replica changes


@dataclasses.dataclass(frozen=True)
class RelayedUpdate:
    """One worker's coded update.

    Attributes:
        worker: Worker that sent the update.
        step: Step of the push that held the update.
        blocks: Blocks of the update, as received or decoded.
    """

    worker: int
    step: int
    blocks: tuple[Block | WireBlock, ...]


@dataclasses.dataclass(frozen=True)
class RelayedRound:
    """A round that changed the weights by ``theta -= rate * mean(updates)`` and nothing else.

    Attributes:
        updates: Updates in the order of the sum, by worker id. An update without blocks counts in
            the mean like the other updates.
        rate: Factor of the mean, exact in float32.
    """

    updates: tuple[RelayedUpdate, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class RelayedRounds:
    """All rounds since a worker's version, for a reply that omits the worker's own update.

    Attributes:
        rounds: Rounds in order of versions.
        worker: Worker that receives the rounds.
        step: Step of the worker's push that the reply answers; the worker has this push's update.
            0 for a pull: the worker has no update.
        num_bytes: Approximate bytes of the other workers' updates, with their descriptions.
        num_entries: Approximate number of entries that the rounds change.
    """

    rounds: tuple[RelayedRound, ...]
    worker: int
    step: int
    num_bytes: float
    num_entries: int

    def is_own(self, update: RelayedUpdate) -> bool:
        """Return whether the receiver sent this update, so that the reply can omit it."""
        return self.step > 0 and (update.worker, update.step) == (self.worker, self.step)


@dataclasses.dataclass(frozen=True)
class RepeatedRound:
    """A relayed round as the receiving worker decodes it.

    Attributes:
        updates: Blocks of each update, in the order of the sum; None stands for the receiver's own
            update.
        rate: Factor of the updates' mean.
    """

    updates: tuple[tuple[Block, ...] | None, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class ModelReply:
    """A shard's reply to a `ModelRequest`.

    Attributes:
        operation: How the worker applies the update.
        update: Update in the shard's coordinates; or coded blocks, one per slice (slot = slice
            number); or rounds for the worker to repeat.
        version: Version of the worker's weights after it has applied the update.
        kind: Kind of reply for the counters: "full" (the whole model), "delta" (all changed
            entries), "sparse" (the largest differences) or "relay" (coded updates of rounds).
        is_resync: True if the whole model was sent although the worker's weights were known.
    """

    operation: Operation
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    kind: Literal["full", "delta", "sparse", "relay"]
    is_resync: bool = False

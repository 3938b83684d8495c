"""Data types of the downlink: a worker's request for the model, and the shard server's reply."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Literal

from thinwire.ops.frozen import BeforeChange, Keep, copied, unguarded
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import Block, Float32, Int64, Update

if TYPE_CHECKING:
    from thinwire.ops.wire.blocks import WireBlock


class Operation(enum.Enum):
    """How a shard server's reply changes the worker's weights; messages contain the numbers."""

    NONE = 0  # the reply leaves the worker's weights unchanged
    FULL = 1  # the reply replaces all weights of the shard server
    SET = 2  # the reply's values overwrite the weights at the positions in the reply
    ADD = 3  # the reply's values are added to the weights at the positions in the reply
    SET_REST = 4  # like SET, after the worker has added its own push to its weights
    # the worker decodes the workers' updates in the reply and applies the mean of each round
    RELAY = 5


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A worker's request for the model: a pull, or a push whose reply has new weights."""

    worker: int
    step: int  # the worker's step of the push; 0 for a pull
    base_version: int | None  # version of the worker's weights; None: unknown to this shard server
    push_bytes: int = 0  # number of bytes of the worker's newest coded push; 0 if it has not pushed
    # True: other workers' requests wait, so the shard server must save CPU time
    is_urgent: bool = False


@dataclasses.dataclass(frozen=True)
class ShardView:
    """The shard server's data that a downlink codec can read."""

    theta: Float32  # [n], the shard server's weights, read-only
    version: int  # number of updates that the shard server has applied (T in the literature)
    kernels: Kernels
    # start of each variable slice in theta, then n (the number of weights)
    offsets: tuple[int, ...]
    # function that returns the present content of a shard server's array for a reply
    keep: Keep = copied
    # function to call before a replica (copy of a worker's weights) changes
    before_change: BeforeChange = unguarded


@dataclasses.dataclass(frozen=True)
class OwnEntries:
    """Weights whose change by one worker's push was only the addition of the pushed values."""

    worker: int  # number of the worker that sent the push
    step: int  # the worker's step in which it sent the push
    base_version: int  # version of the worker's weights when it computed the push
    version: int  # version of the shard server's weights after the push was applied
    indices: Int64  # [j] int64, positions of the entries in the shard server's weights


@dataclasses.dataclass(frozen=True)
class RelayedUpdate:
    """One worker's coded update, which a shard server forwards to other workers.

    Attributes:
        worker: Number of the worker that sent the update.
        step: Training step of the worker's push that contained the update.
        blocks: Blocks of the worker's update: coded as bytes, as received, or decoded.
    """

    worker: int
    step: int
    blocks: tuple[Block | WireBlock, ...]


@dataclasses.dataclass(frozen=True)
class RelayedRound:
    """Workers' updates whose merge changed the weights only by ``theta -= rate * mean(updates)``.

    Attributes:
        updates: Workers' updates in the order in which they are summed, by worker number. An update
            without blocks counts in the mean as zeros.
        rate: Factor on the mean of the updates, a number that float32 represents exactly.
    """

    updates: tuple[RelayedUpdate, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class ModelChange:
    """A change of the shard server's weights by an update, which a downlink codec records.

    Attributes:
        indices: [k] int64, ascending positions of the changed weights; None: all weights.
        version: Version of the shard server's weights (number of applied updates) after the update.
        own: Changed weights that one worker can compute from its own push; None if the update
            merges several pushes, or if replies cannot omit entries.
        relayed: Coded updates of the workers that the shard server merged; None if anything other
            than the plain mean of these updates changed the weights, or if the downlink codec
            relays no updates.
        before_change: Function to call with an array of the downlink codec's state before the array
            changes.
    """

    indices: Int64 | None
    version: int
    own: OwnEntries | None = None
    relayed: RelayedRound | None = None
    before_change: BeforeChange = unguarded


@dataclasses.dataclass(frozen=True)
class RelayedRounds:
    """Updates merged since a worker's version of the weights, for a reply without its own update.

    Attributes:
        rounds: Rounds (sets of updates merged together) in order of the shard server's versions.
        worker: Number of the worker that receives the relayed rounds.
        step: Training step of the worker's push that the reply answers and whose update the reply
            can omit. 0 for a pull: the reply omits no update.
        num_bytes: Approximate size of the updates of other workers than the receiver, in bytes,
            with the descriptions of their blocks.
        num_entries: Approximate number of weights that the relayed rounds change.
    """

    rounds: tuple[RelayedRound, ...]
    worker: int
    step: int
    num_bytes: float
    num_entries: int

    def is_own(self, update: RelayedUpdate) -> bool:
        """Return True if the receiving worker itself sent `update`, which the reply can omit."""
        return self.step > 0 and (update.worker, update.step) == (self.worker, self.step)


@dataclasses.dataclass(frozen=True)
class RepeatedRound:
    """Updates that a shard server merged and relays, as the receiving worker has decoded them.

    Attributes:
        updates: Blocks of each worker's update, in the order in which the updates are summed; None
            stands for the receiving worker's own update.
        rate: Factor on the mean of the workers' updates.
    """

    updates: tuple[tuple[Block, ...] | None, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class ModelReply:
    """A shard server's reply to a `ModelRequest` of a worker.

    Attributes:
        operation: How the worker applies the reply to its weights: overwrite, add or others (see
            `Operation`).
        update: Content of the reply: new values with their positions in the shard server's weights;
            or coded blocks, one per variable slice (slot = slice number); or workers' updates,
            which the worker applies as the shard server did.
        version: Version of the worker's weights after it has applied the reply.
        kind: Kind of reply for the counters: "full" (the whole model), "delta" (all changed
            weights), "sparse" (the largest differences of weights) or "relay" (coded updates of
            workers).
        is_resync: True if the reply has the whole model although the shard server knew the worker's
            weights.
    """

    operation: Operation
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    kind: Literal["full", "delta", "sparse", "relay"]
    is_resync: bool = False

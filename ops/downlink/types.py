"""The nouns of the downlink: a worker's request for the model, and a shard's reply to it."""

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
    """How a reply changes the worker's weights; the values equal those of the wire."""

    NONE = 0
    FULL = 1
    SET = 2
    ADD = 3
    SET_REST = 4  # after the worker has added its own push
    RELAY = 5  # repeat what rounds have done to the weights


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A worker's request for the model: a pull, or a push that awaits its reply."""

    worker: int
    step: int  # of the push; 0 for a pull
    base_version: int | None  # of the worker's weights; None: unknown to this shard
    push_bytes: int = 0  # of that push, coded
    is_urgent: bool = False  # others wait meanwhile: what costs the shard least counts


@dataclasses.dataclass(frozen=True)
class ShardView:
    """What a down codec sees of the shard."""

    theta: Float32  # [n], read-only
    version: int  # T: updates applied so far
    kernels: Kernels
    offsets: tuple[int, ...]  # where each slice begins in theta, and n at the end
    keep: Keep = copied  # keeps what an array of the shard holds now, for a reply
    before_change: BeforeChange = unguarded  # called before replicas change


@dataclasses.dataclass(frozen=True)
class RelayedUpdate:
    """One worker's update as it was coded.

    Attributes:
        worker: Whose it is.
        step: Of its push.
        blocks: As they came, or decoded.
    """

    worker: int
    step: int
    blocks: tuple[Block | WireBlock, ...]


@dataclasses.dataclass(frozen=True)
class RelayedRound:
    """A round whose plain mean changed the weights: ``theta -= rate * mean(updates)``.

    Attributes:
        updates: In the order in which they are summed, that of worker ids. One without blocks
            counts in the mean like any other.
        rate: Exact in float32.
    """

    updates: tuple[RelayedUpdate, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class RelayedRounds:
    """All rounds since a worker's version, but for what it has sent itself.

    Attributes:
        rounds: One after the other.
        worker: Who receives them.
        step: Of its push that this answers, whose update it has; 0: it has none.
        num_bytes: About how many bytes the others' updates take, with their descriptions.
        num_entries: About how many entries they change.
    """

    rounds: tuple[RelayedRound, ...]
    worker: int
    step: int
    num_bytes: float
    num_entries: int

    def is_own(self, update: RelayedUpdate) -> bool:
        """Return whether the receiver has sent this update, and so has it."""
        return self.step > 0 and (update.worker, update.step) == (self.worker, self.step)


@dataclasses.dataclass(frozen=True)
class RepeatedRound:
    """A relayed round as its receiver has it.

    Attributes:
        updates: The blocks of each, in the order in which they are summed; None: what the receiver
            has sent itself.
        rate: The factor of their mean.
    """

    updates: tuple[tuple[Block, ...] | None, ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class ModelReply:
    """A shard's reply to a `ModelRequest`.

    Attributes:
        operation: How the worker applies the update.
        update: In the shard's coordinates; or blocks, one for each slice (slot = slice number),
            already coded; or rounds to be repeated.
        version: Of the shard, which the worker has after applying the update.
        kind: For the counters: the whole model, everything that changed, or the largest part of
            what the worker lacks, or the coded updates of rounds.
        is_resync: The whole model was sent although the worker's weights were known.
    """

    operation: Operation
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    kind: Literal["full", "delta", "sparse", "relay"]
    is_resync: bool = False

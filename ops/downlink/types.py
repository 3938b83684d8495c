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


class Operation(enum.Enum):
    """How a reply changes the worker's weights; the values equal those of the wire."""

    NONE = 0
    FULL = 1
    SET = 2
    ADD = 3
    SET_REST = 4  # after the worker has added its own push
    RELAY = 5  # add the mean of a round's updates


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A worker's request for the model: a pull, or a push that awaits its reply."""

    worker: int
    step: int  # of the push; 0 for a pull
    base_version: int | None  # of the worker's weights; None: unknown to this shard
    push_bytes: int = 0  # of that push, coded


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
class RelayedRound:
    """A round whose plain mean changed the weights: ``theta -= rate * mean(updates)``.

    Attributes:
        updates: The blocks of each, in the order in which they are summed, that of worker ids. One
            without blocks counts in the mean like any other.
        rate: Exact in float32.
    """

    updates: tuple[tuple[Block, ...], ...]
    rate: float


@dataclasses.dataclass(frozen=True)
class ModelReply:
    """A shard's reply to a `ModelRequest`.

    Attributes:
        operation: How the worker applies the update.
        update: In the shard's coordinates; or blocks, one for each slice (slot = slice number),
            already coded; or a round to be relayed.
        version: Of the shard, which the worker has after applying the update.
        kind: For the counters: the whole model, everything that changed, or the largest part of
            what the worker lacks, or the coded updates of a round.
        is_resync: The whole model was sent although the worker's weights were known.
    """

    operation: Operation
    update: Update | tuple[Block, ...] | RelayedRound
    version: int
    kind: Literal["full", "delta", "sparse", "relay"]
    is_resync: bool = False

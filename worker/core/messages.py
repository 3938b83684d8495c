"""The messages of one exchange as plain data: a push to every shard, a reply from every shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.downlink.types import Operation
from thinwire.ops.routing.base import LostEntries, Routed
from thinwire.ops.types import Block, Kind

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class ShardReply:
    """A decoded reply of one shard."""

    operation: Operation
    blocks: Sequence[Block]
    version: int
    generation: int
    learning_rate: float
    samples: int
    stop: bool
    stop_reason: str = ""
    aux: Float32 | None = None  # [m] means over the workers; of shard 0
    lost: Sequence[LostEntries] | None = None  # entries of the push; None: nothing is known
    held_seconds: float = 0.0  # by the synchronisation rule
    staleness: int = 0  # of the push
    refused: bool = False  # the push was too large; this is the model without it


@dataclasses.dataclass(frozen=True)
class PushRequest:
    """One exchange: the push to each shard."""

    step: int
    kind: Kind
    shards: list[tuple[Block, ...]]  # per shard, slot = slice number
    base_versions: list[int]
    generations: list[int]
    samples: int
    local_steps: int
    learning_rate: float
    loss: float
    aux: Float32 | None = None  # [m] what shard 0 averages over the workers
    base_checksums: list[int] | None = None  # of each shard's weights at the base, at intervals
    routed: Sequence[Routed] = ()  # per shard: classes of service; empty: all on the stream
    lags: Sequence[int] = ()  # per shard: versions from the computing one to the base; empty: 0


def was_accepted(replies: Sequence[ShardReply | None]) -> bool:
    """Return whether shard 0 accepted a push, given the replies of all shards to it."""
    return replies[0] is not None and not replies[0].refused

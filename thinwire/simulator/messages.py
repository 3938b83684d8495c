"""What travels between simulated workers and shards beside the core's events.

What a trainer tells of a mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.types import Block, State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.worker.core.messages import ShardReply

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class StreamPart:
    """What the stream brings of a push that also has datagrams."""

    worker: int
    push: pb.Push
    payload: memoryview


@dataclasses.dataclass(frozen=True)
class Datagrams:
    """Datagrams that came in the stream."""

    message: pb.Datagrams


#: What may arrive at a shard.
Delivery = events.Event | StreamPart | Datagrams


@dataclasses.dataclass(frozen=True)
class ReplyInFlight:
    """A reply on its way to a worker."""

    step: int  # 0 answers a pull
    epoch: int
    reply: ShardReply
    reception: pb.DatagramOutcome | None = None  # what became of the push's datagrams


def replied(
    action: events.Reply, generation: int, blocks: Sequence[Block], came: pb.DatagramOutcome | None
) -> ReplyInFlight:
    """Return a reply of the core as a worker decodes it.

    Args:
        action: The reply.
        generation: Of the shard.
        blocks: What it brings of the model.
        came: What became of the push's datagrams; None where there are none.
    """
    reply = ShardReply(
        operation=action.operation,
        blocks=blocks,
        version=action.version,
        generation=generation,
        learning_rate=action.learning_rate,
        samples=action.samples,
        stop=action.stop,
        stop_reason=action.stop_reason or "",
        aux=action.aux,
        held_seconds=action.held_seconds,
        staleness=action.staleness,
    )
    return ReplyInFlight(action.step, action.epoch, reply, came)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one mini-batch came to, besides its gradient."""

    loss: float
    samples: int
    statistics: Float32  # [m] moving statistics after it, where they are averaged
    local: State  # what stays on the worker

"""Messages of one exchange as plain data: a push to each shard, and each shard's reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.push_head import NO_HEAD, PushHead, PushOrigin
from thinwire.ops.routing.base import LostEntries, Routed
from thinwire.ops.types import Block, Kind

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class ScriptFigures:
    """Settings of a mini-batch from a script and its optimizer.

    Attributes:
        head: Numbers of the mini-batch that only the script knows, for example its learning rate.
            The worker adds the other numbers, for example the step, when the round ends.
        touched: Maps a tensor's number to ascending indices along the first axis where the gradient
            may be nonzero. A tensor that is missing may be nonzero anywhere.
        change: [num_parameters] float32 change that the script's own code has made to weights since
            the last reply. The PS adds the change before its optimizer steps. None if the script
            changed no weights.
    """

    head: PushHead = NO_HEAD
    touched: Mapping[int, Int64] = dataclasses.field(default_factory=dict)
    change: Float32 | None = None


#: Settings of a mini-batch from a training loop without a script's optimizer.
NO_FIGURES = ScriptFigures()


@dataclasses.dataclass(frozen=True)
class ShardReply:
    """A shard's decoded reply to a worker's push or pull.

    Attributes:
        operation: Operation (such as add or set) by which the shard's reply changes the worker's
            base weights.
        blocks: Blocks of values that the worker applies to its weights by the reply's operation.
        version: Version of the shard's model after it has processed the push.
        generation: Number of restarts of the shard's model from a checkpoint.
        learning_rate: Learning rate of the run's schedule for the worker's next step.
        samples: Number of examples that all workers of the run have consumed.
        stop: True if the worker must stop training, by the shard's request.
        stop_reason: Reason why the worker must stop training, as a text for people.
        aux: [m] means of statistics and optimizer values over the workers, from shard 0. None if
            the reply holds no means.
        lost: Entries of the worker's push that did not reach the shard; None if the shard does not
            know which entries are lost.
        held_seconds: Time for which the shard's synchronization policy delayed the reply, in
            seconds.
        staleness: Number of versions by which the push's base weights were older than the shard's.
        refused: True if the shard rejected the push as too large. The reply then holds the model
            without the push.
        loss_scale: Factor by which the loss of the next mini-batch is multiplied; 0 without loss
            scaling. The worker uses the factor from shard 0.
        step: Number of the exchange whose push the shard answers; 0 for a pull, even if the pull
            replaced a push.
        rounds: Rounds whose updates the worker must apply, in order, for the operation RELAY, which
            has no blocks.
        schedule_counts: For each optimizer, the step count at which its learning-rate schedule is
            evaluated.
    """

    operation: Operation
    blocks: Sequence[Block]
    version: int
    generation: int
    learning_rate: float
    samples: int
    stop: bool
    stop_reason: str = ""
    aux: Float32 | None = None
    lost: Sequence[LostEntries] | None = None
    held_seconds: float = 0.0
    staleness: int = 0
    refused: bool = False
    loss_scale: float = 0.0
    step: int = 0
    rounds: Sequence[RepeatedRound] = ()
    schedule_counts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PushRequest:
    """The pushes of one exchange, one push per shard.

    Attributes:
        head: Numbers of the push that are the same for all shards.
        origins: For each shard, the shard's model that the worker holds.
        kind: Meaning of the values in a push, such as gradient or change of weights.
        shards: For each shard, the blocks to push. The slot of a block is the number of the shard's
            slice of the model.
        aux: [m] values that shard 0 averages over the workers; None if no values are averaged.
        routed: For each shard, the worker's update divided by class of service. Empty if the gRPC
            stream carries the whole update.
        changes: For each shard, the blocks of the change that the script's own code has made to
            weights; empty without a change.
    """

    head: PushHead
    origins: list[PushOrigin]
    kind: Kind
    shards: list[tuple[Block, ...]]
    aux: Float32 | None = None
    routed: Sequence[Routed] = ()
    changes: Sequence[tuple[Block, ...]] = ()


def was_accepted(replies: Sequence[ShardReply | None]) -> bool:
    """Return True if shard 0 accepted this worker's push as finite and not too large.

    Args:
        replies: For each shard, its reply to the push, or None if the shard rejected the push as
            not finite.
    """
    return replies[0] is not None and not replies[0].refused

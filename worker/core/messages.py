"""Messages of one exchange as plain data: a push to every shard, and a reply from every shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.routing.base import LostEntries, Routed
from thinwire.ops.types import Block, Kind

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class ScriptFigures:
    """Settings of a mini-batch from a script and its optimizer.

    Attributes:
        learning_rate: Rate that the script has set. None if the run's rate counts.
        loss_scale: Factor of the loss when the gradient was computed; 0 without loss scaling. The
            gradient itself is unscaled.
        overflow: True if the gradient overflowed at this loss scale. The push then has no blocks.
        optimizer: Number of the script's optimizer that the PS steps.
        repeats_batch: True if an earlier push has counted the examples of this mini-batch.
        batch_parts: Size of the mini-batch in parts of a script's batch. One batch has nb_workers
            parts.
        touched: Tensor's number -> ascending indices along the first axis where the gradient may
            be nonzero. A missing tensor may be nonzero anywhere.
        change: [num_parameters] change of weights by the script itself since the last reply. The
            PS adds the change before the optimizer steps. None if the script changed no weights.
    """

    learning_rate: float | None = None
    loss_scale: float = 0.0
    overflow: bool = False
    optimizer: int = 0
    repeats_batch: bool = False
    batch_parts: int = 0
    touched: Mapping[int, Int64] = dataclasses.field(default_factory=dict)
    change: Float32 | None = None


#: Settings of a mini-batch from a training loop without a script's optimizer.
NO_FIGURES = ScriptFigures()


@dataclasses.dataclass(frozen=True)
class ShardReply:
    """A decoded reply of one shard.

    Attributes:
        operation: Effect of the reply on the worker's weights.
        blocks: Blocks that the operation applies.
        version: Version of the shard's model after the reply.
        generation: Generation of the shard's model.
        learning_rate: Scheduled learning rate.
        samples: Number of examples that the run has consumed.
        stop: True if the worker must stop training.
        stop_reason: Reason of the stop, for people.
        aux: [m] means over the workers, from shard 0. None if the reply holds no means.
        lost: Entries of the push that did not reach the shard. None if the shard does not know.
        held_seconds: Time that the synchronization rule delayed the reply, in seconds.
        staleness: Staleness of the push, in versions.
        refused: True if the shard rejected the push as too large. The reply holds the model without
            the push.
        loss_scale: Factor of the loss for the next mini-batch; 0 without loss scaling. The worker
            uses the factor of shard 0.
        step: Step of the answered push. 0 for a pull, also if a pull replaced a push.
        rounds: Rounds to repeat in order, for the operation RELAY, which has no blocks.
        schedule_counts: Count at which the schedule of each optimizer is read.
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
        step: Number of the exchange, counted from 1.
        kind: Meaning of the values.
        shards: Blocks of each shard's push; the slot of a block is the slice's number.
        base_versions: Version of each shard's model that the worker holds.
        generations: Generation of each shard's model that the worker holds.
        samples: Number of examples in the push.
        local_steps: Number of local steps in the push. 0 if the push has no update.
        learning_rate: Learning rate of the step.
        loss: Mean loss over the mini-batches. None if the loss is unknown, as in a script's own
            training loop.
        aux: [m] values that shard 0 averages over the workers. None if no values are averaged.
        base_checksums: Checksum of each shard's part of the worker's base. None in most pushes:
            checksums are sent at intervals.
        routed: For each shard, the update by class of service. Empty if everything is sent on the
            stream.
        lags: For each shard, number of versions from the model that the gradient was computed at to
            the base. Empty means 0 for all shards.
        loss_scale: Factor of the loss when the gradient was computed; 0 without loss scaling.
        overflow: True if the gradient overflowed at this loss scale. The push then has no blocks.
        sets_rate: True if the script has set `learning_rate`.
        optimizer: Number of the script's optimizer that the PS steps.
        repeats_batch: True if an earlier push has counted the examples.
        batch_parts: Size of the push in parts of a script's batch. One batch has nb_workers parts.
        changes: For each shard, the change of weights by the script itself. Empty without changes.
    """

    step: int
    kind: Kind
    shards: list[tuple[Block, ...]]
    base_versions: list[int]
    generations: list[int]
    samples: int
    local_steps: int
    learning_rate: float
    loss: float | None
    aux: Float32 | None = None
    base_checksums: list[int] | None = None
    routed: Sequence[Routed] = ()
    lags: Sequence[int] = ()
    loss_scale: float = 0.0
    overflow: bool = False
    sets_rate: bool = False
    optimizer: int = 0
    repeats_batch: bool = False
    batch_parts: int = 0
    changes: Sequence[tuple[Block, ...]] = ()


def was_accepted(replies: Sequence[ShardReply | None]) -> bool:
    """Return True if shard 0 accepted a push.

    Args:
        replies: Reply of each shard to the push; None if the shard rejected the push as not finite.
    """
    return replies[0] is not None and not replies[0].refused

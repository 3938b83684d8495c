"""The messages of one exchange as plain data: a push to every shard, a reply from every shard."""

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
    """What a script's optimizer adds to a mini-batch.

    Attributes:
        learning_rate: The rate that the script has set, which counts instead of the run's.
        loss_scale: The factor of the loss; the gradient is unscaled. 0: none.
        overflow: Whether the gradient overflowed at that scale; it is not looked at, and the push
            has no blocks.
        optimizer: Which of the script's optimizers the PS is to step.
        repeats_batch: Whether an earlier push has counted the examples of this mini-batch.
        batch_parts: How much of the script's batches it is; nb_workers parts are one batch.
        touched: Tensor's number -> ascending numbers of its rows that the gradient is not 0 in;
            tensors left out are touched everywhere. A row is an index of the first axis.
        change: By how much the script itself has changed weights since the last answer; the PS
            adds it before the optimizer steps. None: it has not.
    """

    learning_rate: float | None = None
    loss_scale: float = 0.0
    overflow: bool = False
    optimizer: int = 0
    repeats_batch: bool = False
    batch_parts: int = 0
    touched: Mapping[int, Int64] = dataclasses.field(default_factory=dict)
    change: Float32 | None = None  # [num_parameters]


#: Of a mini-batch whose gradient is all.
NO_FIGURES = ScriptFigures()


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
    loss_scale: float = 0.0  # the factor of the loss from now on; 0: none. Shard 0's counts
    step: int = 0  # of the answered push; 0: of a pull, perhaps in the place of a push
    rounds: Sequence[RepeatedRound] = ()  # with RELAY, in order; there are no blocks
    schedule_counts: tuple[int, ...] = ()  # what the schedule of each optimizer is read at


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
    loss: float | None  # mean over the mini-batches; None: unknown, as in a loop of a script's own
    aux: Float32 | None = None  # [m] what shard 0 averages over the workers
    base_checksums: list[int] | None = None  # of each shard's weights at the base, at intervals
    routed: Sequence[Routed] = ()  # per shard: classes of service; empty: all on the stream
    lags: Sequence[int] = ()  # per shard: versions from the computing one to the base; empty: 0
    loss_scale: float = 0.0  # that the gradient was computed with; 0: none
    overflow: bool = False  # the gradient overflowed at that scale; there are no blocks
    sets_rate: bool = False  # `learning_rate` is the script's
    optimizer: int = 0  # which of the script's optimizers the PS steps
    repeats_batch: bool = False  # an earlier push has counted the examples
    batch_parts: int = 0  # of the script's batches; nb_workers parts are one batch
    changes: Sequence[tuple[Block, ...]] = ()  # per shard: of weights, by the script itself


def was_accepted(replies: Sequence[ShardReply | None]) -> bool:
    """Return whether shard 0 accepted a push, given the replies of all shards to it."""
    return replies[0] is not None and not replies[0].refused

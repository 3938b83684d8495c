"""What travels between simulated workers and shards, beside the core's own events and actions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.downlink.types import RelayedRounds, RepeatedRound
from thinwire.ops.types import Block, ModelSpec, ShardLayout, State, Update
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.wire.replies import blocks_of_reply
from thinwire.worker.core.messages import ShardReply

if TYPE_CHECKING:
    from thinwire.data.loading import TrainingShard
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


@dataclasses.dataclass(frozen=True)
class NonFinitePush:
    """A push that holds NaN or infinity: the shard's reader refuses it, the core only counts it."""

    worker: int
    step: int


#: What may arrive at a shard.
Delivery = events.Event | StreamPart | Datagrams | NonFinitePush


@dataclasses.dataclass(frozen=True)
class ReplyInFlight:
    """A reply on its way to a worker."""

    step: int  # 0 answers a pull
    epoch: int
    reply: ShardReply
    reception: pb.DatagramOutcome | None = None  # what arrived of the push's datagrams


#: What may arrive at a worker.
ToWorker = events.Welcome | events.Reject | events.Answer | ReplyInFlight


def to_client(message: ToWorker) -> pb.ToClient:
    """Return what a real shard sends in the place of a message, but for the model."""
    match message:
        case events.Welcome():
            welcome = pb.Welcome(
                incarnation=message.incarnation,
                last_applied_step=message.last_step,
                knows_worker=message.knows_worker,
                epoch=message.epoch,
                version=message.version,
            )
            return pb.ToClient(welcome=welcome)
        case events.Reject():
            refusal = pb.Refusal(
                reason=f"REASON_{message.reason}",
                message=message.message,
                step=message.step,
                epoch=message.epoch,
                retry_after_seconds=message.retry_after_seconds,
            )
            return pb.ToClient(refusal=refusal)
        case events.Answer(step=step, local_steps=local_steps, ready=ready):
            return pb.ToClient(answer=pb.Answer(step=step, local_steps=local_steps, ready=ready))
    reply = message.reply
    return pb.ToClient(
        reply=pb.Reply(
            step=message.step,
            epoch=message.epoch,
            version=reply.version,
            generation=reply.generation,
            stop=reply.stop,
        )
    )


def decoded(
    update: Update | tuple[Block, ...] | RelayedRounds, layout: ShardLayout
) -> tuple[list[Block], tuple[RepeatedRound, ...]]:
    """Return the blocks of a reply's update, or its rounds, as their receiver decodes them."""
    if not isinstance(update, RelayedRounds):
        return blocks_of_reply(update, layout), ()
    reply = pb.Reply(step=update.step)
    pieces = messages.rounds_to_message(update, reply, IndexChooser())
    payload = memoryview(b"".join(map(bytes, pieces)))
    sizes = [piece.size for piece in layout.slices]
    return [], messages.rounds_from_message(reply, payload, sizes)


def reply_in_flight(
    action: events.Reply,
    generation: int,
    layout: ShardLayout,
    reception: pb.DatagramOutcome | None,
) -> ReplyInFlight:
    """Return a reply of the core as a worker decodes it.

    Args:
        action: The reply.
        generation: Of the shard.
        layout: Of the shard.
        reception: What arrived of the push's datagrams; None where there are none.
    """
    blocks, rounds = decoded(action.update, layout)
    reply = ShardReply(
        operation=action.operation,
        blocks=blocks,
        rounds=rounds,
        version=action.version,
        generation=generation,
        learning_rate=action.learning_rate,
        loss_scale=action.loss_scale,
        samples=action.samples,
        stop=action.stop,
        stop_reason=action.stop_reason or "",
        aux=action.aux,
        held_seconds=action.held_seconds,
        staleness=action.staleness,
    )
    return ReplyInFlight(action.step, action.epoch, reply, reception)


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of one mini-batch."""

    gradient: Float32  # [num_parameters], its own
    loss: float
    samples: int
    statistics: Float32  # [m] moving statistics after it, where they are averaged
    local: State  # what stays on the worker


class GradientSource(Protocol):
    """Computes the gradients of any worker, perhaps in threads; a `Trainer` is one."""

    def local_of(self, number: int) -> State:
        """Return what stays on a worker besides the shared weights, at its start."""

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Compute the gradient of a worker's next mini-batch; see `Trainer.step`."""


class ModelSource(GradientSource, Protocol):
    """A source of gradients that also has the model to begin with."""

    @property
    def spec(self) -> ModelSpec:
        """The shared model."""

    @property
    def weights(self) -> Float32:
        """[num_parameters] float32 at the start of the run."""

    @property
    def statistics(self) -> Float32:
        """[m] float32 moving statistics at the start, where they are averaged."""

"""Messages between simulated workers and PS shards that `thinwire.ps.core` does not define.

All other messages of a simulation are events and actions of `thinwire.ps.core.events`. The module
`messages` further defines the result of a mini-batch (`Step`) and the interfaces of objects that
compute gradients.
"""

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
    """The entries of a push that the gRPC stream carries while datagrams carry the others."""

    worker: int
    push: pb.Push
    payload: memoryview


@dataclasses.dataclass(frozen=True)
class Datagrams:
    """Datagrams of a push that were sent in the gRPC stream instead of over UDP."""

    message: pb.Datagrams


@dataclasses.dataclass(frozen=True)
class NonFinitePush:
    """A push with NaN or infinity, which the PS shard rejects and counts."""

    worker: int
    step: int


#: Message from a simulated worker to a simulated PS shard.
Delivery = events.Event | StreamPart | Datagrams | NonFinitePush


@dataclasses.dataclass(frozen=True)
class ReplyInFlight:
    """A PS shard's reply to a pull or push, in flight to a worker."""

    step: int  # training step of the answered push; 0 for an answered pull
    epoch: int  # number of the PS shard's membership epoch at the reply
    reply: ShardReply
    reception: pb.DatagramOutcome | None = None  # counts of arrived datagrams; None: none were sent


#: Message from a simulated PS shard to a simulated worker.
ToWorker = events.Welcome | events.Reject | events.Answer | ReplyInFlight


def to_client(message: ToWorker) -> pb.ToClient:
    """Return the protocol message that a real PS shard would send, without the model's values."""
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
    """Encode and decode a PS shard's reply; return its parameter blocks and relayed rounds."""
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
    """Return a reply of the PS core in the form that a worker decodes.

    Args:
        action: Reply as the PS core returned it.
        generation: Number of times that the PS shard was restarted.
        layout: Layout of the PS shard (the slices of variables that the shard stores).
        reception: Number of datagrams of the answered push that arrived; None if the push had no
            datagrams.
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
    """The results (gradient, loss, new model state) of one mini-batch of a worker."""

    gradient: Float32  # gradient [num_parameters] float32, a new array
    loss: float
    samples: int
    statistics: Float32  # [m] moving statistics after the mini-batch; m = 0: not averaged
    local: State  # worker-local state (dropout seeds) after the mini-batch


class GradientSource(Protocol):
    """Interface of an object that computes gradients of all workers, such as `Trainer`."""

    def local_of(self, number: int) -> State:
        """Return a worker's initial local state, for example dropout seeds."""

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Compute the gradient of a worker's next mini-batch, as `Trainer.step` does."""


class ModelSource(GradientSource, Protocol):
    """Interface of an object that computes gradients and provides the initial model."""

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of the shared model's tensors."""

    @property
    def weights(self) -> Float32:
        """Initial weights of the model, [num_parameters] float32."""

    @property
    def statistics(self) -> Float32:
        """Initial moving statistics of batch normalization, [m] float32; m = 0 if not averaged."""

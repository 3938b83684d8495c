"""Codes replies of a PS shard as frames; an update in several replies is coded once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from thinwire.ops.downlink.types import Operation, RelayedRounds
from thinwire.ops.frozen import FrozenArray
from thinwire.ops.sharding.flat_updates import blocks_of
from thinwire.ops.types import Block, ShardLayout, Update
from thinwire.ops.wire.blocks import IndexChooser, WireBlock
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Frame, Piece, frames
from thinwire.ps.core import events

#: Function that adds an update to a Reply message, and returns the payload pieces of the update.
WriteUpdate = Callable[[pb.Reply, IndexChooser], list[Piece]]


class SharedBlocks:
    """The coded blocks of one update, which a PS shard sends to several workers.

    The first sending thread that needs the coded blocks of an update codes these blocks. The
    threads that send the same update to other workers reuse the coded blocks.
    """

    def __init__(self, update: Update | tuple[Block, ...], layout: ShardLayout) -> None:
        """Store the update without coding; the first call of `write` codes the update."""
        self._update, self._layout = update, layout
        self._lock = threading.Lock()
        self._coded: list[WireBlock] | None = None

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Add the update's blocks to a Reply message; return the payload pieces of the blocks."""
        with self._lock:
            if self._coded is None:
                blocks = blocks_of_reply(self._update, self._layout)
                self._coded = [chooser.encode(block) for block in blocks]
            return [*messages.blocks_to_message(self._coded, message.blocks)]


def whole_shard(weights: FrozenArray, layout: ShardLayout) -> WriteUpdate:
    """Return a function that writes all weights of a shard, which only it reads, without coding."""

    def write(message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        messages.dense_to_message([piece.size for piece in layout.slices], message.blocks)
        return [weights]

    return write


def coded_update(
    update: Update | tuple[Block, ...] | RelayedRounds,
    layout: ShardLayout,
    shared: dict[int, SharedBlocks],
) -> WriteUpdate:
    """Return a function that writes the update in a shard's reply into the wire message.

    Args:
        update: Update of the weights in the reply to a worker.
        layout: Layout of the shard: the slices of the model that the shard holds.
        shared: Python `id` of an update -> object that writes that update. Replies with the same
            update share one object that writes it.
    """
    if isinstance(update, RelayedRounds):
        # The shard relays the coded updates of other workers as it received them.
        return lambda message, chooser: [*messages.rounds_to_message(update, message, chooser)]
    return shared.setdefault(id(update), SharedBlocks(update, layout)).write


def blocks_of_reply(update: Update | tuple[Block, ...], layout: ShardLayout) -> list[Block]:
    """Return the blocks (variable slices) of the update in a reply, in order of the shard's
    slices.
    """
    return list(update) if isinstance(update, tuple) else blocks_of(update, layout)


def reply_frames(
    reply: events.Reply,
    generation: int,
    members: Sequence[pb.Member],
    update: WriteUpdate,
    chooser: IndexChooser,
    chunk_bytes: int | Callable[[], int],
    reception: pb.DatagramOutcome | None = None,
) -> Iterable[Frame]:
    """Return the wire frames of one reply to a worker. The thread that sends to a worker calls
    `reply_frames` to encode the reply.

    Args:
        reply: Reply that the shard's state machine returned as an action.
        generation: Generation of the shard (number of restarts).
        members: Workers that all-reduce gradients in the next round; empty if the workers do not
            all-reduce gradients.
        update: Function that writes the reply's update into the wire message.
        chooser: Object that chooses how indices of sparse updates are coded on the worker's stream.
        chunk_bytes: Size of the largest frame for the worker's link, in bytes, or a function that
            returns this size.
        reception: Counts of the arrived UDP datagrams of the worker's push; None if the push had no
            datagrams.
    """
    message = pb.ToClient()
    body = message.reply
    body.version, body.generation, body.epoch = reply.version, generation, reply.epoch
    body.operation = reply.operation.value  # type: ignore[assignment]
    body.learning_rate, body.samples = reply.learning_rate, reply.samples
    body.loss_scale = reply.loss_scale
    body.stop, body.stop_reason, body.step = reply.stop, reply.stop_reason or "", reply.step
    body.members.extend(members)
    body.schedule_counts.extend(reply.schedule_counts)
    body.held_seconds, body.staleness = reply.held_seconds, reply.staleness
    if reception is not None:
        body.outcome.CopyFrom(reception)
    pieces: list[Piece] = []
    if reply.operation is not Operation.NONE:
        pieces = update(body, chooser)
    if reply.aux is not None:
        body.aux_count = len(reply.aux)
        pieces.append(reply.aux.astype("<f4", copy=False).data)
    return frames(message, pieces, chunk_bytes)

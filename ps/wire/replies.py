"""Codes a Reply of the core as wire frames; equal updates are coded once."""

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


class SharedBlocks:
    """The blocks of one update for several clients.

    The first sending thread that needs the blocks codes them; the other threads reuse the result.
    """

    def __init__(self, update: Update | tuple[Block, ...], layout: ShardLayout) -> None:
        """Store the update; `write` codes it."""
        self._update, self._layout = update, layout
        self._lock = threading.Lock()
        self._coded: list[WireBlock] | None = None

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Describe the blocks in a message; code them on the first call; return the payload."""
        with self._lock:
            if self._coded is None:
                blocks = blocks_of_reply(self._update, self._layout)
                self._coded = [chooser.encode(block) for block in blocks]
            return [*messages.blocks_to_message(self._coded, message.blocks)]


class WholeShard:
    """All weights of the shard as a frozen array, for one client; sent without coding."""

    def __init__(self, weights: FrozenArray, layout: ShardLayout) -> None:
        """Store `weights`, which only this object reads."""
        self._weights, self._layout = weights, layout

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Describe the slices in a message; return its payload."""
        messages.dense_to_message([piece.size for piece in self._layout.slices], message.blocks)
        return [self._weights]


class PassedOn:
    """Relayed rounds for one client, with the updates as the shard received them."""

    def __init__(self, rounds: RelayedRounds) -> None:
        """Store the rounds."""
        self._rounds = rounds

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Describe the rounds in a message; return its payload."""
        return [*messages.rounds_to_message(self._rounds, message, chooser)]


CodedUpdate = SharedBlocks | WholeShard | PassedOn


def coded_update(
    update: Update | tuple[Block, ...] | RelayedRounds,
    layout: ShardLayout,
    shared: dict[int, SharedBlocks],
) -> CodedUpdate:
    """Return the writer of a reply's update.

    Args:
        update: Update of the reply.
        layout: Layout of the shard.
        shared: `id` of an update -> its writer, so that replies with the same update share one.
    """
    if isinstance(update, RelayedRounds):
        return PassedOn(update)
    return shared.setdefault(id(update), SharedBlocks(update, layout))


def blocks_of_reply(update: Update | tuple[Block, ...], layout: ShardLayout) -> list[Block]:
    """Return the blocks of a reply, in order."""
    return list(update) if isinstance(update, tuple) else blocks_of(update, layout)


def reply_frames(
    reply: events.Reply,
    generation: int,
    members: Sequence[pb.Member],
    update: CodedUpdate,
    chooser: IndexChooser,
    chunk_bytes: int | Callable[[], int],
    reception: pb.DatagramOutcome | None = None,
) -> Iterable[Frame]:
    """Return the frames of one reply (in a sending thread).

    Args:
        reply: Action of the core.
        generation: Generation of the shard.
        members: Workers that sum together in the next round, if workers sum among themselves; else
            empty.
        update: Writer of the reply's update.
        chooser: Chooser of index codings for the client's stream.
        chunk_bytes: Largest frame for the client's link, in bytes, or a function that returns it.
        reception: Outcome of the push's datagrams; None if the push had no datagrams.
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
        pieces = update.write(body, chooser)
    if reply.aux is not None:
        body.aux_count = len(reply.aux)
        pieces.append(reply.aux.astype("<f4", copy=False).data)
    return frames(message, pieces, chunk_bytes)

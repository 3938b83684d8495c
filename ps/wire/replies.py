"""From a Reply of the core to frames of the wire; equal updates are coded once."""

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
    """The coded blocks of one update, coded once, by the sending thread that needs them first."""

    def __init__(self, update: Update | tuple[Block, ...], layout: ShardLayout) -> None:
        """Keep the update; nothing is coded yet."""
        self._update, self._layout = update, layout
        self._lock = threading.Lock()
        self._coded: list[WireBlock] | None = None

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Describe the blocks in a message, coding them now if nobody has; return its payload."""
        with self._lock:
            if self._coded is None:
                blocks = blocks_of_reply(self._update, self._layout)
                self._coded = [chooser.encode(block) for block in blocks]
            return [*messages.blocks_to_message(self._coded, message.blocks)]


class WholeShard:
    """All weights of the shard as they were, for one client; not coded, and not copied at first."""

    def __init__(self, weights: FrozenArray, layout: ShardLayout) -> None:
        """Stand for `weights`, which nobody else reads."""
        self._weights, self._layout = weights, layout

    def write(self, message: pb.Reply, chooser: IndexChooser) -> list[Piece]:
        """Describe the slices in a message; return its payload."""
        del chooser
        messages.dense_to_message([each.size for each in self._layout.slices], message.blocks)
        return [self._weights]


class PassedOn:
    """Rounds for one client, as their updates came."""

    def __init__(self, rounds: RelayedRounds) -> None:
        """Keep the rounds."""
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
    """Return what writes the update of a reply; `shared` has those of equal ones by identity."""
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
        reply: The core's action.
        generation: Of the shard.
        members: Who sums with whom in the next round, if workers do that among themselves.
        update: The reply's.
        chooser: Of index codings, for the client's stream.
        chunk_bytes: Largest frame for its link.
        reception: Of the push's datagrams.
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

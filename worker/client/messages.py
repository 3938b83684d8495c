"""Encodes one worker's pushes to one shard as messages for the gRPC stream.

A worker's push to one shard is usually one gRPC message. If each variable announces its own
datagrams, a push is one message per variable and a last message without blocks. Datagrams that the
gRPC stream carries precede or follow the messages of the push.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.ops.routing.base import Manifest, Routed
from thinwire.ops.routing.packetizer import SealedStep
from thinwire.ops.wire.blocks import IndexChooser, WireBlock
from thinwire.proto import messages as proto_messages
from thinwire.proto import push_head
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike
from thinwire.worker.client.datagrams import DatagramChannel
from thinwire.worker.core.messages import PushRequest

#: A message to a shard, and the buffers that make up the message's payload, in order.
EncodedMessage = tuple[pb.ToServer, Sequence[BytesLike]]


def push_messages(
    outgoing: PushRequest,
    shard: int,
    incarnation: int,
    epoch: int,
    chooser: IndexChooser,
    sealed: SealedStep | None = None,
    each_slot: bool = False,
) -> list[EncodedMessage]:
    """Return the messages that make up one push to a shard, in order of sending.

    Args:
        outgoing: The worker's pushes to all shards in one exchange.
        shard: Number of the shard for which the push is encoded, from 0.
        incarnation: Incarnation of the worker (id of one process).
        epoch: Newest membership epoch that any shard has sent to the worker.
        chooser: Object that chooses how the positions of entries are coded; one object per worker
            and shard.
        sealed: Datagrams of the push; None if the training method sends no datagrams.
        each_slot: True to send one message per variable, which announces the variable's datagrams;
            False to announce all datagrams in one message.
    """
    routed = outgoing.routed[shard] if outgoing.routed else Routed(outgoing.shards[shard])
    coded = [chooser.encode(block) for block in routed.reliable]
    # Blocks and manifest of each message, in order.
    parts: list[tuple[list[WireBlock], Manifest | None]] = []
    whole: Manifest | None = None
    if sealed is not None:
        counts = routed.num_blocks, routed.num_skipped, routed.num_reliable, routed.num_dropped
        whole = Manifest(() if each_slot else sealed.announced, routed.k, *counts)
        if each_slot:
            for block in coded:
                announced = sealed.by_slot.get(block.slot, ())
                parts.append(([block], Manifest(announced, routed.k, 0, 0, 0, 0)))
            coded = []
    messages: list[EncodedMessage] = []
    for blocks, manifest in [*parts, (coded, whole)]:
        message = pb.ToServer()
        push = message.push
        push.incarnation, push.epoch = incarnation, epoch
        push_head.kind_to_message(outgoing.kind, push)
        push_head.head_to_message(outgoing.head, push)
        push_head.origin_to_message(outgoing.origins[shard], push)
        push.more = len(messages) < len(parts)
        if manifest is not None:
            push.manifest.CopyFrom(proto_messages.manifest_to_message(manifest))
        pieces = proto_messages.blocks_to_message(blocks, push.blocks)
        messages.append((message, pieces))
    if outgoing.changes and outgoing.changes[shard]:
        changed = map(IndexChooser().encode, outgoing.changes[shard])
        beside = proto_messages.blocks_to_message(changed, push.changes)
        push.change_bytes = sum(map(len, beside))
        pieces += beside
    if shard == 0 and outgoing.aux is not None:
        push.aux_count = len(outgoing.aux)
        pieces.append(outgoing.aux.astype("<f4", copy=False).data)
    return messages


class PushEncoder:
    """Encoder of one worker's pushes to one shard as messages and datagrams.

    Attributes:
        channel: Channel that sends the datagrams of the pushes; None if the training method sends
            no datagrams.

    Args:
        shard: Number of the shard to which the pushes are sent, from 0.
        channel: Channel that sends the datagrams of the pushes; None if the training method sends
            no datagrams.
    """

    def __init__(self, shard: int, channel: DatagramChannel | None) -> None:
        self.shard, self.channel = shard, channel
        self._chooser = IndexChooser()

    def encode(self, request: PushRequest, incarnation: int, epoch: int) -> list[EncodedMessage]:
        """Return the messages of a push, after the datagrams that precede it in the gRPC stream.

        The caller must not change the payloads' buffers before the shard has answered the push:
        after a lost stream, the client sends the same buffers again.
        """
        channel, sealed, each_slot = self.channel, None, False
        if channel is not None:
            sealed = channel.seal(request.head.step, request.routed[self.shard])
            each_slot = channel.marks_slots
        messages = push_messages(
            request, self.shard, incarnation, epoch, self._chooser, sealed, each_slot
        )
        ahead = channel.before() if channel is not None else ()
        return [*((message, ()) for message in ahead), *messages]

    def finish(self) -> list[EncodedMessage]:
        """Send the last push's datagrams over UDP, or return them as gRPC stream messages."""
        return [(message, ()) for message in self.channel.after()] if self.channel else []

    def restart(self) -> None:
        """Reset the coding of entries' positions for a new incarnation (process) of the worker."""
        self._chooser = IndexChooser()

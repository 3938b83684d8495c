"""What a worker tells one shard of an exchange, as messages for the stream."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.ops.routing.base import Manifest, Routed
from thinwire.ops.routing.packetizer import SealedStep
from thinwire.ops.types import Kind
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages as proto_messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike
from thinwire.worker.client.datagrams import DatagramChannel
from thinwire.worker.core.messages import PushRequest

#: A message, and the pieces of its payload.
Spoken = tuple[pb.ToServer, Sequence[BytesLike]]

_KINDS = {
    Kind.GRADIENT: pb.UPDATE_KIND_GRADIENT,
    Kind.DELTA: pb.UPDATE_KIND_DELTA,
    Kind.VALUES: pb.UPDATE_KIND_VALUES,
}


def push_messages(
    outgoing: PushRequest,
    shard: int,
    incarnation: int,
    epoch: int,
    chooser: IndexChooser,
    sealed: SealedStep | None = None,
    each_slot: bool = False,
) -> list[Spoken]:
    """Return the messages, in order; one, unless each slot has its own.

    Args:
        outgoing: The exchange.
        shard: Which of its parts.
        incarnation: This life of the worker.
        epoch: Newest membership epoch heard of.
        chooser: This worker's, for this shard.
        sealed: The datagrams that go beside; None: the method sends none.
        each_slot: Whether the datagrams of each slot end with it, not with the whole update.
    """
    routed = outgoing.routed[shard] if outgoing.routed else Routed(outgoing.shards[shard])
    coded = [chooser.encode(block) for block in routed.reliable]
    messages: list[Spoken] = []
    if sealed is not None and each_slot:
        for block in coded:
            message = _header(outgoing, shard, incarnation, epoch)
            message.push.more = True
            manifest = Manifest(sealed.by_slot.get(block.slot, ()), routed.k, 0, 0, 0, 0)
            message.push.manifest.CopyFrom(proto_messages.manifest_to_message(manifest))
            messages.append(
                (message, proto_messages.blocks_to_message([block], message.push.blocks))
            )
        coded = []
    message = _header(outgoing, shard, incarnation, epoch)
    if sealed is not None:
        manifest = Manifest(
            () if each_slot else sealed.announced,
            routed.k,
            routed.num_blocks,
            routed.num_skipped,
            routed.num_reliable,
            routed.num_dropped,
        )
        message.push.manifest.CopyFrom(proto_messages.manifest_to_message(manifest))
    pieces = proto_messages.blocks_to_message(coded, message.push.blocks)
    if shard == 0 and outgoing.aux is not None:
        message.push.aux_count = len(outgoing.aux)
        pieces.append(outgoing.aux.astype("<f4", copy=False).data)
    return [*messages, (message, pieces)]


def sealed_messages(
    outgoing: PushRequest,
    shard: int,
    incarnation: int,
    epoch: int,
    chooser: IndexChooser,
    leg: DatagramChannel | None,
) -> list[Spoken]:
    """Return `push_messages` of a push whose datagrams, if its leg sends any, are then sealed."""
    if leg is None:
        return push_messages(outgoing, shard, incarnation, epoch, chooser)
    sealed = leg.seal(outgoing.step, outgoing.routed[shard])
    return push_messages(outgoing, shard, incarnation, epoch, chooser, sealed, leg.marks_slots)


def _header(outgoing: PushRequest, shard: int, incarnation: int, epoch: int) -> pb.ToServer:
    message = pb.ToServer()
    push = message.push
    push.incarnation = incarnation
    push.step, push.kind = outgoing.step, _KINDS[outgoing.kind]
    push.base_version = outgoing.base_versions[shard]
    push.generation = outgoing.generations[shard]
    if outgoing.lags:
        push.lag = outgoing.lags[shard]
    push.epoch = epoch
    push.samples, push.local_steps = outgoing.samples, outgoing.local_steps
    push.learning_rate, push.loss = outgoing.learning_rate, outgoing.loss
    if outgoing.base_checksums is not None:
        push.base_checksum = outgoing.base_checksums[shard]
    return message

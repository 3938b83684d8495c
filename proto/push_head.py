"""Converts the numbers of a push to fields of the protocol message `Push`, and back.

Only this module names these fields for conversion. A new number of a push needs a field of `Push`
in `thinwire.proto`, a field of `PushHead` or `PushOrigin`, and a line in each direction here.
"""

from __future__ import annotations

from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind
from thinwire.proto import thinwire_pb2 as pb

_TO_MESSAGE = {
    Kind.GRADIENT: pb.UPDATE_KIND_GRADIENT,
    Kind.DELTA: pb.UPDATE_KIND_DELTA,
    Kind.VALUES: pb.UPDATE_KIND_VALUES,
}
_FROM_MESSAGE = {number: kind for kind, number in _TO_MESSAGE.items()}


def kind_to_message(kind: Kind, push: pb.Push) -> None:
    """Write the meaning of a push's values into the push message."""
    push.kind = _TO_MESSAGE[kind]


def kind_from_message(push: pb.Push) -> Kind | None:
    """Return the meaning of a push's values; None if this version of Thinwire does not know it."""
    return _FROM_MESSAGE.get(push.kind)


def head_to_message(head: PushHead, push: pb.Push) -> None:
    """Write the numbers that are the same for all shards into the push message."""
    push.step, push.samples, push.local_steps = head.step, head.samples, head.local_steps
    if head.loss is not None:
        push.loss = head.loss
    push.sets_rate = head.learning_rate is not None
    push.learning_rate = head.schedule_rate if head.learning_rate is None else head.learning_rate
    push.loss_scale, push.overflow = head.loss_scale, head.overflow
    push.optimizer, push.repeats_batch = head.optimizer, head.repeats_batch
    push.batch_parts = head.batch_parts
    push.settings.extend(head.settings)
    push.without_gradient.extend(head.without_gradient)


def head_from_message(push: pb.Push) -> PushHead:
    """Return the numbers of a push message that are the same for all shards."""
    sets_rate, rate = push.sets_rate, push.learning_rate
    return PushHead(
        step=push.step,
        samples=push.samples,
        local_steps=push.local_steps,
        loss=push.loss if push.HasField("loss") else None,
        learning_rate=rate if sets_rate else None,
        loss_scale=push.loss_scale,
        overflow=push.overflow,
        optimizer=push.optimizer,
        repeats_batch=push.repeats_batch,
        batch_parts=push.batch_parts,
        settings=tuple(push.settings),
        without_gradient=tuple(push.without_gradient),
        schedule_rate=0.0 if sets_rate else rate,
    )


def origin_to_message(origin: PushOrigin, push: pb.Push) -> None:
    """Write the model of the shard that the worker holds into the push message to this shard."""
    push.base_version, push.generation = origin.base_version, origin.generation
    push.lag = origin.lag
    if origin.base_checksum is not None:
        push.base_checksum = origin.base_checksum


def origin_from_message(push: pb.Push) -> PushOrigin:
    """Return the model of the shard that the sender of a push message held."""
    return PushOrigin(
        base_version=push.base_version,
        generation=push.generation,
        lag=push.lag,
        base_checksum=push.base_checksum if push.HasField("base_checksum") else None,
    )

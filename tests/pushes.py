"""Pushes as a shard's core receives them, made from plain numbers."""

import dataclasses

from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ps.core import events


def push_event(
    worker,
    incarnation,
    step,
    base_version,
    generation,
    epoch,
    update,
    samples=1,
    local_steps=1,
    loss=1.0,
    aux=None,
    num_bytes=0,
    lag=0,
    **numbers,
):
    """Return a push of one mini-batch; `numbers` are further fields of its head."""
    head = PushHead(step, samples, local_steps, loss, **numbers)
    origin = PushOrigin(base_version, generation, lag)
    return events.Push(worker, incarnation, epoch, head, origin, update, aux, num_bytes)


def with_numbers(push, **numbers):
    """Return a push (a shard's event or a worker's request) with other numbers in its head."""
    return dataclasses.replace(push, head=dataclasses.replace(push.head, **numbers))

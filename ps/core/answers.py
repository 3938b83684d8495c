"""Replies of a shard: who may be answered now, and what each is handed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation
from thinwire.ps.core import events
from thinwire.ps.core.members import Member

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def give(core: PsCore, workers: Iterable[int], now: float) -> list[events.Action]:
    """Reply to those of the workers that have asked and may go on.

    Workers of which the down codec says so get the same arrays.
    """
    replies: list[events.Action] = []
    gathered: dict[Hashable, ModelReply] = {}
    for worker in workers:
        member = core.members[worker]
        if member.question is None or not (member.free or core.stop_reason):
            continue
        (step, base), member.question = member.question, None
        asked = ModelRequest(worker, step, base, member.push_bytes)
        share = core.model.share_of(asked)
        handed = gathered.get(share) or core.model.gather(asked)
        gathered[share] = handed
        core.model.hand_out(worker, handed)
        overlaps = core.model.method.overlap
        member.oldest_base = member.base_version if overlaps else handed.version
        member.base_version = handed.version
        waited = now - member.asked_at if step else 0.0
        core.regrouping.answered(worker, step, now)
        core.accounts.replied(core.sync.name_of(worker), waited)
        replies.append(reply_of(core, worker, step, handed, now))
    return replies


def observe(core: PsCore, event: events.EvaluationPull, now: float) -> list[events.Action]:
    """Hand the whole model to somebody who only looks at it."""
    whole = ModelReply(Operation.FULL, core.model.whole(), core.version, "full")
    return [events.EvaluationReply(event.observer, reply_of(core, 0, 0, whole, now))]


def reply_of(core: PsCore, worker: int, step: int, handed: ModelReply, now: float) -> events.Reply:
    """Return what a worker, or an observer (0), is told besides what it is handed."""
    member = core.members.get(worker) or Member(asked_at=now)  # an observer has none
    return events.Reply(
        worker=worker,
        step=step,
        operation=handed.operation,
        update=handed.update,
        version=handed.version,
        epoch=core.membership.epoch,
        learning_rate=core.model.learning_rate,
        samples=core.samples,
        stop_reason=core.deadlines.drain_reason or core.stop_reason,
        held_seconds=now - member.asked_at,
        staleness=member.staleness if step else 0,
        aux=core.aux.mean if worker else core.aux.statistics,
    )

"""What a shard does about pushes that are too large, and about workers that keep on offending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.ps.core import events, refusals
from thinwire.ps.core.guard import OUTLIER
from thinwire.ps.core.members import Member

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def judge(core: PsCore, push: events.Push, member: Member, now: float) -> list[events.Action]:
    """Refuse a push that has just been taken in if it is too large.

    It stays in its round, which it completes as any push does, but nothing of it is applied: no
    group waits for a worker that sends nothing else. The worker is told at once; the model that it
    then asks for comes when its round is over.
    """
    why = core.guard.excess(push)
    if why is None:
        return []
    core.guard.refuse(push)
    member.question = None
    core.accounts.reject(OUTLIER, push.worker)
    told = refusals.outlier(push, why, core.membership.epoch)
    return [told, *_offend(core, push.worker, OUTLIER, now)]


def refused(core: PsCore, event: events.PushRejected, now: float) -> list[events.Action]:
    """Hear of a push that was refused before it came here."""
    core.membership.heard(event.worker, now)
    core.accounts.reject(event.reason, event.worker)
    return _offend(core, event.worker, event.reason, now)


def _offend(core: PsCore, worker: int, reason: str, now: float) -> list[events.Action]:
    """Count an offence; put a worker out that has offended too often.

    That is shard 0's to do, by what it sees itself; the others hear of it as of any leaving.
    """
    core.guard.count(worker, reason)
    if not core.membership.leads or core.membership.state_of(worker) == "left":
        return []
    if not core.guard.offend(worker):
        return []
    core.guard.put_out(worker)
    incarnation = core.members[worker].incarnation
    return core.change(list(core.membership.leave(worker, incarnation)), now)

"""What a shard takes from whom: membership, generations and epochs of what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ps.core import events, refusals
from thinwire.ps.core.members import Member

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def refuse_join(core: PsCore, join: events.Join, now: float) -> events.Reject | None:
    """Return why this life of a worker may not join; None where it may."""
    epoch = core.membership.epoch
    if not 1 <= join.worker <= core.config.nb_workers:
        return refusals.id_out_of_range(join, core.config.nb_workers, epoch)
    if (seconds := seconds_out(core, join.worker)) > 0:
        return refusals.quarantined(join, 0, seconds, epoch)
    holder = core.membership.holder(join, now)
    return None if holder is None else refusals.id_taken(join, holder, epoch)


def member_of(core: PsCore, event: events.Pull | events.Push | events.Query) -> Member | None:
    """Return the member that speaks; None where this life of the worker is not one."""
    member = core.members.get(event.worker)
    admitted = core.membership.admits(event.worker, event.incarnation)
    return member if admitted else None


def turn_away(core: PsCore, event: events.Pull | events.Push, step: int) -> events.Reject:
    """Refuse what a worker that is no member asks, or sends as this step."""
    epoch = core.membership.epoch
    if (seconds := seconds_out(core, event.worker)) > 0:
        return refusals.quarantined(event, step, seconds, epoch)
    return refusals.not_member(event.worker, event.incarnation, step, epoch)


def seconds_out(core: PsCore, worker: int) -> float:
    """Return how long a worker that was put out may not come yet; at the run's end it may."""
    return 0.0 if core.stop_reason is not None else core.guard.seconds_left(worker)


def let_in_early(core: PsCore) -> list[events.Action]:
    """Let pushes of live workers into their round; one of a newer epoch waits for that.

    One that has waited while its group changed is sent again, as whatever comes late is: the
    other shards may have turned it away, and would merge it with others than this one.
    """
    told: list[events.Action] = []
    for worker in sorted(core.early):
        member = core.members[worker]
        push = member.early
        known = push is not None and push.epoch <= core.membership.epoch
        known = known and not core.regrouping.defers(worker, member.last_step)
        if push is None or not known or not core.sync.is_live(worker, core.sync_state):
            continue
        core.early.discard(worker)
        member.early = None
        if epoch_fits(core, push):
            member.pending = push
            core.sync_state = core.sync.push(worker, core.sync_state)
        else:
            member.question, member.last_step = None, push.step - 1
            told.append(refusals.stale_epoch(push, core.membership.epoch))
    return told


def take_pending(core: PsCore, workers: Sequence[int]) -> list[events.Push]:
    """Return what the members of a complete round have pushed, but for what was refused since."""
    found = []
    for worker in workers:
        member = core.members[worker]
        push, member.pending = member.pending, None
        if push is not None and not core.guard.has_refused(worker, push.step):
            found.append(push)
    return found


def is_late(member: Member, push: events.Push) -> bool:
    """Whether a push comes after a later question of its life: nobody waits for its answer.

    A worker asks one thing at a time, so a stream brought it that was given up for another.
    """
    if member.question is None or push.is_copy:
        return False
    return push.step <= member.last_step and push.step != member.question[0]


def withdraw(core: PsCore, member: Member, worker: int) -> None:
    """Drop a push that waits for its round: who asks for the model does not wait for it any more.

    So does a worker that was let go after another shard had answered it: the round that its push
    would wait for here is not the one that it does there.
    """
    waiting = member.pending or member.early
    if waiting is None or core.guard.has_refused(worker, waiting.step):
        return
    core.accounts.reject("left", worker)
    member.last_step = waiting.step - 1  # so that a retry counts
    member.pending = member.early = None
    core.early.discard(worker)
    core.sync_state = core.sync.withdraw(worker, core.sync_state)
    member.free = core.sync.goes_on(worker, core.sync_state)


def usable_base(core: PsCore, event: events.Pull | events.Push) -> int | None:
    """Return the version the worker holds, if this shard has had it in its present life."""
    base = event.base_version
    known = base is not None and base <= core.version
    if not known or event.generation != core.config.generation:
        return None
    if isinstance(event, events.Push) and not core.model.in_step(event.base_version):
        return None
    return base


def epoch_fits(core: PsCore, push: events.Push) -> bool:
    """Whether a push knows its group's last change, and no epoch that shard 0 has not issued.

    A following shard may hear of an epoch from a worker first; such a push waits for it.
    """
    newest = core.group_epochs.get(core.sync.group_of(push.worker), 0)
    invented = core.membership.leads and push.epoch > core.membership.epoch
    return push.epoch >= newest and not invented


def note_lost_updates(core: PsCore, event: events.Pull | events.Push) -> None:
    """A worker that saw a later version of an undone life proves how much a crash lost."""
    lives_ago = core.config.generation - event.generation
    last_life = 1 <= lives_ago <= core.config.generations_undone
    seen = event.base_version
    if last_life and seen is not None and seen <= core.config.budget.iter_max:
        core.accounts.note_lost_updates(seen)

"""Changes of membership: what they do to a shard's rounds, and what the other shards are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ps.core import events, refusals
from thinwire.ps.core.members import Member
from thinwire.ps.core.membership import Change

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def carry(core: PsCore, changes: Sequence[Change], now: float) -> list[events.Action]:
    """Carry changes of membership into the rule; begin the run if everybody is there."""
    actions: list[events.Action] = []
    for verb, worker in changes:
        core.group_epochs[core.sync.group_of(worker)] = core.membership.epoch
        if verb == "join":
            core.members.setdefault(worker, Member())
            core.sync_state = core.sync.join(worker, core.sync_state)
        else:
            actions += _let_leave(core, worker)
    _check_start(core, now)
    return actions


def _let_leave(core: PsCore, worker: int) -> list[events.Action]:
    """Forget a worker's part in its round; if it still waits here, it must say Hello again."""
    member = core.members.setdefault(worker, Member())
    core.sync_state = core.sync.leave(worker, core.sync_state)
    core.model.forget(worker)
    core.state_server.left(worker)
    core.regrouping.left(worker)
    waiting = member.pending or member.early
    if waiting and not core.guard.has_refused(worker, waiting.step):
        core.accounts.reject("left", worker)
        member.last_step = waiting.step - 1  # so that a retry counts
    told: list[events.Action] = []
    if member.question is not None:
        epoch = core.membership.epoch
        told.append(refusals.not_member(worker, member.incarnation, member.question[0], epoch))
    member.pending = member.early = member.question = None
    core.early.discard(worker)
    member.free = False
    return told


def expel(core: PsCore, turnover: Sequence[Change], now: float) -> list[events.Action]:
    """Let workers go that were silent, and tell also those who ask nothing: they may live."""
    out = [w for _, w in turnover if w in core.members and core.members[w].question is None]
    told = core.change(turnover, now)
    epoch, lives = core.membership.epoch, [(w, core.members[w].incarnation) for w in out]
    return [*told, *(refusals.not_member(worker, life, 0, epoch) for worker, life in lives)]


def publish(core: PsCore) -> list[events.Action]:
    """Tell the other shards who is live."""
    if not core.started:  # a restarted shard 0 must not empty rounds that wait elsewhere
        return []
    live = tuple(sorted([*core.sync_state["live"], *core.sync_state["joining"]]))
    return [events.NewEpoch(epoch_of(core, core.membership.epoch, live))]


def epoch_of(core: PsCore, number: int, live: tuple[int, ...]) -> events.MembershipEpoch:
    """Return an epoch with these live workers in words."""
    lives = tuple(core.membership.life_of(worker) for worker in live)
    return events.MembershipEpoch(number, live, core.started, core.regrouping.formed, lives)


def _check_start(core: PsCore, now: float) -> None:
    if core.started:
        return
    present = len(core.sync_state["joining"])
    if present >= core.config.nb_workers:
        core.started, core.deadlines.start = True, None
    elif present and core.deadlines.start is None:
        core.deadlines.start = now + core.config.start_timeout_seconds

"""What a shard takes from whom: membership, generations and epochs of what arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ps import events
from ps.members import Member

if TYPE_CHECKING:
    from ps.core import PsCore


def member_of(core: PsCore, event: events.Pull | events.Push | events.Query) -> Member | None:
    """Return the member that speaks; None where this life of the worker is not one."""
    member = core.members.get(event.worker)
    admitted = core.membership.admits(event.worker, event.incarnation)
    return member if admitted else None


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
    """A worker that saw a later version of the last life proves how much a crash lost."""
    last_life = event.generation == core.config.generation - 1
    seen = event.base_version
    if last_life and seen is not None and seen <= core.config.budget.iter_max:
        core.accounts.note_lost_updates(seen)

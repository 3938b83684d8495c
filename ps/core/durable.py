"""What a shard writes into its checkpoints, and how it comes back from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.ops.sync.groups import parse_groups
from thinwire.ops.types import State
from thinwire.ps.core.members import Member

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def save(core: PsCore) -> State:
    """Return the core's durable state: weights, policies, clocks, counters. Arrays are copies."""
    return {
        "model": core.model.save(),
        "generation": core.config.generation,
        "clocks": {str(worker): clock for worker, clock in core.sync_state["clocks"].items()},
        "steps": {str(worker): _applied_step(member) for worker, member in core.members.items()},
        "bases": {str(worker): member.base_version for worker, member in core.members.items()},
        "aux": core.aux.save(),
        "accounts": core.accounts.save(),
        "membership": core.membership.save(),
        "stop_reason": core.stop_reason,
        "guard": core.guard.save(),
        "formed_groups": core.regrouping.save(core.sync.groups),
    }


def restore(core: PsCore, state: State) -> None:
    """Bring a fresh core to a saved state; who is live is found out anew."""
    core.model.restore(state["model"])
    core.sync_state["clocks"] = {int(w): clock for w, clock in state["clocks"].items()}
    for worker, step in state["steps"].items():
        member = core.members.setdefault(int(worker), Member())
        member.last_step = step
        member.base_version = member.oldest_base = state["bases"][worker]
    core.aux.restore(state["aux"])
    core.accounts.restore(state["accounts"], core.version)
    core.membership.restore(state["membership"])
    if "guard" in state:  # else of an earlier version, which guarded against nothing
        core.guard.restore(state["guard"])
    if state["formed_groups"]:
        core.regrouping.restore(parse_groups(state["formed_groups"]), core)


def _applied_step(member: Member) -> int:
    """A push that still waits for its round is not applied: its retry must count."""
    waiting = member.pending or member.early
    return member.last_step if waiting is None else waiting.step - 1

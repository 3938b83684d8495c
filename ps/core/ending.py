"""The end of a shard's run: at once, or when what is on its way has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.ps.core import answers, events

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore


def stop(core: PsCore, event: events.Stop, now: float) -> list[events.Action]:
    """End the run; an interrupted one first takes in what is on its way."""
    if core.stop_reason is not None:
        return []
    if event.reason != "interrupted" or core.deadlines.drain is not None:
        return end(core, event.reason, now)
    return _drain(core, event.reason, now)


def _drain(core: PsCore, reason: str, now: float) -> list[events.Action]:
    """Tell everybody of the end, and wait for what is still to come."""
    core.deadlines.begin_drain(reason, now)
    idle = [w for w, member in core.members.items() if member.question and not member.pending]
    for worker in idle:
        core.members[worker].free = True
    return answers.give(core, idle, now)


def end(core: PsCore, reason: str, now: float) -> list[events.Action]:
    """End the run, once; where the workers' newest weights are still to come, drain first."""
    if core.stop_reason is not None:
        return []
    if core.model.lags and core.deadlines.drain is None and core.sync_state["live"]:
        return _drain(core, reason, now)
    core.stop_reason = reason
    core.deadlines.end_drain()
    core.accounts.ended_at = now
    who = [worker for worker, member in core.members.items() if member.question]
    return [
        *answers.give(core, who, now),
        *core.snapshot_if_new(force=True),
        events.RunEnded(reason),
    ]

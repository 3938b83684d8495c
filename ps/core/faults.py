"""What a shard does about an event of a worker that its core cannot handle.

Such an event is a bug of ours, met by chance or looked for. What it costs is one worker's place,
not the run: the sender is put out, and everybody else goes on.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ps.core import admission, answers, events, refusals

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore

#: Why a push was refused, as the summary names it.
FAULT = "fault"
_LONGEST_CAUSE = 200


def failed(event: events.OfWorker, error: Exception) -> events.Failed:
    """Log what went wrong; return the event that takes the place of the one that was not handled.

    Args:
        event: What a worker caused.
        error: What the core raised over it.
    """
    cause = f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]
    logging.log_every_n_seconds(  # a client that insists must not fill the disk
        logging.ERROR,
        "cannot handle a %s of worker %d (%s); the worker is put out, the run goes on. This is a "
        "bug of Thinwire: please report it with what follows.\n%s",
        1,
        *(type(event).__name__, event.worker, cause, "".join(traceback.format_exception(error))),
    )
    return events.Failed(
        event.worker,
        getattr(event, "incarnation", 0),
        event.step if isinstance(event, events.Push) else 0,
        isinstance(event, events.Join),
        cause,
    )


def put_out(core: PsCore, event: events.Failed, now: float) -> list[events.Action]:
    """Put the sender out, let nobody wait for what the failure has cut off, and save the state.

    The core may have stopped halfway: a snapshot makes sure that whoever restarts the shard goes on
    from what it was left with. With --quarantine_after the sender is kept out for a term.
    """
    worker, membership = event.worker, core.membership
    life = event.incarnation or membership.life_of(worker)
    core.accounts.reject(FAULT, worker)
    core.guard.count(worker, FAULT)
    told: list[events.Action] = [refusals.fault(event, life, membership.epoch)]
    if membership.admits(worker, life):
        told += _let_go(core, worker, life, now)
    return [*told, *_answer_stuck(core, now), *core.settle(now), *core.snapshot_if_new(force=True)]


def _let_go(core: PsCore, worker: int, life: int, now: float) -> list[events.Action]:
    """End a life's membership, or its part in the round where membership is shard 0's to end."""
    member = core.members.get(worker)
    if member is not None:
        member.question = None  # it has been answered
    if core.membership.leads:
        if core.guard.policy.quarantine_after:
            core.guard.put_out(worker)
        return core.change(list(core.membership.leave(worker, life)), now)
    if member is not None:
        admission.withdraw(core, member, worker)
    return [events.WorkersUnreachable((events.WorkerIncarnation(worker, life),))]


def _answer_stuck(core: PsCore, now: float) -> list[events.Action]:
    """Answer live workers whose push is gone, or its round over, unless the rule holds them."""
    stuck = []
    for worker in core.sync_state["live"]:
        member = core.members[worker]
        if member.pending is not None and worker not in core.sync_state["pushed"]:
            member.pending = None
            core.accounts.reject(FAULT, worker)
        waits = member.pending is not None or member.early is not None
        if member.question is not None and not waits and core.sync.goes_on(worker, core.sync_state):
            member.free = True
            stuck.append(worker)
    return answers.give(core, stuck, now)

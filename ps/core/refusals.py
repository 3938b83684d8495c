"""The refusals of a shard's core: what happened, what was expected, how to fix it."""

from __future__ import annotations

import dataclasses

from thinwire.ps.core.events import Failed, Join, Pull, Push, Reject
from thinwire.ps.core.membership import IdHolder

#: Why a push was refused, as the summary names it: it is too large ...
OUTLIER = "outlier"
#: ... or the core could not handle it ...
FAULT = "fault"
#: ... or the schedule of the script's optimizer has no finite rate to step with.
NO_RATE = "no_rate"


def id_out_of_range(join: Join, nb_workers: int, epoch: int) -> Reject:
    """Refuse a worker number that this run does not have."""
    message = f"--id_worker={join.worker}: this run has workers 1..{nb_workers} (--nb_workers)."
    return Reject(join.worker, join.incarnation, "ID_RANGE", message, 0, epoch)


def id_taken(join: Join, holder: IdHolder, epoch: int) -> Reject:
    """Refuse a second live worker of the same number, naming the first.

    A silent one may be dead, and nobody has noticed: then the message names when to try again.
    """
    message = f"--id_worker={join.worker} is held by a live worker at {holder.peer}; "
    if holder.retry_after_seconds:
        message += (
            f"it has been silent for {holder.silent_seconds:.3g} s, and unless it returns before, "
            f"the id is free in {holder.retry_after_seconds:.3g} s."
        )
    else:
        message += "give this one another id."
    refusal = Reject(join.worker, join.incarnation, "ID_TAKEN", message, 0, epoch)
    return dataclasses.replace(refusal, retry_after_seconds=holder.retry_after_seconds)


def not_member(
    worker: int, incarnation: int, step: int, epoch: int, is_notice: bool = False
) -> Reject:
    """Refuse a push (or, with step 0, a pull) of a worker that is not, or no longer, a member."""
    message = "the lease of this worker had run out; it must send Hello again."
    return Reject(worker, incarnation, "NOT_MEMBER", message, step, epoch, is_notice=is_notice)


def outlier(push: Push, why: str, epoch: int) -> Reject:
    """Refuse an update that is too large; the worker takes the model and proceeds."""
    message = f"the update of step {push.step} is an outlier: {why}; it was not applied."
    return Reject(push.worker, push.incarnation, "OUTLIER", message, push.step, epoch)


def other_optimizer(push: Push, differing: tuple[Push, Push], epoch: int) -> Reject:
    """Refuse a round whose workers do not step the same optimizer of their script."""
    one, other = differing
    message = (
        f"worker {one.worker} steps optimizer {one.optimizer + 1} of the script and worker "
        f"{other.worker} optimizer {other.optimizer + 1} in the same round; expected all workers "
        "of a round to step their optimizers in the same order. Let no condition on a worker's own "
        "data decide which one steps, or take --method=asgd, which has no rounds."
    )
    return Reject(push.worker, push.incarnation, "OPTIMIZER", message, push.step, epoch)


def quarantined(event: Join | Pull | Push, step: int, seconds: float, epoch: int) -> Reject:
    """Refuse a worker in quarantine; it may send Hello again when its term is over."""
    message = (
        f"worker {event.worker} is in quarantine for its offences (--quarantine_after); it "
        f"may join again in {seconds:.3g} s."
    )
    refusal = Reject(event.worker, event.incarnation, "QUARANTINED", message, step, epoch)
    return dataclasses.replace(refusal, retry_after_seconds=seconds)


def stale_generation(push: Push, version: int, generation: int, epoch: int) -> Reject:
    """Refuse an update of a model that this shard no longer has (or never had)."""
    message = (
        f"the update was computed at version {push.base_version} of generation {push.generation}; "
        f"this shard is at version {version} of generation {generation}. Pull again."
    )
    return Reject(push.worker, push.incarnation, "STALE_GENERATION", message, push.step, epoch)


def stale_epoch(push: Push, epoch: int) -> Reject:
    """Refuse a push from before the last change of its group, or of an epoch that nobody issued.

    It may be sent again immediately.
    """
    message = f"membership epoch {push.epoch} is not this group's; send it again with {epoch}."
    return Reject(push.worker, push.incarnation, "STALE_EPOCH", message, push.step, epoch)


def fault(event: Failed, incarnation: int, epoch: int) -> Reject:
    """Refuse an event that the core could not handle; its sender may send Hello again."""
    message = (
        f"this shard could not handle a message of worker {event.worker} ({event.cause}), and has "
        "expelled it; expected was a message like any other. Send Hello again, and report this "
        "with the log of this shard."
    )
    reason = "MALFORMED" if event.is_hello else "NOT_MEMBER"
    return Reject(event.worker, incarnation, reason, message, event.step, epoch)

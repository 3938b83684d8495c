"""Refusals that a PS shard's state machine sends to workers, each with its cause and the remedy."""

from __future__ import annotations

import dataclasses

from thinwire.ps.core.events import Failed, Join, Pull, Push, Reject
from thinwire.ps.core.membership import IdHolder

#: Reason of a rejected push in the run's summary: the push was too large.
OUTLIER = "outlier"
#: Reason of a rejected push in the run's summary: the core raised an exception over the push.
FAULT = "fault"
#: Reason of a rejected push in the run's summary: the learning rate schedule of the script's
#: optimizer returned a rate that is not finite.
NO_RATE = "no_rate"


def id_out_of_range(join: Join, nb_workers: int, epoch: int) -> Reject:
    """Refuse the Hello of a worker whose id is not 1..nb_workers."""
    message = f"--id_worker={join.worker}: this run has workers 1..{nb_workers} (--nb_workers)."
    return Reject(join.worker, join.incarnation, "ID_RANGE", message, 0, epoch)


def id_taken(join: Join, holder: IdHolder, epoch: int) -> Reject:
    """Refuse the Hello of a second live worker with a used id; name the first worker's address.

    If the first worker with an id is silent, this worker may have died. If the holder of a worker
    id is silent, the message to the second worker states when to try again.
    """
    message = f"--id_worker={join.worker} is held by a live worker at {holder.peer}; "
    if holder.retry_after_seconds:
        message += (
            f"it has been silent for {holder.silent_seconds:.3g} s. If it stays silent, the id "
            f"will be free in {holder.retry_after_seconds:.3g} s."
        )
    else:
        message += "give this worker another id."
    refusal = Reject(join.worker, join.incarnation, "ID_TAKEN", message, 0, epoch)
    return dataclasses.replace(refusal, retry_after_seconds=holder.retry_after_seconds)


def not_member(
    worker: int, incarnation: int, step: int, epoch: int, is_notice: bool = False
) -> Reject:
    """Refuse a push (with step 0: a pull) of a worker that is not a member of the run."""
    message = (
        "this worker is not a member of the run; its lease may have run out. Send Hello again."
    )
    return Reject(worker, incarnation, "NOT_MEMBER", message, step, epoch, is_notice=is_notice)


def outlier(push: Push, why: str, epoch: int) -> Reject:
    """Refuse a worker's update that is too large; the worker then pulls the model and continues."""
    message = f"the update of step {push.head.step} is an outlier: {why}; it was not applied."
    return Reject(push.worker, push.incarnation, "OUTLIER", message, push.head.step, epoch)


def other_optimizer(push: Push, differing: tuple[Push, Push], epoch: int) -> Reject:
    """Refuse a push if two workers of one round used different optimizers of the training
    script.
    """
    first, second = differing
    message = (
        f"worker {first.worker} steps optimizer {first.head.optimizer + 1} of the script and "
        f"worker {second.worker} optimizer {second.head.optimizer + 1} in the same round; expected "
        "all workers of a round to step their optimizers in the same order. Do not choose the "
        "optimizer by a condition on the worker's own data, or use --method=asgd, which has no "
        "rounds."
    )
    return Reject(push.worker, push.incarnation, "OPTIMIZER", message, push.head.step, epoch)


def quarantined(event: Join | Pull | Push, step: int, seconds: float, epoch: int) -> Reject:
    """Refuse a worker in quarantine; the worker may register again after `seconds` seconds."""
    message = (
        f"worker {event.worker} is in quarantine for its offences (--quarantine_after); it "
        f"may join again in {seconds:.3g} s."
    )
    refusal = Reject(event.worker, event.incarnation, "QUARANTINED", message, step, epoch)
    return dataclasses.replace(refusal, retry_after_seconds=seconds)


def stale_generation(push: Push, version: int, generation: int, epoch: int) -> Reject:
    """Refuse an update that was computed at weights that this shard has lost or never had."""
    message = (
        f"the update was computed at version {push.origin.base_version} of generation "
        f"{push.origin.generation}; this shard is at version {version} of generation {generation}. "
        "Pull the model again."
    )
    return Reject(push.worker, push.incarnation, "STALE_GENERATION", message, push.head.step, epoch)


def stale_epoch(push: Push, epoch: int) -> Reject:
    """Refuse a push whose membership epoch is unknown, or older than its worker group's last
    change.

    A worker whose push is refused for its membership epoch may send the push again immediately,
    with the present membership epoch.
    """
    message = (
        f"the push names membership epoch {push.epoch}, which does not fit the last change of the "
        f"worker's group; send it again with epoch {epoch}."
    )
    return Reject(push.worker, push.incarnation, "STALE_EPOCH", message, push.head.step, epoch)


def fault(event: Failed, incarnation: int, epoch: int) -> Reject:
    """Refuse a worker's event on which the shard raised an exception; the worker may register
    again.
    """
    message = (
        f"this shard could not handle a message of worker {event.worker} ({event.cause}), and has "
        "expelled the worker. This is a bug of the shard. Send Hello again, and report the bug "
        "with the log of this shard."
    )
    reason = "MALFORMED" if event.is_hello else "NOT_MEMBER"
    return Reject(event.worker, incarnation, reason, message, event.step, epoch)

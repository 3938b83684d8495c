"""What the core says when it does not accept something: what happened, expected, how to fix it."""

from __future__ import annotations

from ps.events import Join, Push, Refuse


def id_out_of_range(join: Join, nb_workers: int, epoch: int) -> Refuse:
    """Refuse a worker number that this run does not have."""
    message = f"--id_worker={join.worker}: this run has workers 1..{nb_workers} (--nb_workers)."
    return Refuse(join.worker, join.incarnation, "ID_RANGE", message, 0, epoch)


def id_taken(join: Join, holder: str, epoch: int) -> Refuse:
    """Refuse a second live worker of the same number, naming the first."""
    message = (
        f"--id_worker={join.worker} is held by a live worker at {holder}; give this one another id."
    )
    return Refuse(join.worker, join.incarnation, "ID_TAKEN", message, 0, epoch)


def not_member(worker: int, incarnation: int, step: int, epoch: int) -> Refuse:
    """Refuse a push (or, with step 0, a pull) of a worker that is not, or no longer, a member."""
    message = "the lease of this worker had run out; it must say Hello again."
    return Refuse(worker, incarnation, "NOT_MEMBER", message, step, epoch)


def stale_generation(push: Push, version: int, generation: int, epoch: int) -> Refuse:
    """Refuse an update of a model that this shard no longer has (or never had)."""
    message = (
        f"the update was computed at version {push.base_version} of generation {push.generation}; "
        f"this shard is at version {version} of generation {generation}. Pull again."
    )
    return Refuse(push.worker, push.incarnation, "STALE_GENERATION", message, push.step, epoch)


def stale_epoch(push: Push, epoch: int) -> Refuse:
    """Refuse a push from before the last change of its group, or of an epoch that nobody issued.

    It may be sent again at once.
    """
    message = f"membership epoch {push.epoch} is not this group's; send it again with {epoch}."
    return Refuse(push.worker, push.incarnation, "STALE_EPOCH", message, push.step, epoch)

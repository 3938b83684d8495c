"""What the PS and the workers of a run must have alike."""

from __future__ import annotations

from thinwire.ops.offer import FROM_WORKER, Offer
from thinwire.runtime.run.settings import Run


def fingerprint(run: Run, offer: Offer | None = None) -> list[tuple[str, str]]:
    """Return (name, value) of everything two nodes must agree on besides the model.

    What the script brings stands last: a PS without model compares the rows before it.

    Workers deal out the training set each by itself: where one does it otherwise, they train on
    overlapping parts, and nobody would notice.
    """
    data = run.data
    offered = [("model_from", FROM_WORKER)] if run.model_is_offered else []
    return [
        *run.method.fingerprint(),
        ("seed", str(run.seed)),
        ("partition", data.partition),
        ("dirichlet_alpha", str(data.dirichlet_alpha)),
        ("no_block_shuffle", str(data.no_block_shuffle)),
        *offered,
        *_followed_by_workers(run),
        *(offer.fingerprint() if offer is not None else ()),
    ]


def _followed_by_workers(run: Run) -> list[tuple[str, str]]:
    """Return what decides a rate that workers find out for themselves, between two exchanges."""
    if not (run.method.takes_local_steps and run.schedule.goes_on_in_rounds):
        return []
    return [
        ("learning_rate", str(run.schedule.learning_rate)),
        ("lr_schedule", run.schedule.text),
        ("iter_max", str(run.iter_max)),
        ("epochs", str(run.epochs)),
    ]


def shard_settings(run: Run, offer: Offer | None = None) -> list[tuple[str, str]]:
    """Return what every shard must have alike besides, though workers need not know it."""
    return [
        ("learning_rate", str(run.schedule.learning_rate)),
        ("lr_schedule", run.schedule.text),
        ("iter_max", str(run.iter_max)),
        ("epochs", str(run.epochs)),
        *((name, str(value)) for name, value in vars(run.guards).items()),
        *([("weights_digest", offer.weights_digest)] if offer is not None else ()),
    ]

"""What the PS and the workers of a run must have alike."""

from __future__ import annotations

from thinwire.ops.offer import FROM_WORKER, Offer
from thinwire.ops.run.settings import Run


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
        *(offer.fingerprint() if offer is not None else ()),
    ]


def shard_settings(run: Run, offer: Offer | None = None) -> list[tuple[str, str]]:
    """Return what every shard must have alike besides, though workers need not know it."""
    return [
        ("learning_rate", str(run.schedule.learning_rate)),
        ("lr_schedule", str(run.schedule.drops)),
        ("iter_max", str(run.iter_max)),
        ("epochs", str(run.epochs)),
        *((name, str(value)) for name, value in vars(run.guards).items()),
        *([("weights_digest", offer.weights_digest)] if offer is not None else ()),
    ]

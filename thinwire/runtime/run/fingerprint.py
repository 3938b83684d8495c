"""Settings that must be equal on the PS and the workers of a run."""

from __future__ import annotations

from thinwire.ops.offer import FROM_WORKER, Offer
from thinwire.runtime.run.settings import Run


def fingerprint(run: Run, offer: Offer | None = None) -> list[tuple[str, str]]:
    """Return (name, value) rows of the settings, except the model, that all nodes must share.

    The rows of the offer (a script's model that a worker sends to the PS) are the last settings
    rows, because a PS without a model compares only the earlier rows.

    Every worker computes the partition of the training set independently. If workers computed
    different partitions, the data of the workers would overlap without an error.
    """
    data = run.data
    follows_rate = run.method.takes_local_steps and run.schedule.goes_on_in_rounds
    offered = [("model_from", FROM_WORKER)] if run.model_is_offered else []
    return [
        *run.method.fingerprint(),
        *([("policy", run.policy.digest)] if run.policy is not None else []),
        ("seed", str(run.seed)),
        ("partition", data.partition),
        ("dirichlet_alpha", str(data.dirichlet_alpha)),
        ("no_block_shuffle", str(data.no_block_shuffle)),
        *offered,
        # From these, workers compute the learning rate between two exchanges.
        *(_rates_and_limits(run) if follows_rate else []),
        *(offer.fingerprint() if offer is not None else ()),
    ]


def _rates_and_limits(run: Run) -> list[tuple[str, str]]:
    return [
        ("learning_rate", str(run.schedule.learning_rate)),
        ("lr_schedule", run.schedule.text),
        ("iter_max", str(run.iter_max)),
        ("epochs", str(run.epochs)),
    ]


def shard_settings(run: Run, offer: Offer | None = None) -> list[tuple[str, str]]:
    """Return (name, value) rows of the settings that must be equal on all PS shards."""
    return [
        *_rates_and_limits(run),
        *((name, str(value)) for name, value in vars(run.guards).items()),
        *([("weights_digest", offer.weights_digest)] if offer is not None else ()),
    ]

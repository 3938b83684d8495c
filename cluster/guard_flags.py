"""The flags of guards against faulty devices: one line a flag."""

from __future__ import annotations

from ops import aggregate
from ops.guards import Guards
from ops.options import Rule, Topic, choice, integer, number

_IS_FRACTION = Rule(lambda value: 0 < value < 0.5, "must be above 0 and below 0.5")
_IS_FACTOR = Rule(lambda value: value == 0 or value > 1, "must be 0 (off) or above 1")

TOPIC = Topic(
    "Guards against faulty devices",
    (
        number(
            "max_update_norm",
            Guards.max_update_norm,
            "A shard refuses its part of a push if its L2 norm is larger; 0: off.",
            low=0.0,
        ),
        number(
            "update_norm_factor",
            Guards.update_norm_factor,
            "It refuses what exceeds so many times the median of the newest accepted norms of all "
            "workers; 0: off.",
            low=0.0,
            rule=_IS_FACTOR,
        ),
        integer(
            "quarantine_after",
            Guards.quarantine_after,
            "Offences (not finite, too large, malformed) within --quarantine_seconds after which a "
            "worker is put out; 0: off.",
            low=0,
        ),
        number(
            "quarantine_seconds",
            Guards.quarantine_seconds,
            "How long it is put out for the first time; each further time doubles it.",
            low=0.1,
        ),
        choice(
            "aggregate",
            aggregate.Mean.name,
            "What the updates of a synchronous group are merged into, entry by entry.",
            aggregate.REGISTRY,
        ),
        number(
            "trim_fraction",
            None,
            "Of a group's values that --aggregate=trimmed_mean leaves out on either side; 0.25 if "
            "not given, at least one value.",
            rule=_IS_FRACTION,
        ),
    ),
)

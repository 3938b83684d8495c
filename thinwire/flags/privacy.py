"""Flags of differential privacy; except for --dp_delta, they are equal on all nodes."""

from __future__ import annotations

from thinwire.ops.options import FlagRule, Topic, advanced, number
from thinwire.ops.policy import options_of
from thinwire.ops.privacy.central import CentralPrivacy
from thinwire.runtime.run.settings import Run

_IS_DELTA = FlagRule(lambda value: 0 < value < 1, "must be above 0 and below 1")

PRIVACY = Topic(
    "Differential privacy of each worker",
    advanced(
        *options_of(CentralPrivacy).values(),
        number(
            "dp_delta",
            Run.dp_delta,
            "Delta of differential privacy; status, summary and report show the epsilon for it.",
            "probability",
            rule=_IS_DELTA,
        ),
    ),
)

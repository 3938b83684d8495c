"""Flags of differential privacy; except for --dp_delta, they are equal on all nodes."""

from __future__ import annotations

from thinwire.ops.methods.builder import Choices
from thinwire.runtime.run.flags import FlagRule, Topic, advanced, number
from thinwire.runtime.run.settings import Run

_IS_DELTA = FlagRule(lambda value: 0 < value < 1, "must be above 0 and below 1")

PRIVACY = Topic(
    "Differential privacy of each worker",
    advanced(
        number(
            "dp_clip",
            Choices.dp_clip,
            "Largest L2 norm of the change that a worker makes to the whole model in a round; a "
            "larger change is scaled down to this norm; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        number(
            "dp_noise",
            Choices.dp_noise,
            "Standard deviation of the Gaussian noise that the PS adds to a round's mean, as a "
            "multiple of --dp_clip / number of workers in the round; 0: off.",
            "factor",
            low=0.0,
        ),
        number(
            "dp_delta",
            Run.dp_delta,
            "Delta of differential privacy; status, summary and report show the epsilon for it.",
            "probability",
            rule=_IS_DELTA,
        ),
    ),
)

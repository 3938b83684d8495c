"""The flags of differential privacy, the same on every node but for --dp_delta."""

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
            "Largest norm of the change that a worker's local steps make in a round, over the "
            "whole model; a larger one is scaled down. 0: off.",
            "L2 norm",
            low=0.0,
        ),
        number(
            "dp_noise",
            Choices.dp_noise,
            "Gaussian noise that the PS adds to a round's mean, over --dp_clip / workers of the "
            "round. 0: off.",
            "factor",
            low=0.0,
        ),
        number(
            "dp_delta",
            Run.dp_delta,
            "At which the accountant gives epsilon in status, summary and report.",
            "probability",
            rule=_IS_DELTA,
        ),
    ),
)

"""Flags that only a Supervisor reads."""

from __future__ import annotations

import dataclasses

from absl import flags

FLAGS = flags.FLAGS
_TOPIC = "Supervisor"


@dataclasses.dataclass(frozen=True)
class SupervisorFlags:
    """How often the central model is evaluated."""

    eval_interval_seconds: float
    eval_interval_updates: int


def define() -> None:
    """Register the flags."""
    flags.DEFINE_float(
        "eval_interval_seconds",
        60.0,
        "Seconds between two evaluations.",
        lower_bound=0.0,
        module_name=_TOPIC,
    )
    flags.DEFINE_integer(
        "eval_interval_updates",
        0,
        "Evaluate as soon as so many updates have been applied since the last evaluation; 0 goes "
        "by seconds alone.",
        lower_bound=0,
        module_name=_TOPIC,
    )


def read() -> SupervisorFlags:
    """Return the Supervisor's settings."""
    return SupervisorFlags(FLAGS.eval_interval_seconds, FLAGS.eval_interval_updates)

"""Flags that only a Supervisor reads."""

from __future__ import annotations

import dataclasses
import re

from absl import flags

from thinwire.ops.run.flags import FlagRule, Topic, advanced, integer, number, words

FLAGS = flags.FLAGS
_IS_FUNCTION = FlagRule(
    lambda text: re.fullmatch(r"[\w.]+:[\w.]+", text) is not None,
    "must be the names of a module and of its function: --on_metrics=module:function",
)

TOPICS = (
    Topic(
        "Supervisor",
        (
            number(
                "eval_interval_seconds", 60.0, "Time between two evaluations.", "seconds", low=0.0
            ),
            integer(
                "eval_interval_updates",
                0,
                "Also evaluate after so many applied updates; 0: by time alone.",
                "updates",
                low=0,
            ),
            words(
                "advice",
                None,
                "The advice.json of an Advisor, whose prediction the summary compares.",
                "file",
                unset="that in --run_dir, if there is one",
            ),
            words(
                "on_metrics",
                None,
                "A Python function that is called with each record: of W&B, MLflow and the like.",
                "module:function",
                rule=_IS_FUNCTION,
                unset="none",
            ),
            *advanced(
                number(
                    "status_interval_seconds",
                    10.0,
                    "Time between two lines of progress where there is no terminal.",
                    "seconds",
                    low=0.1,
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class SupervisorFlags:
    """How often the central model is evaluated, and the run shown."""

    eval_interval_seconds: float
    eval_interval_updates: int
    status_interval_seconds: float


def read() -> SupervisorFlags:
    """Return the Supervisor's settings."""
    return SupervisorFlags(
        FLAGS.eval_interval_seconds, FLAGS.eval_interval_updates, FLAGS.status_interval_seconds
    )

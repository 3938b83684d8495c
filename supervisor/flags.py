"""Flags that only a Supervisor reads."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.ops.run.flags import Topic, advanced, integer, number, words

FLAGS = flags.FLAGS

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

"""Flags that only an Advisor reads."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.flags import launch
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.flags import Topic, integer, number
from thinwire.runtime.run.settings import Run
from thinwire.worker import flags as worker_flags

FLAGS = flags.FLAGS

TOPICS = (
    Topic(
        "Advisor",
        (
            number(
                "advise_rate",
                0.8,
                "Propose the first composition, from true to lossy, that is predicted to reach "
                "this share of the samples per second that the workers could compute.",
                "fraction",
                low=0.01,
                high=1.0,
            ),
            number(
                "probe_seconds",
                30.0,
                "Most training time of each of the two runs that measure links; slow ones need "
                "more.",
                "seconds",
                low=1.0,
            ),
            integer(
                "advise_pushes",
                48,
                "Pushes of each worker from which a composition is predicted.",
                "pushes",
                low=4,
            ),
        ),
    ),
)
#: A run does not need them.
NAMES = tuple(option.name for topic in TOPICS for option in topic.options)


@dataclasses.dataclass(frozen=True)
class AdvisorFlags:
    """How to advise."""

    rate: float
    probe_seconds: float
    pushes: int


def check(run: Run) -> None:
    """Refuse what cannot be advised on, before anything heavy is imported.

    Raises:
        ConfigurationError: Emulated links or devices out of range, a launcher's flag out of place,
            advice that another Advisor gave, or sums among workers, which are not predicted.
    """
    worker_flags.devices(run.nb_workers)
    launch.check()
    if run.method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={run.method.collective}: an Advisor predicts exchanges with a PS only; "
            f"leave it out."
        )
    if FLAGS.advice:
        raise ConfigurationError(
            f"--advice={FLAGS.advice} is for the run that was advised on, and this is an Advisor; "
            "leave it out."
        )


def read() -> AdvisorFlags:
    """Return the Advisor's settings."""
    return AdvisorFlags(FLAGS.advise_rate, FLAGS.probe_seconds, FLAGS.advise_pushes)

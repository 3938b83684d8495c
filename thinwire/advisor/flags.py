"""Flags that only the Advisor role reads."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.flags import launch
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.options import Topic, integer, number
from thinwire.ops.types import ConfigurationError
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
                "The Advisor proposes the first composition of policies, from exact to lossy, "
                "that is predicted to reach this fraction of the samples per second that the "
                "workers reach without exchanging updates.",
                "fraction",
                low=0.01,
                high=1.0,
            ),
            number(
                "probe_seconds",
                30.0,
                "Largest training time of each of the two short runs with which the Advisor "
                "measures links; slow links need more time.",
                "seconds",
                low=1.0,
            ),
            integer(
                "advise_pushes",
                48,
                "Number of simulated pushes of each worker from which the Advisor predicts speeds.",
                "pushes",
                low=4,
            ),
        ),
    ),
)
#: Names of the Advisor's flags, which the proposed run does not need.
NAMES = tuple(option.name for topic in TOPICS for option in topic.options)


@dataclasses.dataclass(frozen=True)
class AdvisorFlags:
    """Settings of the Advisor role, from its flags.

    Attributes:
        rate: Share, 0.01 to 1, of the workers' samples per second without communication, that is
            fast enough for a proposed composition.
        probe_seconds: Largest training time of each probe (short measuring run), in seconds.
        pushes: Number of pushes of each worker in the simulation of a composition of policies.
    """

    rate: float
    probe_seconds: float
    pushes: int


def check(run: Run) -> None:
    """Reject flags that the Advisor role cannot use, before TensorFlow is imported.

    Raises:
        ConfigurationError: Flags of emulated links or devices are out of range, a launcher's flag
            has no effect, --advice is set, or --collective selects an all-reduce, which the Advisor
            does not predict.
    """
    worker_flags.devices(run.nb_workers)
    launch.check()
    if run.method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={run.method.collective}: the Advisor only predicts exchanges with a PS; "
            "leave --collective out."
        )
    if FLAGS.advice:
        raise ConfigurationError(
            f"--advice={FLAGS.advice} is for a run that follows the advice, but this command is "
            "an Advisor; leave --advice out."
        )


def read() -> AdvisorFlags:
    """Return the Advisor's settings from the flags."""
    return AdvisorFlags(FLAGS.advise_rate, FLAGS.probe_seconds, FLAGS.advise_pushes)

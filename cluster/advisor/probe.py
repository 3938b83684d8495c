"""Two short real runs with the nodes, hosts and links of the run in question."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

from absl import flags, logging

from cluster import codec_flags, flag_tables
from cluster.advisor import candidates
from cluster.advisor import flags as advisor_flags
from cluster.launch import MAIN, environment, given_flags
from ops.methods import SEAMS
from ops.rounds import Round
from ops.run import EXIT_INTERRUPTED, Run
from ops.signals import heard_by
from ops.types import ConfigurationError
from supervisor.measured import rounds_by_worker

FLAGS = flags.FLAGS
_TURN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Probe:
    """One of the runs: its name, its composition, how many updates for each worker."""

    name: str
    flags: tuple[str, ...]
    rounds: int


#: Nobody runs far ahead, so that the slowest worker has enough rounds too, and nobody waits long.
DENSE = Probe("dense", ("--method=ssp", "--staleness_bound=2"), 8)
SPARSE = Probe(
    "sparse",
    (
        *("--method=gd", "--sync=ssp", "--staleness_bound=4"),
        *("--compression_rate=0.01", "--down_codec=sparse", "--resync_every=4"),
    ),
    20,
)

#: A probe says itself what method it is, where it writes and when it stops.
_OWN_TOPICS = ("Method", codec_flags.TOPIC.title, "When to stop")

_KEPT = ("batch_size", "learning_rate", "bn_sync")
_OWN = (
    *("type_node", "flagfile", "run_dir", "overwrite", "advice", "measure"),
    *("eval_interval_seconds", "eval_interval_updates", *advisor_flags.NAMES),
)


class ProbeFailed(Exception):
    """A probe ended with an exit code other than 0, which is its only argument."""


def play(run: Run, probe: Probe, seconds: float) -> dict[int, list[Round]]:
    """Run a probe with real processes.

    Args:
        run: The run in question.
        probe: What to play.
        seconds: How long it may train.

    Returns:
        The rounds of every worker that finished one, by id.

    Raises:
        ProbeFailed: It did not come to its end; its own words are in the log.
        ConfigurationError: It left no rounds.
    """
    folder = run.run_dir / "advice" / probe.name
    logging.info("measuring: %s run, at most %g s of training", probe.name, seconds)
    code = _wait_for(command(run, probe, seconds, folder))
    if code:
        raise ProbeFailed(code)
    try:
        return rounds_by_worker(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no worker finished an exchange while links were measured ({error}); raise "
            f"--probe_seconds (now {seconds:g})."
        ) from error


def command(run: Run, probe: Probe, seconds: float, folder: pathlib.Path) -> list[str]:
    """Return the command line of a probe."""
    elsewhere = FLAGS.hosts_file or FLAGS.launcher not in (None, "local") or FLAGS.ps_hosts
    here = not (FLAGS["port"].present or elsewhere)
    return [
        *(sys.executable, str(MAIN), "--type_node=Cluster"),
        *given_flags({*_of_method(), *_OWN}),
        *(["--port=0"] if here else []),
        *probe.flags,
        *(f"--iter_max={probe.rounds * run.nb_workers}", f"--max_seconds={seconds:g}"),
        *(f"--run_dir={folder}", "--overwrite", "--eval_interval_seconds=1000000", "--quiet"),
    ]


def composition(probe: Probe, folder: pathlib.Path) -> Run:
    """Return the run that a probe is, for this process to play."""
    plain = copy.deepcopy(FLAGS)
    for name in _of_method():
        plain[name].unparse()
    return candidates.compose(probe.flags, folder, plain)


def _of_method() -> set[str]:
    """Return the flags that say which method a run is, and when it stops."""
    topics = [topic for topic in flag_tables.TOPICS if topic.title in _OWN_TOPICS]
    return {option.name for topic in topics for option in topic.options}.difference(_KEPT).union(
        SEAMS
    )


def _wait_for(arguments: list[str]) -> int:
    """Run a command to its end; what ends us ends it."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        del frame
        logging.info("%s: ending the measurement", signal.Signals(number).name)
        interrupted.set()

    with heard_by(interrupt):
        process = subprocess.Popen(arguments, start_new_session=True, env=environment())
        while process.poll() is None and not interrupted.wait(_TURN_SECONDS):
            pass
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait()
    return EXIT_INTERRUPTED if interrupted.is_set() else code

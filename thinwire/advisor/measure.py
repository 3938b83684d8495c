"""Measures devices and links by two short real runs (probes) on the nodes of the planned run.

In the Advisor's *dense* probe, workers push dense gradients and pull the whole model. In the
Advisor's *sparse* probe, workers push few gradient entries; most replies of the PS are small, and
every fourth reply has the whole model. Training rounds of three kinds (dense, sparse with a small
reply, sparse with the whole model as reply) differ in their bytes on the uplink and on the
downlink, and in their coding time, which is measured on this machine. For each worker,
`worker_link` solves the equations

    round time = step time + coding time + bytes up / rate up + bytes down / rate down + round trip

for both rates and the round-trip time.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.advisor import predict
from thinwire.flags.method import OF_METHODS
from thinwire.flags.run import STOP
from thinwire.launcher.program import NODE
from thinwire.launcher.role import environment, given_flags
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import EXIT_INTERRUPTED, Run
from thinwire.runtime.run.signals import handle_signals
from thinwire.runtime.telemetry.predictions import WorkerLink
from thinwire.runtime.telemetry.round_trace import FORWARD_AND_BACKWARD, GET_BATCH, Round
from thinwire.tools.esync.runs import rounds_by_worker

FLAGS = flags.FLAGS
_POLL_SECONDS = 0.2
#: A PS's reply that is larger than this share of a dense reply counts as the whole model.
_WHOLE = 0.5
_BITS = 8e-6  # megabits per byte
_FASTEST_MBPS = 1e6  # a higher link rate is an artifact of the clock's resolution
#: Topics of flags (training method, end of the run) that a probe (short measuring run) sets itself.
_OWN_TOPICS = (*OF_METHODS, STOP)
#: Names of flags of `_OWN_TOPICS` that a probe (short measuring run) nevertheless takes from the
#: planned run.
_KEPT = ("batch_size", "learning_rate", "bn_sync")
#: Names of flags outside `_OWN_TOPICS` that a probe (short measuring run) does not take from the
#: planned run.
_OWN = (
    *("type_node", "flagfile", "run_dir", "overwrite", "resume", "advice", "measure", "on_metrics"),
    *("eval_interval_seconds", "eval_interval_updates", *advisor_flags.NAMES),
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A probe: one of the two short training runs that measure devices and links.

    Attributes:
        name: Name of the probe (short measuring run), and of the folder of its run directory.
        flags: Flags that select the composition of policies of the probe (short measuring run).
        rounds: Number of updates that the probe (short measuring run) makes per worker.
    """

    name: str
    flags: tuple[str, ...]
    rounds: int


#: Probe (short measuring run) that pushes and pulls the whole model. The staleness bounds of the
#: probes are small, so that fast workers do not use up the updates and the slowest worker also
#: finishes enough rounds. The staleness bounds are not 0, so that workers wait for each other only
#: shortly.
DENSE = Probe("dense", ("--method=ssp", "--staleness_bound=2"), 8)
SPARSE = Probe(
    "sparse",
    (
        *("--method=gd", "--sync=ssp", "--staleness_bound=4"),
        *("--compression_rate=0.01", "--down_codec=sparse", "--resync_every=4"),
    ),
    20,
)


class ProbeFailed(Exception):
    """A probe (short measuring run) failed; the exception's argument is the probe's exit code."""


def play(run: Run, probe: Probe, seconds: float) -> dict[int, list[Round]]:
    """Run a probe (short measuring run) with real processes on the nodes of the planned run.

    Args:
        run: Settings of the planned run.
        probe: Probe (short measuring run) to start.
        seconds: Largest training time of the probe (short measuring run), in seconds.

    Returns:
        Worker id -> the worker's finished rounds (training step and exchange).

    Raises:
        ProbeFailed: The probe (short measuring run) did not reach its end; the log has its
            messages.
        ConfigurationError: No worker finished a round of training in the probe (measuring run).
    """
    folder = run.run_dir / "advice" / probe.name
    logging.info("measuring links: %s run, at most %g s of training", probe.name, seconds)
    code = _wait_for(command(run, probe, seconds, folder))
    if code:
        raise ProbeFailed(code)
    try:
        return rounds_by_worker(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no worker finished an exchange with the PS while links were measured ({error}); "
            f"raise --probe_seconds (now {seconds:g} seconds)."
        ) from error


def command(run: Run, probe: Probe, seconds: float, folder: pathlib.Path) -> list[str]:
    """Return the command line that starts a probe (short measuring run) by the Cluster role."""
    elsewhere = FLAGS.hosts_file or FLAGS.launcher not in (None, "local") or FLAGS.ps_hosts
    is_local = not (FLAGS["port"].present or elsewhere)
    return [
        *(sys.executable, *NODE, "--type_node=Cluster"),
        *given_flags({*_of_method(), *_OWN}),
        *(["--port=0"] if is_local else []),
        *probe.flags,
        *(f"--iter_max={probe.rounds * run.nb_workers}", f"--max_seconds={seconds:g}"),
        *(f"--run_dir={folder}", "--overwrite", "--eval_interval_seconds=1000000", "--quiet"),
    ]


def composition(probe: Probe, folder: pathlib.Path) -> Run:
    """Return the settings with which this process simulates a probe (short measuring run)."""
    plain = copy.deepcopy(FLAGS)
    for name in _of_method():
        plain[name].unparse()
    return predict.compose(probe.flags, folder, plain)


def _of_method() -> set[str]:
    """Return the names of the flags that choose a run's training method and when it stops."""
    names = {option.name for topic in _OWN_TOPICS for option in topic.options}
    return names.difference(_KEPT)


def _wait_for(arguments: list[str]) -> int:
    """Run a command to its end; return its exit code, or EXIT_INTERRUPTED after a signal.

    If this process receives a signal to end, it sends SIGINT to the command that it runs.
    """
    interrupted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        logging.info("received %s: ending the link measurement", signal.Signals(number).name)
        interrupted.set()

    with handle_signals(interrupt):
        process = subprocess.Popen(arguments, start_new_session=True, env=environment())
        while process.poll() is None and not interrupted.wait(_POLL_SECONDS):
            pass
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait()
    return EXIT_INTERRUPTED if interrupted.is_set() else code


@dataclasses.dataclass(frozen=True)
class _RoundMedians:
    """Medians over one worker's training rounds of one kind, for example with a dense reply.

    Attributes:
        exchange_seconds: Median time of a training round without its gradient step and without the
            wait for other workers, in seconds.
        bytes_up: Median number of bytes that the worker sends in a training round.
        bytes_down: Median number of bytes that the worker receives in a training round.
    """

    exchange_seconds: float
    bytes_up: float
    bytes_down: float


def worker_link(
    worker: int,
    dense: Sequence[Round],
    sparse: Sequence[Round],
    dense_coding: float,
    sparse_coding: float,
) -> WorkerLink:
    """Return the measured step time, link rates and round-trip time of one worker.

    Args:
        worker: Id of the measured worker, from 1.
        dense: The worker's training rounds in the dense measuring run.
        sparse: The worker's training rounds in the sparse measuring run.
        dense_coding: Time on this machine to encode, decode and apply one update of the dense
            measuring run, in seconds.
        sparse_coding: The same time of the sparse measuring run.

    Raises:
        ConfigurationError: The worker finished no dense round, no sparse round with a small reply,
            or no sparse round with the whole model as reply.
    """
    dense, sparse = _warm(dense), _warm(sparse)
    size = max((record.bytes_received for record in dense), default=0)
    both = _medians_of(worker, "whole model both ways", dense)
    whole = [record for record in sparse if record.bytes_received > _WHOLE * size]
    down = _medians_of(worker, "whole model down", whole)
    small = [record for record in sparse if record.bytes_received <= _WHOLE * size]
    little = _medians_of(worker, "sparse update", small)
    more_down = down.bytes_down - little.bytes_down
    down_seconds = max(0.0, down.exchange_seconds - little.exchange_seconds)
    both_seconds = (both.exchange_seconds - dense_coding) - (
        little.exchange_seconds - sparse_coding
    )
    # A dense round takes `both_seconds` more than a sparse round with a small reply, and the dense
    # round's additional download takes down_seconds * share. With noise, the measured download can
    # be longer than upload and download together, so `min` keeps the upload's time from becoming
    # negative.
    share = (both.bytes_down - little.bytes_down) / more_down
    down_seconds = min(down_seconds, max(0.0, both_seconds) / share)
    up_seconds = max(0.0, both_seconds - down_seconds * share)
    up_mbps = _mbps(both.bytes_up - little.bytes_up, up_seconds)
    down_mbps = _mbps(more_down, down_seconds)
    on_the_way = _seconds(little.bytes_up, up_mbps) + _seconds(little.bytes_down, down_mbps)
    return WorkerLink(
        worker=worker,
        step_seconds=_median(_step_seconds, small),
        up_mbps=up_mbps,
        down_mbps=down_mbps,
        round_trip_seconds=max(0.0, little.exchange_seconds - sparse_coding - on_the_way),
        rounds=len(dense) + len(sparse),
    )


def _warm(rounds: Sequence[Round]) -> list[Round]:
    """Drop the first training round of each worker process, which includes one-time delays."""
    return [record for record in rounds if record.num_iters > 1]


def _medians_of(worker: int, what: str, rounds: Sequence[Round]) -> _RoundMedians:
    if not rounds:
        raise ConfigurationError(
            f"worker {worker} finished fewer than two exchanges of the kind '{what}' with the PS "
            "while its link was measured; expected at least two. Raise --probe_seconds."
        )
    return _RoundMedians(
        exchange_seconds=_median(_exchange_seconds, rounds),
        bytes_up=_median(lambda each: each.bytes_sent, rounds),
        bytes_down=_median(lambda each: each.bytes_received, rounds),
    )


def _median(value: Callable[[Round], float], rounds: Sequence[Round]) -> float:
    return float(statistics.median(value(record) for record in rounds))


def _step_seconds(each: Round) -> float:
    return each.time.get(GET_BATCH, 0.0) + each.time.get(FORWARD_AND_BACKWARD, 0.0)


def _exchange_seconds(each: Round) -> float:
    return sum(each.time.values()) - each.barrier_wait - _step_seconds(each)


def _mbps(num_bytes: float, seconds: float) -> float:
    """Return a link's rate in Mbit/s; 0 (no limit) if the time is too short to measure a rate."""
    slow_enough = seconds > 0 and _BITS * num_bytes / seconds < _FASTEST_MBPS
    return _BITS * num_bytes / seconds if slow_enough else 0.0


def _seconds(num_bytes: float, mbps: float) -> float:
    return _BITS * num_bytes / mbps if mbps else 0.0

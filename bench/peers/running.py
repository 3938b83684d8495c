"""Run one contender once: start its processes in their places, wait, kill them, evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bench.peers import curves, work
from bench.peers.contenders import ROOT, Contender, PeerNode, environment_of
from bench.peers.lab import Lab
from thinwire.runtime.run.settings import EXIT_DIVERGED

#: Program that runs a command which the kernel kills when the harness ends: PR_SET_PDEATHSIG
#: persists over an exec. A preexec_fn would run between fork and exec, where gRPC in the harness
#: process may abort it.
_BOUND = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)
#: Time to import, build and trace, and to finish the last step that starts in time, in seconds.
_START_SECONDS = 180.0
_POLL_SECONDS = 0.2
_SHOWN_BYTES = 1500


class PeerFailed(Exception):
    """A run failed; the message has the end of the processes' output."""


class PeerDiverged(PeerFailed):
    """A Thinwire worker stopped because its gradients became infinite or NaN: a valid result."""


@dataclasses.dataclass
class _PeerProcess:
    node: PeerNode
    process: subprocess.Popen[bytes]
    output: Path


def run(
    contender: Contender,
    task: work.Work,
    lab: Lab,
    targets: Sequence[float],
    evaluate: Callable[[Path], float],
) -> dict[str, Any]:
    """Train once and return the measurements as plain data.

    Raises:
        PeerFailed: A process failed or exceeded the time limit, or no step was done.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-peers-") as name:
        folder = Path(name)
        task = dataclasses.replace(task, folder=name)
        nodes = contender.nodes(task, lab)
        with lab.counting(), _started(nodes, lab, folder) as children:
            _wait(children, task.seconds + _START_SECONDS, contender.sort == "ours", folder)
        try:
            # Thinwire's watcher sees the samples of a round only when the round ends.
            unseen = contender.round_steps * task.workers if contender.sort == "ours" else 0
            steps, snapshots = curves.read(folder, unseen)
            warm = curves.rates(steps, lab.bytes(), contender.round_steps > 0)
        except ValueError as error:
            raise PeerFailed(f"{error}; {_outputs(children)}") from error
        costs = curves.points(snapshots, steps, lab.bytes())
        curve = curves.evaluated(costs, targets, evaluate)
    return {
        "samples_per_second": warm.steps_per_second * task.batch_size,
        "rates": dataclasses.asdict(warm),
        "steps": steps.at(steps.ended),
        "seconds": steps.ended - steps.began,
        "curve": [dataclasses.asdict(point) for point in curve],
    }


@contextlib.contextmanager
def _started(nodes: Sequence[PeerNode], lab: Lab, folder: Path) -> Iterator[list[_PeerProcess]]:
    """Start every node, and kill all nodes when the block ends."""
    children: list[_PeerProcess] = []
    try:
        for number, node in enumerate(nodes):
            path = folder / f"output-{number}.txt"
            with open(path, "wb") as output:
                process = _start(node, lab, output)
            children.append(_PeerProcess(node, process, path))
        yield children
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()


def _start(node: PeerNode, lab: Lab, output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOUND, *lab.places[node.place].prefix, *node.command],
        cwd=ROOT,
        env=environment_of(node),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _wait(children: Sequence[_PeerProcess], seconds: float, is_ours: bool, folder: Path) -> None:
    """Wait until the leading node ends, or until the time limit if there is a snapshot.

    A peer's step may wait for an exchange for longer than the run lasts. The run's snapshots until
    the time limit are then its result.

    Raises:
        PeerDiverged: The gradients were not finite: the learning rate is too high.
        PeerFailed: A node failed, or the time limit is over and there is no snapshot.
    """
    (leader,) = (child for child in children if child.node.leads)
    deadline = time.monotonic() + seconds
    while (code := leader.process.poll()) is None:
        for child in children:
            if child.process.poll() not in (None, 0):
                code, command = child.process.returncode, " ".join(child.node.command)[:200]
                if is_ours and code == EXIT_DIVERGED:
                    raise PeerDiverged("diverged: gradients became infinite or NaN")
                raise PeerFailed(f"a process ended with {code}: {command}; {_tail(child)}")
        if time.monotonic() > deadline:
            if any(folder.glob("*.npy")):
                return
            raise PeerFailed(f"not done after {seconds:.0f} s; {_outputs(children)}")
        time.sleep(_POLL_SECONDS)
    if code:
        raise PeerFailed(f"the leader ended with {code}; {_outputs(children)}")


def _tail(child: _PeerProcess) -> str:
    return child.output.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()


def _outputs(children: Sequence[_PeerProcess]) -> str:
    tails = (_tail(child) for child in children)
    return " | ".join(tail for tail in tails if tail) or "no output"

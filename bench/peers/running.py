"""Runs one contender once: starts its processes in their places, waits, ends them, evaluates."""

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

#: Runs a command that ends with this process: prctl(PR_SET_PDEATHSIG), which outlasts an exec. It
#: is no preexec_fn, for gRPC in this process may abort what runs between a fork and an exec.
_BOUND = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)
#: To import, build and trace, and to end after the last step that may begin in time.
_START_SECONDS = 180.0
_POLL_SECONDS = 0.2
_SHOWN_BYTES = 1500


class PeerFailed(Exception):
    """A run did not end as it should; the message has the end of its processes' output."""


class PeerDiverged(PeerFailed):
    """One of our workers gave up because its gradients were not finite any more: an outcome."""


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
    """Train once and return what was measured, as plain data.

    Raises:
        PeerFailed: A process ended too early or badly, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-peers-") as name:
        folder = Path(name)
        task = dataclasses.replace(task, folder=name)
        nodes = contender.nodes(task, lab)
        with lab.counting(), _started(nodes, lab, folder) as children:
            _wait(children, task.seconds + _START_SECONDS, contender.sort == "ours", folder)
        try:
            # Ours reports rounds as they end.
            unseen = contender.round_steps * task.workers if contender.sort == "ours" else 0
            steps, snapshots = curves.read(folder, unseen)
            warm = curves.rates(steps, lab.bytes(), contender.round_steps > 0)
        except ValueError as error:
            raise PeerFailed(f"{error}; {_outputs(children)}") from error
        kept = curves.points(snapshots, steps, lab.bytes())
        curve = curves.evaluated(kept, targets, evaluate)
    return {
        "samples_per_second": warm.steps_per_second * task.batch_size,
        "rates": dataclasses.asdict(warm),
        "steps": steps.at(steps.ended),
        "seconds": steps.ended - steps.began,
        "curve": [dataclasses.asdict(point) for point in curve],
    }


@contextlib.contextmanager
def _started(nodes: Sequence[PeerNode], lab: Lab, folder: Path) -> Iterator[list[_PeerProcess]]:
    """Start every node, and end all of them."""
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
    """Wait for the node that leads, or until the time is over and it has kept a model.

    A step of a peer may wait for an exchange for longer than the run: what it kept before counts.

    Raises:
        PeerDiverged: The learning rate is too high.
        PeerFailed: It ended badly or not at all, or another one ended before it.
    """
    (leader,) = (child for child in children if child.node.leads)
    deadline = time.monotonic() + seconds
    while (code := leader.process.poll()) is None:
        for child in children:
            if child.process.poll() not in (None, 0):
                code, command = child.process.returncode, " ".join(child.node.command)[:200]
                if is_ours and code == EXIT_DIVERGED:
                    raise PeerDiverged("diverged: its gradients were not finite any more")
                raise PeerFailed(f"ended with {code}: {command}; {_tail(child)}")
        if time.monotonic() > deadline:
            if any(folder.glob("*.npy")):
                return
            raise PeerFailed(f"not done after {seconds:.0f} s; {_outputs(children)}")
        time.sleep(_POLL_SECONDS)
    if code:
        raise PeerFailed(f"ended with {code}; {_outputs(children)}")


def _tail(child: _PeerProcess) -> str:
    return child.output.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()


def _outputs(children: Sequence[_PeerProcess]) -> str:
    tails = (_tail(child) for child in children)
    return " | ".join(tail for tail in tails if tail) or "no output"

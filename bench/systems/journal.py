"""Measure the cost of a PS's journal: in a real run, and in a shard that only applies pushes.

The real run trains mnist_cnn with batch size 64, a PS and 2 workers with one thread each. The PS
writes its journal in every other turn of two seconds (`bench.systems.journal_turns`), and pairs of
turns are compared. The shard alone gets prepared pushes without a network, as fast as it applies
them; the processor time of its writer thread is compared with and without a journal.

    python -m bench.systems.journal --seconds 2 --turns 40
    python -m bench.systems.journal --shard
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.peers import thinwire
from bench.table import Row, render
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.sharding.split import shard_spec
from thinwire.ops.types import ModelSpec, TensorSpec, Update
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator
from thinwire.ps.persistence.journal import Journal, JournaledCore
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import ReplaySettings
from thinwire.ps.wire.push_decoder import PushDecoder

METHODS = ("adacomp", "dgs")
#: Minimum of the update rate with the journal, divided by the rate without it.
_GOAL = 1 / 1.05
_WORKERS = 2
_FLAGS = (
    *("--network=mnist_cnn", "--batch_size=64", "--worker_threads=1", "--learning_rate=0.01"),
    *(f"--nb_workers={_WORKERS}", "--iter_max=100000000"),
)
_PATIENCE_SECONDS = 200.0  # time to start and to end on a busy machine
_KEPT = 0.01  # share of the entries that a push contains
_TURN = 60  # pushes in one turn
_TURNS = 25
MNIST_CNN = ModelSpec(
    tuple(
        TensorSpec(f"w{number}", shape)
        for number, shape in enumerate(
            ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,))
        )
    )
)


def rows(seconds: float = 2.0, turns: int = 40) -> list[Row]:
    """Measure the runs and the shard; return the table's rows."""
    return [*run_rows(seconds, turns), *(shard_row(method) for method in METHODS)]


def run_rows(seconds: float, turns: int) -> list[Row]:
    """Compare turns with and without a journal in one run per method; return the rows."""
    return [_run_row(method, seconds, turns) for method in METHODS]


def _run_row(method: str, seconds: float, turns: int) -> Row:
    lines = _turns_of(method, seconds, turns)
    off, on = (
        [line["updates"] / line["seconds"] for line in lines if line["on"] is writes]
        for writes in (False, True)
    )
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    costs = [line["writer_seconds"] / max(1, line["updates"]) for line in lines]
    cost = statistics.median(costs[1::2]) - statistics.median(costs[::2])
    note = f"{len(ratios)} pairs, half {low:.3f} to {high:.3f}; writer {1e6 * cost:+.0f} us a push"
    name = f"{method} with a journal / without"
    rates = (statistics.median(on), "updates/s", statistics.median(off))
    return Row(name, *rates, median, _GOAL, "higher", note)


def _turns_of(method: str, seconds: float, turns: int) -> list[dict[str, Any]]:
    """Execute a run whose PS alternates its journal; return the PS's record of each turn."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as probe:
        folder, port = pathlib.Path(name), probe.getsockname()[1]
        common = [*_FLAGS, f"--method={method}", f"--port={port}", f"--run_dir={folder / 'run'}"]
        probe.close()
        report = folder / "turns.json"
        ps = ["-m", "bench.systems.journal_turns", str(report), str(seconds), str(turns), *common]
        commands = [[*ps, "--type_node=PS", "--journal=on", "--linger_seconds=3"]]
        commands += [
            ["main.py", *common, "--type_node=Worker", f"--id_worker={worker}"]
            for worker in range(1, _WORKERS + 1)
        ]
        _play(commands, folder, 2 * seconds * turns + _PATIENCE_SECONDS)
        lines: list[dict[str, Any]] = json.loads(report.read_text())
        return lines


def _play(commands: Sequence[Sequence[str]], folder: pathlib.Path, seconds: float) -> None:
    """Run Python processes together until all of them end, without output.

    Raises:
        RuntimeError: A process failed; the message has the end of the processes' output.
        subprocess.TimeoutExpired: A process ran longer than `seconds`.
    """
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with open(folder / "output.txt", "w+") as output:
        started = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=thinwire.ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )
            for command in commands
        ]
        try:
            codes = [process.wait(seconds) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes):
            output.seek(0)
            raise RuntimeError(f"exit codes {codes}: {output.read()[-2000:]}")


class JournaledShard:
    """A shard that applies the pushes of two workers one after the other.

    Args:
        method: Name of the training method.
        spec: Tensors of the model.
        folder: Folder of the journal; None for a shard without a journal.
    """

    def __init__(self, method: str, spec: ModelSpec, folder: pathlib.Path | None) -> None:
        self.method, bodies = _method(method), load_kernels("numpy")
        (self.layout,) = self.method.place(spec, 1)
        part = shard_spec(spec, self.layout)
        config = CoreConfig(Budget(1 << 40), Schedule(0.01), _WORKERS, spec=part)
        theta = np.random.default_rng(1).normal(size=self.layout.size).astype(np.float32)
        membership = Coordinator(_WORKERS, 1e9)
        self.core = PsCore(config, self.method, theta, bodies, membership)
        self.journaled = JournaledCore(self.core)
        self.coder = EventCoder(self.layout, self.method, bodies)
        self.decoder = PushDecoder(self.layout, self.method.kind, bodies)
        self.now, self._steps = 0.0, 0
        if folder is not None:
            journal = Journal(folder, self.coder, theta.nbytes)
            self.journaled.write_to(journal, ReplaySettings(config, 10.0).to_plain())
            self.journaled.begin()
            self.decoder.keeps_coded = True
        for worker in range(1, _WORKERS + 1):
            self._handle(events.Join(worker, worker, False, "peer"))
            self._handle(events.Pull(worker, worker, None, 0))

    def _handle(self, event: events.Event) -> list[events.Action]:
        self.now += 0.001
        return self.journaled.handle(event, self.now)

    def pushes(self, updates: Sequence[Update]) -> list[events.Push]:
        """Return one decoded push per update, alternating the workers, for the writer thread."""
        decoded = []
        for update in updates:
            self._steps += 1
            worker = 1 + self._steps % _WORKERS
            version = self.core.version + len(decoded)
            base = max(0, version - _WORKERS + 1)
            head = PushHead(self._steps, samples=64, local_steps=1, loss=0.5)
            push = events.Push(worker, worker, 2, head, PushOrigin(base), update)
            message, pieces = self.coder._coded(push)
            decoded.append(self.decoder.decode(worker, message, memoryview(b"".join(pieces))))
        return decoded

    def apply(self, pushes: Sequence[events.Push]) -> float:
        """Apply the pushes; return the processor seconds of one push.

        Processor time excludes the work of other processes on the machine.
        """
        start = time.thread_time()
        for push in pushes:
            self._handle(push)
        return (time.thread_time() - start) / len(pushes)


def _method(name: str) -> Method:
    return compose(
        Choices.of(method=name, nb_workers=_WORKERS, compression_rate=_KEPT, overrides={})
    )


def updates_of(size: int, count: int, fraction: float = _KEPT) -> Iterator[Update]:
    """Yield `count` random sparse updates that contain the share `fraction` of `size` entries."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        at = np.flatnonzero(rng.random(size) < fraction)
        yield Update(at, rng.normal(size=len(at)).astype(np.float32))


def shard_row(method: str) -> Row:
    """Compare a shard with a journal and a shard without one; return the row."""
    updates = list(updates_of(MNIST_CNN.num_parameters, _TURN))
    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        shards = [
            JournaledShard(method, MNIST_CNN, where) for where in (None, pathlib.Path(folder))
        ]
        for turn in range(_TURNS + 1):
            for shard, shard_times in zip(shards, times, strict=True):
                seconds = shard.apply(shard.pushes(updates))
                if turn:
                    shard_times.append(seconds)
        if len({shard.core.version for shard in shards}) != 1 or shards[0].core.counters.rejected:
            raise RuntimeError(
                "the shard with a journal applied other updates than the shard without"
            )
    off, on = (statistics.median(shard_times) for shard_times in times)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    note = f"{1e6 * (on - off):.0f} us a push; half of the turns {low:.2f} to {high:.2f}"
    name = f"{method}, a shard at its limit, with a journal / without"
    return Row(name, 1 / on, "updates/s", 1 / off, statistics.median(ratios), None, "higher", note)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    options.add_argument(
        "--turns", type=int, default=40, help="number of turns in each method's run"
    )
    options.add_argument(
        "--shard", action="store_true", help="measure only the shard without a network"
    )
    arguments = options.parse_args()
    table_rows = [] if arguments.shard else run_rows(arguments.seconds, arguments.turns)
    table_rows += [shard_row(method) for method in METHODS]
    sys.stdout.write(render(table_rows))


if __name__ == "__main__":
    main()

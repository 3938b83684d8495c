"""What a journal costs: real runs with and without one, and a shard that does nothing but apply.

mnist_cnn, batch 64, 2 workers of one thread. The runs take turns: off, on, off, on. The shard is
handed pushes that are ready, as fast as it takes them, which no network does; what the writer
thread then takes of a core is compared.

    python -m bench.journal --seconds 20 --rounds 3
    python -m bench.journal --shard
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np

from bench.peers import thinwire
from bench.table import Row, render
from ops import kernels
from ops.compose import Choices, compose
from ops.methods import Method
from ops.schedule import Budget, Schedule
from ops.types import ModelSpec, TensorSpec, Update
from ps import events
from ps.core import PsCore
from ps.journal import Journal
from ps.journal_records import Coder
from ps.journaled import JournaledCore
from ps.members import CoreConfig
from ps.membership import Coordinator
from ps.pushes import PushDecoder
from ps.replay import Settings

METHODS = ("adacomp", "dgs")
#: Without the journal / with it, in updates a second.
_GOAL = 1 / 1.05
_ROUNDS = 2
_WORKERS = 2
_FLAGS = (
    *("--type_node=Cluster", "--network=mnist_cnn", "--batch_size=64", "--worker_threads=1"),
    *(f"--nb_workers={_WORKERS}", "--iter_max=100000000", "--eval_interval_seconds=100000"),
    *("--learning_rate=0.01", "--port=0"),
)
_WARMUP_SECONDS = 6.0  # tracing, and the first evaluation
_PATIENCE_SECONDS = 200.0  # to start and to end, on a busy machine
_KEPT = 0.01
_TURN = 60  # pushes
_TURNS = 25
MNIST_CNN = ModelSpec(
    tuple(
        TensorSpec(f"w{number}", shape)
        for number, shape in enumerate(
            ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,))
        )
    )
)


def rows(seconds: float = 20.0) -> list[Row]:
    """Measure, and return the rows of the table."""
    return [*run_rows(seconds, _ROUNDS), *(shard_row(method) for method in METHODS)]


def run_rows(seconds: float, rounds: int) -> list[Row]:
    """Compare runs of processes; the note tells the ratios of all rounds."""
    return [_run_row(method, seconds, rounds) for method in METHODS]


def _run_row(method: str, seconds: float, rounds: int) -> Row:
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        for journal, found in rates.items():
            found.append(_rate(method, journal, seconds))
    off, on = (statistics.median(found) for found in rates.values())
    ratios = sorted(b / a for a, b in zip(*rates.values(), strict=True))
    note = "of each round: " + ", ".join(f"{ratio:.3f}" for ratio in ratios)
    name = f"{method} with a journal / without"
    return Row(name, on, "updates/s", off, statistics.median(ratios), _GOAL, "higher", note)


def _rate(method: str, journal: str, seconds: float) -> float:
    """Return the updates a second of a run, warm-up left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [sys.executable, str(thinwire.ROOT / "main.py"), *_FLAGS]
        command += [f"--method={method}", f"--journal={journal}"]
        command.append(f"--max_seconds={_WARMUP_SECONDS + seconds}")
        thinwire.run(command, _WARMUP_SECONDS + seconds + _PATIENCE_SECONDS, folder)
        entries = [e for e in thinwire.statuses(folder) if e["seconds"] >= _WARMUP_SECONDS]
    first, last = entries[0], entries[-1]
    return (last["version"] - first["version"]) / (last["seconds"] - first["seconds"])


class Shard:
    """One shard of two workers, whose pushes come one after the other.

    Args:
        method: Its name.
        spec: The model.
        folder: Of its journal; None: it keeps none.
    """

    def __init__(self, method: str, spec: ModelSpec, folder: pathlib.Path | None) -> None:
        self.method, bodies = _method(method), kernels.load("numpy")
        (self.layout,) = self.method.placement.place(spec, 1)
        config = CoreConfig(Budget(1 << 40), Schedule(0.01), _WORKERS, offsets=self.layout.offsets)
        theta = np.random.default_rng(1).normal(size=self.layout.size).astype(np.float32)
        membership = Coordinator(_WORKERS, 1e9)
        self.core = PsCore(config, self.method, theta, bodies, membership, self.method.sync)
        self.journaled = JournaledCore(self.core)
        self.coder = Coder(self.layout, self.method, bodies)
        self.decoder = PushDecoder(self.layout, self.method.kind, bodies)
        self.now, self._steps = 0.0, 0
        if folder is not None:
            journal = Journal(folder, self.coder, theta.nbytes)
            self.journaled.write_to(journal, Settings(config, 10.0, {}).to_plain())
            self.journaled.begin()
            self.decoder.keeps_coded = True
        for worker in range(1, _WORKERS + 1):
            self._tell(events.Join(worker, worker, False, "peer"))
            self._tell(events.Pull(worker, worker, None, 0))

    def _tell(self, event: events.Event) -> list[events.Action]:
        self.now += 0.001
        return self.journaled.handle(event, self.now)

    def pushes(self, updates: Sequence[Update]) -> list[events.Push]:
        """Return a push of each update, in turn of the workers, as the reader hands them on."""
        made = []
        for update in updates:
            self._steps += 1
            worker = 1 + self._steps % _WORKERS
            version = self.core.version + len(made)
            base = max(0, version - _WORKERS + 1)
            push = events.Push(worker, worker, self._steps, base, 0, 2, update, 64, 1, 0.5)
            message, pieces = self.coder._coded(push)
            made.append(self.decoder.decode(worker, message, memoryview(b"".join(pieces))))
        return made

    def apply(self, pushes: Sequence[events.Push]) -> float:
        """Apply them; return the seconds of its core that one took.

        Others on this machine do not lengthen those.
        """
        start = time.thread_time()
        for push in pushes:
            self._tell(push)
        return (time.thread_time() - start) / len(pushes)


def _method(name: str) -> Method:
    return compose(Choices(method=name, nb_workers=_WORKERS, compression_rate=_KEPT, overrides={}))


def updates_of(size: int, count: int, fraction: float = _KEPT) -> Iterator[Update]:
    """Return random updates of so much of a shard."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        at = np.flatnonzero(rng.random(size) < fraction)
        yield Update(at, rng.normal(size=len(at)).astype(np.float32))


def shard_row(method: str) -> Row:
    """Compare a shard that keeps a journal with one that keeps none."""
    updates = list(updates_of(MNIST_CNN.num_parameters, _TURN))
    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        shards = [Shard(method, MNIST_CNN, where) for where in (None, pathlib.Path(folder))]
        for turn in range(_TURNS + 1):
            for shard, found in zip(shards, times, strict=True):
                seconds = shard.apply(shard.pushes(updates))
                if turn:
                    found.append(seconds)
        if len({shard.core.version for shard in shards}) != 1 or shards[0].core.accounts.rejected:
            raise RuntimeError("the shards have not applied the same updates")
    off, on = (statistics.median(found) for found in times)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    note = f"{1e6 * (on - off):.0f} us a push; half of the turns {low:.2f} to {high:.2f}"
    name = f"{method}, a shard at its limit, with a journal / without"
    return Row(name, 1 / on, "updates/s", 1 / off, statistics.median(ratios), None, "higher", note)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--seconds", type=float, default=20.0, help="of each run of processes")
    options.add_argument("--rounds", type=int, default=_ROUNDS)
    options.add_argument("--shard", action="store_true", help="a shard at its limit alone")
    arguments = options.parse_args()
    found: list[Row] = [] if arguments.shard else run_rows(arguments.seconds, arguments.rounds)
    found += [shard_row(method) for method in METHODS]
    sys.stdout.write(render(found))


if __name__ == "__main__":
    main()

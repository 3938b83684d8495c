"""Measure a PS's memory relative to its weights: ``python -m bench.systems.memory``.

A real PS receives its model from a worker. The workers are light clients in this process: they use
the real client code without TensorFlow and push the same random update repeatedly. Each point is
the maximum resident memory since the previous point, minus the memory of the PS without a model.

``--parameters`` sets the size of the model, ``--only`` selects compositions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING

import numpy as np
from absl import flags
from absl.testing import flagsaver

from bench import origin
from bench.systems.many import free_addresses
from thinwire.cli import node as command_line
from thinwire.flags import run as run_flags
from thinwire.ops.offer import Described, Offer, OptimizerOffer
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Block, CodedValues, Link, ModelSpec, TensorSpec
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.client.exchange import Exchange, Heartbeat
from thinwire.worker.client.offering import Offering
from thinwire.worker.core.messages import PushRequest, ShardReply

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"
_PATIENCE_SECONDS = 300.0
#: Share of the model's entries that a sparse push contains.
_RATE = 0.01
#: Maximum number of entries of one variable.
_LARGEST_TENSOR = 4_000_000
_WARM_UPDATES = 2
#: Momentum of the workers' SGD. Its slots on the PS are as large as the weights if workers push
#: gradients.
_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Case:
    """A composition, and the maximum memory of its PS.

    Attributes:
        method: Training method of the run.
        workers: Number of workers.
        extra: Further flags of main.py.
    """

    method: str
    workers: int
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The case's name in the table."""
        return f"{self.method}, {self.workers} workers"

    @property
    def is_sparse(self) -> bool:
        """True if pushes are sparse."""
        return self.method == "dgs"

    @property
    def bound(self) -> float:
        """Maximum memory of the PS, as a multiple of the size of its weights."""
        dense = 3 + (not self.is_sparse) + 0.25 * max(0, self.workers - 2)
        return dense + (2 * self.workers if self.is_sparse else 0)


CASES = (
    Case("asgd", 2),
    Case("asgd", 4),
    Case("bsp", 2),
    Case("bsp", 4),
    Case("dgs", 2, extra=("--down_codec=sparse", "--journal=off")),
)


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """The maximum memory of a PS in one part of a run."""

    case: Case
    name: str
    num_bytes: int  # maximum resident memory, minus the memory without a model
    weights_bytes: int

    @property
    def ratio(self) -> float:
        """Maximum memory as a multiple of the size of the weights."""
        return self.num_bytes / self.weights_bytes


def spec_of(num_parameters: int) -> ModelSpec:
    """Return a model with this number of parameters, in variables of at most `_LARGEST_TENSOR`."""
    tensors, missing = [], num_parameters
    while missing > 0:
        size = min(missing, _LARGEST_TENSOR)
        tensors.append(TensorSpec(f"layer{len(tensors)}/kernel", (size,)))
        missing -= size
    return ModelSpec(tuple(tensors))


class WatchedShard:
    """A PS process that waits for a worker's model."""

    def __init__(self, folder: pathlib.Path, given: Sequence[str]) -> None:
        """Start the PS, and wait until it listens."""
        log = folder / "log"
        words = ["--type_node=PS", *given]
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(_MAIN), *words], stdout=out, stderr=out
            )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while "waiting for a worker" not in log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.01)
        self.base_bytes = self.peak_bytes()

    def peak_bytes(self) -> int:
        """Return the maximum resident memory since `forget_peak`, in bytes."""
        return 1024 * self._field("VmHWM")

    def resident_bytes(self) -> int:
        """Return the resident memory in bytes."""
        return 1024 * self._field("VmRSS")

    def forget_peak(self) -> None:
        """Reset the maximum that `peak_bytes` returns."""
        pathlib.Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _field(self, name: str) -> int:
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0])


class LightWorker:
    """A client that pushes the same update in each exchange."""

    def __init__(self, run: Run, number: int, spec: ModelSpec, update: Sequence[Block]) -> None:
        """Prepare the client; `join` opens its connection."""
        self._kind, self._update = run.method.kind, tuple(update)
        sgd = OptimizerOffer(Described("SGD", {"learning_rate": 1e-6, "momentum": _MOMENTUM}))
        steps_here = run.method.awaits_offer
        offer = Offer(spec, optimizers=(sgd,) if steps_here else (), num_examples=1000)
        nothing = np.empty(0, np.float32)
        offering = Offering(
            offer, lambda: np.zeros(spec.num_parameters, np.float32), lambda: nothing
        )
        self._exchange = Exchange(
            run, number, spec, run.method.place(spec, 1), Link(), threading.Event(), 0, offering
        )
        self._document = WorkerMetrics(number).to_json()
        self._step = 0
        self._reply: ShardReply | None = None
        self.seconds: list[float] = []

    def join(self) -> None:
        """Join the run; offer the model if no other worker has offered it."""
        self._exchange.join()
        self._heartbeat = Heartbeat(self._exchange, 10.0, lambda: self._document, list)

    def pull(self) -> None:
        """Pull the model."""
        (self._reply,) = self._exchange.pull()

    def exchange(self) -> None:
        """Push the update, wait for the reply, and drop the reply's weights."""
        assert self._reply is not None
        self._step += 1
        before, self._reply = (self._reply.version, self._reply.generation), None
        began = time.monotonic()
        self._exchange.send(
            PushRequest(
                PushHead(self._step, samples=10, local_steps=1, loss=1.0, schedule_rate=1e-6),
                origins=[PushOrigin(*before)],
                kind=self._kind,
                shards=[self._update],
            )
        )
        (reply,) = self._exchange.replies()
        assert reply is not None
        self._reply = dataclasses.replace(reply, blocks=())
        self.seconds.append(time.monotonic() - began)

    def close(self) -> None:
        """Leave the run."""
        self._heartbeat.stop()
        self._exchange.close("finished")


def update_of(spec: ModelSpec, is_sparse: bool) -> list[Block]:
    """Return a small random update. All tensors share one array, which saves clients' memory."""
    rng = np.random.default_rng(0)
    whole = 1e-6 * rng.standard_normal(max(t.size for t in spec.tensors), np.float32)
    blocks = []
    for slot, tensor in enumerate(spec.tensors):
        size = tensor.size
        values: Float32 = whole[:size]
        indices = None
        if is_sparse:
            indices = np.sort(rng.choice(size, max(1, int(_RATE * size)), replace=False))
            values = values[: len(indices)]
        blocks.append(Block(slot, size, indices, CodedValues("float32", values)))
    return blocks


def measure(case: Case, num_parameters: int, updates: int) -> Iterator[MemoryPoint]:
    """Run one case; yield each point when it is measured.

    Args:
        case: Composition to run.
        num_parameters: Number of parameters of the model.
        updates: Number of each worker's exchanges in the point "training".
    """
    spec = spec_of(num_parameters)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        words = flags_of(case, folder, "--checkpoint_interval_seconds=100000")
        shard = WatchedShard(folder, words)
        stack.callback(shard.close)
        run = _read(words)
        update = update_of(spec, case.is_sparse)
        workers = [LightWorker(run, number + 1, spec, update) for number in range(case.workers)]

        def point(what: str) -> MemoryPoint:
            num_bytes = shard.peak_bytes() - shard.base_bytes
            shard.forget_peak()
            return MemoryPoint(case, what, num_bytes, 4 * num_parameters)

        workers[0].join()
        yield point("first worker has offered")
        shard.forget_peak()
        for worker in workers[1:]:
            worker.join()
        for worker in workers:
            worker.pull()
        yield point("all have pulled")
        _exchange_all(workers, updates)
        yield point("training")
        for worker in workers:
            worker.close()


def measure_snapshots(
    case: Case, num_parameters: int, updates: int
) -> tuple[MemoryPoint, dict[str, tuple[float, float]]]:
    """Measure a PS that writes snapshots without a pause.

    Returns:
        The memory point, and the (median, longest) seconds of an exchange for the keys "without"
        (no snapshots) and "with" (snapshots).
    """
    spec = spec_of(num_parameters)
    seconds = {}
    for name, interval in (("without", 1e5), ("with", 0.5)):
        with (
            tempfile.TemporaryDirectory(prefix="thinwire-") as path,
            contextlib.ExitStack() as stack,
        ):
            folder = pathlib.Path(path)
            words = flags_of(case, folder, f"--checkpoint_interval_seconds={interval}")
            shard = WatchedShard(folder, words)
            stack.callback(shard.close)
            run = _read(words)
            update = update_of(spec, case.is_sparse)
            workers = [LightWorker(run, number + 1, spec, update) for number in range(case.workers)]
            for worker in workers:
                worker.join()
            for worker in workers:
                worker.pull()
            _exchange_all(workers, _WARM_UPDATES)
            for worker in workers:
                worker.seconds.clear()
            shard.forget_peak()
            _exchange_all(workers, updates)
            point = MemoryPoint(
                case,
                "training, snapshots",
                shard.peak_bytes() - shard.base_bytes,
                4 * num_parameters,
            )
            durations = [duration for worker in workers for duration in worker.seconds]
            seconds[name] = (statistics.median(durations), max(durations))
            for worker in workers:
                worker.close()
    return point, seconds


def _exchange_all(workers: Sequence[LightWorker], count: int) -> None:
    """Let each worker make `count` exchanges; all workers run in parallel threads."""

    def turn(worker: LightWorker) -> None:
        for _ in range(count):
            worker.exchange()

    with futures.ThreadPoolExecutor(len(workers)) as threads:
        for turned in [threads.submit(turn, worker) for worker in workers]:
            turned.result()


def flags_of(case: Case, folder: pathlib.Path, *more: str) -> list[str]:
    """Return the flags of main.py for all nodes of a case's run."""
    return [
        *("--model_from=worker", f"--method={case.method}", f"--nb_workers={case.workers}"),
        *(f"--ps_hosts={free_addresses(1)[0]}", f"--run_dir={folder / 'run'}"),
        *("--iter_max=1000000", "--keep_checkpoints=1", "--max_model_bytes=8000000000"),
        *case.extra,
        *more,
    ]


def _read(given: Sequence[str]) -> Run:
    if "method" not in flags.FLAGS:
        command_line.define_flags()
    with flagsaver.flagsaver():
        flags.FLAGS(["bench", *given])
        return run_flags.read_run()


def main() -> None:
    """Measure all cases; print a line for each point, and write the table."""
    options = argparse.ArgumentParser(prog="python -m bench.systems.memory", description=__doc__)
    options.add_argument("--parameters", type=int, default=10_000_000)
    options.add_argument("--updates", type=int, default=12, help="exchanges of each worker")
    options.add_argument("--only", nargs="+", choices=[measured.name for measured in CASES])
    arguments = options.parse_args()
    facts = origin.facts()
    size = arguments.parameters
    lines = [("case", "point", "MB", "x weights", "bound")]
    notes = []
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        points = []
        for point in measure(case, size, arguments.updates):
            points.append(point)
            sys.stdout.write(f"{case.name:16} {point.name:26} {point.ratio:6.2f}\n")
            sys.stdout.flush()
        point, seconds = measure_snapshots(case, size, 3 * arguments.updates)
        points.append(point)
        sys.stdout.write(f"{case.name:16} {point.name:26} {point.ratio:6.2f} {seconds}\n")
        for measured in points:
            megabytes, ratio = f"{measured.num_bytes / 1e6:.0f}", f"{measured.ratio:.2f}"
            lines.append((case.name, measured.name, megabytes, ratio, f"{case.bound:g}"))
        (median, longest), (during, longest_during) = seconds["without"], seconds["with"]
        notes.append(
            f"- {case.name}: an exchange takes {1e3 * median:.0f} ms (longest "
            f"{1e3 * longest:.0f}), during snapshots {1e3 * during:.0f} "
            f"({1e3 * longest_during:.0f})"
        )
    text = f"# Memory of a PS of {size:,} parameters\n\n{origin.describe(facts)}\n\n"
    text += origin.markdown(lines) + "\n" + "\n".join(notes) + "\n"
    paths = origin.write(f"memory-{size // 10**6}M", facts, {"md": text})
    sys.stdout.write(f"\n{text}\nwritten: {', '.join(map(str, paths))}\n")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()

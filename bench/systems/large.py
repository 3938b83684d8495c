"""Measure large models end to end: memory, start, step, a late worker, a snapshot, a killed PS.

The run has real processes of main.py on loopback with one TensorFlow thread each. A PS and a worker
train; a second worker joins during the training; the PS writes snapshots; then the PS is killed and
started again. The program reads each node's output, metrics and memory about twenty times a second.
The comparison is Keras training the same model alone, which shows a worker's own needs.

    python -m bench.systems.large
    python -m bench.systems.large --variables 100 300 1000
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench import origin
from bench.systems.many import free_addresses
from thinwire.data.choices import CONTEXT

_ROOT = pathlib.Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
_MOMENTUM = 0.9
_FRESH_SECONDS = 3.0  # after this time a PS has updated its metrics
_STEPS = 5  # timed steps of Keras alone
_ALONE = "alone"
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
_HIDDEN = ".tmp-"  # name prefix of the arrays of a checkpoint that is being written
#: A worker that received this share of the weights' bytes has pulled the whole model.
_ALL_RECEIVED = 0.999
#: Flags for the shape of ImageNet's images and the number of its classes.
_IMAGENET = ("--image_size=224", "--image_depth=3", "--nb_classes=1000")


@dataclasses.dataclass(frozen=True)
class LargeModel:
    """A model to train.

    Attributes:
        name: Name in the tables.
        flags: Flags of main.py for all nodes.
        num_parameters: Number of trained parameters.
        batch_size: Number of examples in a mini-batch.
    """

    name: str
    flags: tuple[str, ...]
    num_parameters: int
    batch_size: int

    @property
    def weights_bytes(self) -> int:
        """Size of the float32 weights in bytes."""
        return 4 * self.num_parameters


MODELS = {
    model.name: model
    for model in (
        LargeModel(
            "decoder-100m",
            ("--network=decoder-100m", "--task=tokens", "--dataset=stdlib"),
            100_291_200,
            2,
        ),
        LargeModel(
            "resnet50-v1",
            ("--network=resnet50-v1", "--dataset=imagenet_synthetic", *_IMAGENET),
            25_575_912,
            2,
        ),
        LargeModel(
            "decoder-tiny",
            ("--network=decoder-tiny", "--task=tokens", "--dataset=stdlib"),
            12_784,
            2,
        ),
    )
}
#: Name of a composition -> flags of main.py.
METHODS = {
    "asgd": ("--method=asgd",),
    "dgs": ("--method=dgs", "--momentum=0", "--down_codec=sparse"),
}


class WatchedNode:
    """A process of main.py whose output, metrics and memory can be read."""

    def __init__(self, folder: pathlib.Path, name: str, command: Sequence[str]) -> None:
        """Start the process."""
        self.name, self._log = name, folder / f"{name}.log"
        _, _, port = free_addresses(1)[0].rpartition(":")
        self._url = f"http://127.0.0.1:{port}/metrics"
        with open(self._log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, f"--metrics_port={port}"],
                cwd=_ROOT,
                env=os.environ | _QUIET,
                stdout=out,
                stderr=out,
            )

    def metric(self, name: str) -> float:
        """Return a metric of the node; 0 if the node does not serve it yet."""
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                match = re.search(
                    rf"^thinwire_{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE
                )
        except (urllib.error.URLError, OSError):
            return 0.0
        return float(match[1]) if match else 0.0

    def occurrences(self, words: str) -> int:
        """Return how often the words occur in the node's output."""
        return self._log.read_text(errors="replace").count(words)

    def check(self) -> None:
        """Raise RuntimeError if the process has ended."""
        if (code := self.process.poll()) is not None:
            text = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with {code}: {text}")

    def resident_bytes(self) -> int:
        """Return the resident memory in bytes."""
        return self._field("VmRSS")

    def peak_bytes(self) -> int:
        """Return the maximum resident memory since `forget_peak`, or since the start, in bytes."""
        return self._field("VmHWM")

    def forget_peak(self) -> None:
        """Reset the maximum that `peak_bytes` returns."""
        pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _field(self, name: str) -> int:
        return 1024 * _status_kilobytes(self.process.pid, name)


class ObservedRun:
    """A run in its own folder, observed from outside its processes.

    Attributes:
        nodes: Name of a node -> its newest process.
        exchanged_at: Times by time.monotonic() at which exchanges of the first worker were seen.
        snapshots: Seconds that the PS took to write each snapshot.
    """

    def __init__(self, folder: pathlib.Path, flags: Sequence[str]) -> None:
        """Prepare the folder and the flags; `start` starts the processes."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._flags = [*flags, f"--ps_hosts={free_addresses(1)[0]}", f"--run_dir={folder / 'run'}"]
        self.nodes: dict[str, WatchedNode] = {}
        self.exchanged_at: list[float] = []
        self.snapshots: list[float] = []
        self._snapshot_began = 0.0

    def start(self, name: str, *own: str) -> WatchedNode:
        """Start a node; a new process replaces the node of the same name."""
        self.nodes[name] = WatchedNode(self._folder, name, ["main.py", *own, *self._flags])
        return self.nodes[name]

    def close(self) -> None:
        """Kill all nodes."""
        for node in self.nodes.values():
            node.kill()

    def until(self, is_so: Callable[[], bool]) -> float:
        """Watch the run until `is_so()` is True; return the seconds that passed.

        Raises:
            RuntimeError: A node has ended, or `_PATIENCE_SECONDS` have passed.
        """
        began = time.monotonic()
        while not is_so():
            for node in self.nodes.values():
                node.check()
            if time.monotonic() - began > _PATIENCE_SECONDS:
                raise RuntimeError(f"the awaited event did not occur in {_PATIENCE_SECONDS:g} s")
            self._look()
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def watch(self, seconds: float) -> None:
        """Watch the run for some seconds."""
        ends = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= ends)

    def step_seconds(self, since: float, until: float) -> tuple[float, float]:
        """Return the mean and the longest time between exchanges of the first worker, in seconds.

        Args:
            since: Start of the period, by time.monotonic().
            until: End of the period, by time.monotonic().
        """
        times = [at for at in self.exchanged_at if since <= at <= until]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return (sum(gaps) / len(gaps), max(gaps)) if gaps else (float("nan"), float("nan"))

    def _look(self) -> None:
        now = time.monotonic()
        if worker := self.nodes.get("worker-1"):
            done = int(worker.metric("exchanges_total"))
            self.exchanged_at += [now] * (done - len(self.exchanged_at))
        parts = self._folder / "run" / "checkpoints" / "ps-0" / "parts"
        is_writing = parts.is_dir() and any(name.startswith(_HIDDEN) for name in os.listdir(parts))
        if is_writing and not self._snapshot_began:
            self._snapshot_began = now
        elif not is_writing and self._snapshot_began:
            self.snapshots.append(now - self._snapshot_began)
            self._snapshot_began = 0.0


@dataclasses.dataclass(frozen=True)
class LargeRow:
    """One line of the table: a name of the measurement, and its value with unit."""

    what: str
    value: str


def measure(model: LargeModel, method: str, seconds: float) -> Iterator[LargeRow]:
    """Run one model with one method; yield each line when it is measured.

    Args:
        model: Model to train.
        method: Key of `METHODS`.
        seconds: Length of each part of the run in which steps are timed.
    """
    weights = model.weights_bytes

    def memory(num_bytes: int) -> str:
        return f"{num_bytes / 1e6:,.0f} MB, {num_bytes / weights:.1f} sizes"

    with tempfile.TemporaryDirectory(prefix="thinwire-") as name:
        run = ObservedRun(pathlib.Path(name), _flags(model, method, seconds))
        with contextlib.closing(run):
            server = run.start("PS", "--type_node=PS")
            took = run.until(lambda: bool(server.occurrences("listens on")))
            yield LargeRow("PS: start until it listens", f"{took:.1f} s")
            yield LargeRow("PS: memory when it listens; the most before", _two(server, weights))
            server.forget_peak()
            first = run.start("worker-1", "--type_node=Worker", "--id_worker=1")
            took = run.until(lambda: bool(run.exchanged_at))
            yield LargeRow("worker: start to the end of its first exchange", f"{took:.1f} s")
            began = time.monotonic()
            run.watch(seconds)
            mean, longest = run.step_seconds(began, time.monotonic())
            yield LargeRow("step, one worker; the longest", f"{mean:.2f} s; {longest:.2f}")
            yield LargeRow("worker: most memory", memory(first.peak_bytes()))
            yield LargeRow("PS: most memory, one worker, snapshots", memory(server.peak_bytes()))
            server.forget_peak()

            second = run.start("worker-2", "--type_node=Worker", "--id_worker=2")
            run.until(lambda: bool(server.occurrences("worker 2 joined")))
            began = time.monotonic()
            took = run.until(
                lambda: second.metric("bytes_received_total") >= _ALL_RECEIVED * weights
            )
            yield LargeRow("second worker: from its join to the whole model", f"{took:.2f} s")
            run.until(lambda: second.metric("exchanges_total") >= 1)
            _, longest = run.step_seconds(began - mean, time.monotonic())
            yield LargeRow("first worker's longest step during that join", f"{longest:.2f} s")
            began = time.monotonic()
            run.watch(seconds)
            mean, longest = run.step_seconds(began, time.monotonic())
            yield LargeRow("step, two workers; the longest", f"{mean:.2f} s; {longest:.2f}")
            yield LargeRow("PS: most memory, two workers, snapshots", memory(server.peak_bytes()))
            written = ", ".join(f"{duration:.1f}" for duration in run.snapshots)
            yield LargeRow("time to write each snapshot", f"{written} s")

            server.kill()
            before = len(run.exchanged_at)
            server = run.start("PS", "--type_node=PS")
            took = run.until(lambda: server.occurrences("listens on") > 1)
            more = run.until(lambda: len(run.exchanged_at) > before)
            yield LargeRow("PS killed: started again until it listens", f"{took:.1f} s")
            yield LargeRow("PS killed: until an exchange is done", f"{took + more:.1f} s")
            run.watch(_FRESH_SECONDS)
            lost = server.metric("lost_updates_total")
            yield LargeRow("PS killed: acknowledged updates lost", f"{lost:.0f}")


def _two(server: WatchedNode, weights: int) -> str:
    resident, most = server.resident_bytes(), server.peak_bytes()
    return f"{resident / 1e6:,.0f} MB, {most / 1e6:,.0f} MB ({most / weights:.1f} sizes)"


def _flags(model: LargeModel, method: str, seconds: float) -> list[str]:
    return [
        *(*model.flags, *METHODS[method], f"--batch_size={model.batch_size}", "--nb_workers=2"),
        *("--worker_threads=1", "--learning_rate=0.001", "--iter_max=100000000"),
        *(f"--checkpoint_interval_seconds={seconds / 2:g}", "--keep_checkpoints=1"),
    ]


def measure_alone(flags: Sequence[str], steps: int) -> Mapping[str, float]:
    """Train the model that the flags name with Keras alone, in a separate process.

    Returns:
        ``peak_bytes``: maximum resident memory in bytes; ``first_seconds``: seconds from the start
        to the end of the first step; ``step_seconds``: mean seconds of a further step.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.systems.large", _ALONE, str(steps), *flags],
        cwd=_ROOT,
        env=os.environ | _QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _rows_alone(model: LargeModel, found: Mapping[str, float]) -> Iterator[LargeRow]:
    most = found["peak_bytes"]
    yield LargeRow("alone: start to the end of the first step", f"{found['first_seconds']:.1f} s")
    yield LargeRow("alone: step", f"{found['step_seconds']:.2f} s")
    yield LargeRow(
        "alone: most memory", f"{most / 1e6:,.0f} MB, {most / model.weights_bytes:.1f} sizes"
    )


def _train_alone(steps: int, given: Sequence[str]) -> None:
    """Train with Keras alone, and print the result of `measure_alone` as JSON."""
    began = time.monotonic()
    import keras
    import numpy as np
    from absl import flags

    from thinwire.cli import node as command_line
    from thinwire.flags import run as run_flags
    from thinwire.models.flat_model import SharedModel
    from thinwire.worker.role import limit_threads

    limit_threads(1)
    command_line.define_flags()
    flags.FLAGS(["main.py", *given, "--ps_hosts=127.0.0.1:1"])
    run = run_flags.read_run()
    model = SharedModel(run.model, run.seed).model
    rng, size = np.random.default_rng(0), run.batch_size
    if run.model.task == "tokens":
        images = labels = rng.integers(0, 256, (size, CONTEXT), np.int32)
    else:
        images = rng.standard_normal((size, *model.input_shape[1:]), np.float32)
        labels = rng.integers(0, run.model.nb_classes, size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001, momentum=_MOMENTUM), loss)
    seconds = []
    for _ in range(1 + steps):
        model.train_on_batch(images, labels)
        seconds.append(time.monotonic() - began)
    result = {
        "peak_bytes": 1024 * _status_kilobytes("self", "VmHWM"),
        "first_seconds": seconds[0],
        "step_seconds": (seconds[-1] - seconds[0]) / steps,
    }
    sys.stdout.write(json.dumps(result) + "\n")


_MANY_VARIABLES = """
import keras


def build_model():
    image = keras.Input((28, 28, 1))
    flat = keras.layers.Flatten()(keras.layers.AveragePooling2D(7)(image))
    parts = [keras.layers.Dense(1, name=f"part{number}")(flat) for number in range({layers})]
    return keras.Model(image, keras.layers.Dense(10)(keras.layers.Concatenate()(parts)))
"""


def measure_variables(number: int) -> Iterator[tuple[str, str, float, float]]:
    """Start runs of a model with `number` tiny variables; yield lines of the table.

    Yields:
        Number of variables, name of the composition, seconds to the end of the first exchange, and
        seconds to the end of the first step of Keras alone.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-") as name:
        module = pathlib.Path(name) / "many_variables.py"
        module.write_text(_MANY_VARIABLES.replace("{layers}", str(number // 2 - 1)))
        model = LargeModel(
            f"{number} variables",
            (f"--model={module}", "--dataset=fashion_mnist_sample"),
            17 * (number // 2 - 1) + 10 * (number // 2),
            32,
        )
        alone = measure_alone(_flags(model, "asgd", 100.0), 1)["first_seconds"]
        for method in METHODS:
            flags = _flags(model, method, 100.0)
            yield str(number), method, _first_exchange(pathlib.Path(name) / method, flags), alone


def _first_exchange(folder: pathlib.Path, flags: Sequence[str]) -> float:
    """Return the seconds from the start of a PS and a worker to the first exchange's end."""
    run = ObservedRun(folder, flags)
    with contextlib.closing(run):
        run.start("PS", "--type_node=PS")
        run.start("worker-1", "--type_node=Worker", "--id_worker=1")
        return run.until(lambda: bool(run.exchanged_at))


def _status_kilobytes(process: int | str, field: str) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _tables(models: Sequence[LargeModel], methods: Sequence[str], seconds: float) -> str:
    text = ""
    for model in models:
        weights = model.weights_bytes / 1e6
        text += f"\n## {model.name}: {model.num_parameters:,} parameters, {weights:,.0f} MB\n\n"
        rows = list(_rows_alone(model, measure_alone(_flags(model, "asgd", seconds), _STEPS)))
        columns: dict[str, list[str]] = {}
        for row in rows:
            columns[row.what] = [row.value] * len(methods)
        for method in methods:
            for row in measure(model, method, seconds):
                _print(f"{model.name} {method}: {row.what}: {row.value}")
                columns.setdefault(row.what, []).append(row.value)
        text += origin.markdown(
            [("", *methods), *((name, *values) for name, values in columns.items())]
        )
    return text


def _variables_table(numbers: Sequence[int]) -> str:
    lines = [("variables", "composition", "s to the first exchange", "s to the first step alone")]
    for number in numbers:
        for variables, method, shared, alone in measure_variables(number):
            lines.append((variables, method, f"{shared:.1f}", f"{alone:.1f}"))
            _print(": ".join(lines[-1]))
    return "\n## Many tiny variables\n\n" + origin.markdown(lines)


def main() -> None:
    """Measure; print each line when it is measured, and write the table."""
    options = argparse.ArgumentParser(
        prog="python -m bench.systems.large",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--model", nargs="*", choices=list(MODELS), default=["decoder-100m", "resnet50-v1"])
    add("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    add("--seconds", type=float, default=60.0, help="length of each part in which steps are timed")
    add(
        "--variables",
        nargs="*",
        type=int,
        default=[300, 1000, 3000],
        help="numbers of variables of the tiny models",
    )
    arguments = options.parse_args()
    facts = origin.facts()
    text = f"# Large models end to end\n\n{origin.describe(facts)}\n"
    text += _tables([MODELS[name] for name in arguments.model], arguments.method, arguments.seconds)
    if arguments.variables:
        text += _variables_table(arguments.variables)
    paths = origin.write("large", facts, {"md": text})
    sys.stdout.write(f"\n{text}\nwritten: {', '.join(map(str, paths))}\n")


if __name__ == "__main__":
    if _ALONE in sys.argv[1:2]:
        _train_alone(int(sys.argv[2]), sys.argv[3:])
    else:
        main()

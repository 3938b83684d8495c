"""Measure many workers on one parameter server: the maximum update rate, and its limit.

The PS processes are real and run on loopback. The devices (`bench.systems.light_clients`) use the
workers' client code with prepared real gradients and sleep for `--step_seconds` instead of
computing. The number of active devices grows level by level. At each level the program measures the
updates per second, the duration of an exchange, and the processor time of shards and clients.

    python -m bench.systems.many --seconds 6
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from bench import origin
from bench.peers import thinwire, work
from bench.systems.light_clients import READY
from bench.systems.scaling import ticks

#: Local steps of a round in these runs; the PS's cost of a push does not depend on their number.
COUNTED_STEPS = {"diloco": 2}
#: Name of a composition -> flags of main.py.
COMPOSITIONS: Mapping[str, tuple[str, ...]] = {
    "asgd": ("--method=asgd",),
    "bsp": ("--method=bsp",),
    "adacomp": ("--method=adacomp", "--momentum=0"),
    "dgs": ("--method=dgs", "--momentum=0"),
    "dgs-both": ("--method=dgs", "--momentum=0", "--down_codec=sparse"),
    "esync": ("--method=esync",),
    "diloco": ("--method=diloco", f"--local_steps={COUNTED_STEPS['diloco']}"),
}
STREAMS, SHARDS = (1, 2, 4, 8, 16, 32), (1, 2)
STEP_SECONDS = 0.2
_PROCESSES = 2  # number of client processes
_WARM_SECONDS = 1.0
_START_SECONDS = 180.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")
#: The knee is the first level that reaches this share of the highest update rate.
_KNEE = 0.9
#: A core, or the whole machine, counts as full above this share of its processor time.
_FULL = 0.85
#: Flags of the trained model; `bench.systems.speedup` trains the same model.
WORK_FLAGS = (
    *("--network=mnist_cnn", "--batch_size=64", "--worker_threads=1", "--learning_rate=0.001"),
    *("--iter_max=100000000", "--eval_interval_seconds=100000"),
)
#: Flags that stop the shards' background work, so that shards only exchange.
_QUIET_FLAGS = ("--journal=off", "--checkpoint_interval_seconds=100000", "--linger_seconds=1")


@dataclasses.dataclass(frozen=True)
class StreamLoad:
    """Measurements at one level, that is, with one number of active devices.

    Attributes:
        method: Name of a composition.
        shards: Number of PS processes.
        streams: Number of active devices.
        updates_per_second: Answered pushes of all devices, per second.
        median_ms: Median duration of an exchange, from the push to the weights, in milliseconds.
        slow_ms: 99th percentile of the duration of an exchange, in milliseconds.
        fairness: Jain's index of the devices' numbers of exchanges: 1 if all numbers are equal.
        server_ms: Processor time of all shards per exchange, in milliseconds.
        server_cores: Number of cores that all shards keep busy.
        client_ms: Processor time of the clients per exchange, in milliseconds.
        client_cores: Number of cores that all clients keep busy.
        server_mb: Resident memory of all shards, in MiB.
    """

    method: str
    shards: int
    streams: int
    updates_per_second: float
    median_ms: float
    slow_ms: float
    fairness: float
    server_ms: float
    server_cores: float
    client_ms: float
    client_cores: float
    server_mb: float

    HEAD = (
        *("method", "shards", "streams", "updates/s", "p50 ms", "p99 ms", "fairness"),
        *("PS ms/update", "PS cores", "client ms/update", "client cores", "PS MB"),
    )

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table's line as text, in the order of `HEAD`."""
        return (
            *(self.method, str(self.shards), str(self.streams)),
            *(f"{self.updates_per_second:.1f}", f"{self.median_ms:.1f}", f"{self.slow_ms:.1f}"),
            *(f"{self.fairness:.3f}", f"{self.server_ms:.2f}", f"{self.server_cores:.2f}"),
            *(f"{self.client_ms:.2f}", f"{self.client_cores:.2f}", f"{self.server_mb:.0f}"),
        )


def dataset() -> str:
    """Return the value of --dataset: the full Fashion-MNIST if it is installed, else the sample."""
    return "fashion_mnist" if work.full_set_is_installed() else "fashion_mnist_sample"


def fairness(counts: Sequence[int]) -> float:
    """Return Jain's index of counts: 1 if all counts are equal, 1/n if only one is not 0.

    >>> fairness([4, 0, 0, 0])
    0.25
    """
    squares = len(counts) * sum(count * count for count in counts)
    return sum(counts) ** 2 / squares if squares else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the given share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclasses.dataclass(frozen=True)
class Usage:
    """Processor seconds of shards and clients, and memory of the shards, at one moment."""

    at: float  # time.monotonic()
    server_seconds: float
    client_seconds: float
    server_mb: float


class ManyDevices:
    """Context manager that runs PS processes and processes of light clients.

    Args:
        method: Name of a composition.
        shards: Number of PS processes.
        most: Maximum number of active devices.
        step_seconds: Duration of a device's step, in seconds.
        flags: Further flags of main.py for all processes.
    """

    def __init__(
        self,
        method: str,
        shards: int,
        most: int,
        step_seconds: float,
        flags: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-many-")
        folder = pathlib.Path(self._folder.name)
        common = [*WORK_FLAGS, *COMPOSITIONS[method], f"--nb_workers={most}"]
        common += [f"--run_dir={folder}/run", f"--dataset={dataset()}", *_QUIET_FLAGS]
        common += [f"--ps_hosts={','.join(free_addresses(shards))}", *flags]
        self._log = open(folder / "output.txt", "w+")  # noqa: SIM115
        self._servers = [
            self._started("main.py", "--type_node=PS", f"--id_ps={shard}", *common)
            for shard in range(shards)
        ]
        self._clients = [
            self._started(
                *(
                    "-m",
                    "bench.systems.light_clients",
                    str(number),
                    str(_PROCESSES),
                    str(step_seconds),
                ),
                *common,
                pipes=True,
            )
            for number in range(_PROCESSES)
        ]

    def _started(self, *command: str, pipes: bool = False) -> subprocess.Popen[str]:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=thinwire.ROOT,
            env=environment,
            stdin=subprocess.PIPE if pipes else None,
            stdout=subprocess.PIPE if pipes else self._log,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> ManyDevices:
        try:
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self._clients, *self._servers):
            process.kill()
            process.wait()
        self._log.close()
        self._folder.cleanup()

    def activate(self, number: int) -> None:
        """Raise the number of active devices; return after each device has made an exchange.

        Raises:
            RuntimeError: A process has ended, or the devices took too long.
        """
        for client in self._clients:
            _pipe(client.stdin).write(f"{number}\n")
            _pipe(client.stdin).flush()
        self._await_ready()

    def usage(self) -> Usage:
        """Return the processor time and memory that the processes have used so far."""
        server, client = (
            sum(
                ticks(pathlib.Path(f"/proc/{process.pid}/stat").read_text())
                for process in processes
            )
            for processes in (self._servers, self._clients)
        )
        statuses = [
            pathlib.Path(f"/proc/{process.pid}/status").read_text() for process in self._servers
        ]
        resident = [int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) for status in statuses]
        return Usage(time.monotonic(), server * _TICK, client * _TICK, sum(resident) / 1024)

    def end(self) -> dict[int, list[tuple[float, float]]]:
        """Let all devices leave; return the (start, end) times of every device's exchanges.

        Raises:
            RuntimeError: A device ended with an error.
        """
        exchanges: dict[int, list[tuple[float, float]]] = {}
        for client in self._clients:
            _pipe(client.stdin).close()
        for client in self._clients:
            report = json.loads(_pipe(client.stdout).read())
            if report["errors"]:
                raise RuntimeError(f"devices failed: {report['errors']}; {self._output()}")
            exchanges |= {int(worker): spans for worker, spans in report["exchanges"].items()}
        return exchanges

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        for client in self._clients:
            pipe, seconds = _pipe(client.stdout), deadline - time.monotonic()
            if not select.select([pipe], [], [], max(0.0, seconds))[0] or (
                pipe.readline().strip() != READY
            ):
                raise RuntimeError(
                    f"the clients were not ready within {_START_SECONDS} s: {self._output()}"
                )

    def _output(self) -> str:
        self._log.flush()
        return pathlib.Path(self._log.name).read_text()[-2000:]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("a client process has no pipe")
    return pipe


def free_addresses(number: int) -> list[str]:
    """Return `number` free loopback addresses, as host:port."""
    with contextlib.ExitStack() as stack:
        probes = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def measure(
    method: str,
    shards: int,
    levels: Sequence[int],
    seconds: float,
    step_seconds: float = STEP_SECONDS,
    flags: Sequence[str] = (),
) -> list[StreamLoad]:
    """Raise the number of devices level by level; return the measurements of each level.

    Args:
        method: Name of a composition. Give only one level for a synchronous method: its run starts
            only when all workers have joined.
        shards: Number of PS processes.
        levels: Numbers of active devices, ascending.
        seconds: Seconds of measurement at each level.
        step_seconds: Duration of a device's step, in seconds.
        flags: Further flags of main.py for all processes.
    """
    spans: list[tuple[Usage, Usage]] = []
    with ManyDevices(method, shards, max(levels), step_seconds, flags) as devices:
        for level in levels:
            devices.activate(level)
            time.sleep(_WARM_SECONDS)
            before = devices.usage()
            time.sleep(seconds)
            spans.append((before, devices.usage()))
        exchanges = devices.end()
    return [
        _load(method, shards, level, span, exchanges)
        for level, span in zip(levels, spans, strict=True)
    ]


def _load(
    method: str,
    shards: int,
    level: int,
    span: tuple[Usage, Usage],
    exchanges: Mapping[int, Sequence[tuple[float, float]]],
) -> StreamLoad:
    before, after = span
    took = {
        worker: [ended - began for began, ended in spans if before.at <= ended < after.at]
        for worker, spans in exchanges.items()
        if worker <= level
    }
    all_took = list(itertools.chain.from_iterable(took.values()))
    if not all_took:
        raise RuntimeError(f"no exchange of {level} devices: raise --seconds")
    seconds, number = after.at - before.at, len(all_took)
    server = after.server_seconds - before.server_seconds
    client = after.client_seconds - before.client_seconds
    return StreamLoad(
        *(method, shards, level, number / seconds),
        *(1e3 * statistics.median(all_took), 1e3 * percentile(all_took, 0.99)),
        fairness([len(spans) for spans in took.values()]),
        *(1e3 * server / number, server / seconds),
        *(1e3 * client / number, client / seconds),
        after.server_mb,
    )


def knee(loads: Sequence[StreamLoad], cores: int) -> str:
    """Return a line about the number of streams from which the rate hardly grows, and why."""
    best = max(load.updates_per_second for load in loads)
    at = next(load for load in loads if load.updates_per_second >= _KNEE * best)
    name = f"{at.method}, {at.shards} shard{'s' if at.shards > 1 else ''}"
    if at is loads[-1]:
        return f"{name}: none up to {at.streams} streams, {best:.0f} updates/s"
    if at.server_cores >= _FULL * min(at.shards, cores):
        limit = "the shards' interpreters, one core each"
    elif at.server_cores + at.client_cores >= _FULL * cores:
        limit = f"the machine's {cores} cores; the clients use {at.client_cores:.1f} of them"
    else:
        limit = "neither shards nor clients: other work of the machine, or waiting"
    return f"{name}: {at.streams} streams, {best:.0f} updates/s; full: {limit}"


def document(
    facts: Mapping[str, Any], command: str, groups: Sequence[Sequence[StreamLoad]]
) -> dict[str, str]:
    """Return the tables as {"md": Markdown text, "csv": CSV text}."""
    lines = [StreamLoad.HEAD, *(load.cells() for loads in groups for load in loads)]
    knees = [f"- {knee(loads, facts['cores'])}" for loads in groups]
    text = f"# Many workers on one parameter server\n\n{origin.describe(facts)}\n- `{command}`\n\n"
    text += origin.markdown(lines) + "\nThe knee:\n\n" + "\n".join(knees) + "\n"
    sheet = io.StringIO()
    csv.writer(sheet, lineterminator="\n").writerows(lines)
    return {"md": text, "csv": sheet.getvalue()}


def _measured(options: argparse.Namespace) -> Iterator[list[StreamLoad]]:
    for method in options.methods:
        for shards in options.shards:
            loads = measure(method, shards, options.streams, options.seconds, options.step_seconds)
            for load in loads:
                sys.stdout.write("  ".join(load.cells()) + "\n")
            sys.stdout.flush()
            yield loads


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m bench.systems.many",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--methods", nargs="+", choices=COMPOSITIONS, default=("asgd", "dgs"))
    options.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    options.add_argument("--shards", type=int, nargs="+", default=SHARDS)
    options.add_argument("--seconds", type=float, default=6.0, help="of measurement at each level")
    options.add_argument(
        "--step_seconds", type=float, default=STEP_SECONDS, help="duration of a device's step"
    )
    arguments = options.parse_args()
    facts = origin.facts()
    command = " ".join(["python -m bench.systems.many", *sys.argv[1:]])
    paths = origin.write("many", facts, document(facts, command, list(_measured(arguments))))
    sys.stdout.write(f"written: {', '.join(map(str, paths))}\n")


if __name__ == "__main__":
    main()

"""Training under a flood of datagrams: ``python -m bench.flooded``.

mnist_cnn by DGT, one worker, the server in this process, all on loopback. Each flood, one process
at the full rate of loopback, is compared with a busy loop of one process in its place, for both
take a core away.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import flood
from bench.table import Row, render

_GOAL = 0.3
_BUSY = (sys.executable, "-c", "while True: pass")
_WARM_SECONDS = 8.0
_SETTLE_SECONDS = 1.0
_ROUNDS = 3
_FULL_SIZE = 1472


def rows(seconds: float = 6.0) -> list[Row]:
    """Measure, and return a row for each kind of flood."""
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder, _training() as server:
        sample = _sample(server, pathlib.Path(folder))
        rates: dict[str, list[float]] = {kind: [] for kind in ("busy", *flood.KINDS)}
        for _ in range(_ROUNDS):
            rates["busy"].append(_beside(server, _BUSY, seconds))
            for kind in flood.KINDS:
                rates[kind].append(_beside(server, _flood(server, kind, sample), seconds))
    busy = statistics.median(rates.pop("busy"))
    return [_row(kind, statistics.median(found), busy) for kind, found in rates.items()]


def _row(kind: str, rate: float, busy: float) -> Row:
    ratio = rate / busy if busy else 0.0
    return Row(
        f"training, flood of {kind} datagrams / busy loop",
        rate,
        "updates/s",
        busy,
        ratio,
        _GOAL,
        "higher",
    )


@contextlib.contextmanager
def _training() -> Iterator[Any]:
    """Start a server here and a worker; yield the server when it trains."""
    from thinwire import init_server
    from thinwire.models.registry import build_network

    settings = {"method": "dgt", "nb_workers": 1, "dgt_k": 0.2, "iter_max": 10**8, "seed": 1}
    network = build_network("mnist_cnn", 28, 1, 10, seed=1)
    with init_server(model=network, port=0, **settings) as server:
        flags = [f"--{name}={value}" for name, value in settings.items()]
        port = server.address.rpartition(":")[2]
        worker = subprocess.Popen(
            [
                sys.executable,
                "main.py",
                "--type_node=Worker",
                f"--port={port}",
                *flags,
                "--network=mnist_cnn",
                "--batch_size=64",
                "--worker_threads=1",
                f"--run_dir={tempfile.mkdtemp(prefix='thinwire-')}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(lambda: server.version > 10, "an update")
            time.sleep(_WARM_SECONDS)
            yield server
        finally:
            worker.terminate()
            worker.wait()


def _wait(until: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no sign of {what} within {seconds:g} s")
        time.sleep(0.05)


def _port(server: Any) -> Any:
    return server._shard.server.datagrams


def _sample(server: Any, folder: pathlib.Path) -> pathlib.Path:
    """Listen to the server for genuine datagrams of full size, and keep some."""
    receptions, heard = _port(server).receptions, bytearray()
    take = receptions.take

    def listening(data: memoryview, size: int) -> int:
        if size == _FULL_SIZE and len(heard) < 44 * _FULL_SIZE:
            heard.extend(data[: len(data) // size * size])
        return int(take(data, size))

    receptions.take = listening
    _wait(lambda: len(heard) >= _FULL_SIZE, "a datagram of full size")
    del receptions.take
    path = folder / "sample"
    path.write_bytes(heard)
    return path


def _flood(server: Any, kind: str, sample: pathlib.Path) -> Sequence[str]:
    ports = ",".join(map(str, _port(server).ports))
    command = [sys.executable, "-m", "bench.flood", "127.0.0.1", ports, f"--kind={kind}"]
    if kind in ("garbled", "replayed"):
        command.append(f"--sample={sample}")
    return [*command, "--seconds=3600"]


def _beside(server: Any, command: Sequence[str], seconds: float) -> float:
    """Return updates per second while a command runs."""
    disturber = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(_SETTLE_SECONDS)
        before, start = server.version, time.monotonic()
        time.sleep(seconds)
        if disturber.poll() is not None:
            raise RuntimeError(f"{command} ended with {disturber.returncode}")
        return float((server.version - before) / (time.monotonic() - start))
    finally:
        disturber.kill()
        disturber.wait()


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.flooded", description=__doc__)
    options.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    sys.stdout.write(render(rows(options.parse_args().seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure a run under a flood of unauthenticated connections, streams and datagrams.

    python -m bench.systems.strangers --seconds 15

A PS with a token and datagram ports (``--method=dgt``) and two workers train on loopback. Three
other processes, the strangers, attack the PS as fast as they can. One opens bare TCP connections.
One opens HTTP/2 streams of the Session service without a token or a Hello. One sends datagrams. The
connections and the streams come from seven addresses; each process holds at most 1,200 of them, for
at most 10 s. In the other half of a round a busy loop replaces each stranger and takes the same
processor time. During a round a client with the token repeatedly opens a stream, sends its Hello
and reads the status, which measures the time of a join.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import re
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from bench.table import Row, render, spread
from bench.transport.flood import datagrams, flood
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.credentials import Credentials
from thinwire.tools.observer import Contact, read_status

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = ("connections", "streams", "datagrams")
_NUM_ADDRESSES, _MOST_HELD, _HELD_SECONDS = 7, 1200, 10.0
_DATAGRAM_BYTES = 1472
_START_SECONDS = 120.0
_JOIN_PAUSE_SECONDS, _JOIN_ATTEMPT_SECONDS = 0.25, 5.0
_GOAL_RATE, _GOAL_JOIN_SECONDS, _GOAL_AGE = 0.5, 5.0, 3.0
_NO_SNAPSHOT = "cannot write the checkpoint"


# -- strangers ---------------------------------------------------------------------------------


def opening(path: str = "/thinwire.v1.ParameterServer/Session") -> bytes:
    """Return the HTTP/2 bytes of a client that opens one gRPC call and then sends nothing."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "ps"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    # HPACK literals without indexing; a length below 127 takes one byte.
    block = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in fields
    )
    settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    headers = len(block).to_bytes(3, "big") + bytes((1, 4, 0, 0, 0, 1)) + block
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + headers


def hold(port: int, first: bytes, seconds: float) -> int:
    """Open connections as fast as the server accepts them; return their number."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * _MOST_HELD), hard))
    held: collections.deque[tuple[float, socket.socket]] = collections.deque()
    number, end = 0, time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        if len(held) >= _MOST_HELD or (held and held[0][0] < now - _HELD_SECONDS):
            held.popleft()[1].close()
        stranger = socket.socket()
        stranger.settimeout(0.5)
        try:
            stranger.bind((f"127.0.0.{2 + number % _NUM_ADDRESSES}", 0))
            stranger.connect(("127.0.0.1", port))
            stranger.sendall(first)
        except OSError:
            stranger.close()
            continue
        held.append((now, stranger))
        number += 1
    for _, stranger in held:
        stranger.close()
    return number


def _attack(kind: str, ports: list[int], seconds: float) -> int:
    if kind == "datagrams":
        data = datagrams("unknown", _DATAGRAM_BYTES)
        return flood("127.0.0.1", ports, seconds, data, _DATAGRAM_BYTES)
    if kind == "busy":
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            number += 1
        return number
    return hold(ports[0], opening() if kind == "streams" else b"", seconds)


@contextlib.contextmanager
def _attacking(
    kinds: tuple[str, ...], ports: dict[str, list[int]], seconds: float
) -> Iterator[None]:
    module = [sys.executable, "-m", "bench.systems.strangers"]
    started = []
    for kind in kinds:
        numbers = ",".join(map(str, ports.get(kind, [0])))
        command = [*module, "--kind", kind, "--ports", numbers, "--seconds", str(seconds)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    try:
        yield
    finally:
        for kind, process in zip(kinds, started, strict=True):
            output = process.communicate(timeout=seconds + 60.0)[0]
            sys.stderr.write(f"{kind}: {output.strip()}\n")


# -- the run -----------------------------------------------------------------------------------


class _StrangersRun:
    """A run of a PS and two workers; `end` ends its processes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, token = folder, secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        environment = os.environ | {"THINWIRE_TOKEN": token, "CUDA_VISIBLE_DEVICES": "-1"}
        common = (
            "--method=dgt",
            "--network=mnist_cnn",
            "--dataset=synthetic",
            "--nb_workers=2",
            "--worker_threads=1",
            "--batch_size=64",
            "--iter_max=100000000",
            "--checkpoint_interval_seconds=1",
            f"--port={self.port}",
            f"--run_dir={folder}/run",
        )
        self._nodes = []
        for name, *node_flags in (
            ("ps", "--type_node=PS"),
            ("worker-1", "--type_node=Worker", "--id_worker=1"),
            ("worker-2", "--type_node=Worker", "--id_worker=2"),
        ):
            with open(folder / f"{name}.out", "wb") as log:
                command = [sys.executable, str(ROOT / "main.py"), *node_flags, *common]
                self._nodes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )
        self.contact = Contact(
            f"127.0.0.1:{self.port}", Credentials(token=token.encode()), _JOIN_ATTEMPT_SECONDS
        )

    def wait(self, version: int) -> None:
        """Wait until the run has made `version` updates.

        Raises:
            RuntimeError: The updates took longer than `_START_SECONDS`.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(Unreachable, RequestRejected):
                if read_status(self.contact).version >= version:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"no training within {_START_SECONDS} s: {self.output()[-2000:]}")

    def output(self) -> str:
        """Return the log of the PS."""
        return (self.folder / "ps.out").read_text(errors="replace")

    @property
    def datagram_ports(self) -> list[int]:
        """The PS's UDP ports, read from /proc."""
        inodes = set()
        for entry in pathlib.Path(f"/proc/{self._nodes[0].pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry)))
        rows = [line.split() for line in pathlib.Path("/proc/net/udp").read_text().splitlines()]
        return [int(row[1].rpartition(":")[2], 16) for row in rows[1:] if row[9] in inodes]

    def newest_snapshot(self) -> float:
        """Return the time at which the newest snapshot file was written; 0 without a snapshot."""
        files = [*(self.folder / "run").rglob("*")]
        times = [path.stat().st_mtime for path in files if "checkpoints" in str(path)]
        return max(times, default=0.0)

    def end(self) -> None:
        """Terminate all processes; kill a process that does not end."""
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            try:
                node.wait(60.0)
            except subprocess.TimeoutExpired:
                node.kill()


def _join(run: _StrangersRun, over: threading.Event, found: list[float]) -> None:
    """Join repeatedly; record the seconds of each join, infinity if a join fails."""
    while not over.is_set():
        began = time.monotonic()
        while True:
            try:
                read_status(run.contact)
                found.append(time.monotonic() - began)
                break
            except (Unreachable, RequestRejected):
                if time.monotonic() - began > 4 * _GOAL_JOIN_SECONDS:
                    found.append(math.inf)
                    break
        over.wait(_JOIN_PAUSE_SECONDS)


def _phase(run: _StrangersRun, kinds: tuple[str, ...], seconds: float) -> tuple[float, list[float]]:
    """Run the strangers or busy loops; return the updates per second, and all joins' seconds."""
    streams = [run.port]
    ports = {"datagrams": run.datagram_ports, "connections": streams, "streams": streams}
    joins: list[float] = []
    over = threading.Event()
    joiner = threading.Thread(target=_join, args=(run, over, joins), daemon=True)
    with _attacking(kinds, ports, seconds + 4.0):
        time.sleep(2.0)  # all strangers have started after this time
        joiner.start()
        first, began = read_status(run.contact).version, time.monotonic()
        time.sleep(seconds)
        last, ended = read_status(run.contact).version, time.monotonic()
        over.set()
    joiner.join()
    return (last - first) / (ended - began), joins


def rows(seconds: float = 15.0, rounds: int = 3) -> list[Row]:
    """Measure the rounds; return the rows of the table."""
    busy, flooded, joins, late = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        run = _StrangersRun(pathlib.Path(name))
        try:
            run.wait(20)
            for _ in range(rounds):
                busy.append(_phase(run, ("busy",) * len(KINDS), seconds)[0])
                rate, phase_joins = _phase(run, KINDS, seconds)
                flooded.append(rate)
                joins += phase_joins
                late.append(time.time() - run.newest_snapshot())
            status = read_status(run.contact)
        finally:
            run.end()
        lost = run.output().count(_NO_SNAPSHOT)
    sys.stderr.write(f"refused: {status.policies.get('refused_peers')}\n")
    sys.stderr.write(f"joins: {len(joins)}, median {statistics.median(joins):.2f} s\n")
    rate, limit = statistics.median(flooded), statistics.median(busy)
    longest, age = max(joins), max(late)
    return [
        Row(
            "training under strangers / busy loops",
            rate,
            "updates/s",
            limit,
            rate / limit,
            _GOAL_RATE,
            "higher",
            spread=spread(
                attacked / undisturbed for attacked, undisturbed in zip(flooded, busy, strict=True)
            ),
        ),
        Row(
            f"longest of {len(joins)} joins under strangers",
            longest,
            "s",
            _GOAL_JOIN_SECONDS,
            longest / _GOAL_JOIN_SECONDS,
            1.0,
            "lower",
        ),
        Row("snapshots that failed", float(lost), "", 1.0, float(lost), 0.0, "lower"),
        Row("age of the newest snapshot", age, "s", _GOAL_AGE, age / _GOAL_AGE, 1.0, "lower"),
    ]


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m bench.systems.strangers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--seconds", type=float, default=15.0, help="length of each half of a round"
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--kind", choices=(*KINDS, "busy"), help="run as a stranger of this kind")
    options.add_argument("--ports", type=lambda text: [int(port) for port in text.split(",")])
    arguments = options.parse_args()
    if arguments.kind:
        began = time.monotonic()
        number = _attack(arguments.kind, arguments.ports, arguments.seconds)
        report = {"number": number, "per_second": round(number / (time.monotonic() - began))}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(render(rows(arguments.seconds, arguments.rounds)))


if __name__ == "__main__":
    main()

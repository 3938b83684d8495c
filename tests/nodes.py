"""Real ``main.py`` processes for tests: started, watched over the wire, always reaped."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from tests.forked import MAIN, ROOT, Forked, forker
from tests.waiting import patience
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.runtime.telemetry import run_status

#: Small enough that processes start and train in seconds.
TINY = (
    "--network=lenet",
    "--dataset=synthetic",
    "--worker_threads=1",
    "--batch_size=10",
    "--lease_seconds=1.5",
    "--learning_rate=0.01",
)


Started = subprocess.Popen[bytes] | Forked


def _afresh(arguments: list[str], log: IO[bytes], environment: dict[str, str]) -> Started:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def free_port() -> int:
    """Return a port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return this many ports, all different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(_probe()) for _ in range(number)]
        return [int(probe.getsockname()[1]) for probe in probes]


def _probe() -> socket.socket:
    """Return a server at a random port.

    The system gives no port below 32768 to other processes that want any port (Linux'
    ip_local_port_range), so that none takes the port before the test's node listens there.
    """
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000))
            )


class Nodes:
    """The processes of one test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = free_port()
        self.nb_ps = 1
        self.common: tuple[str, ...] = TINY
        self.main = MAIN
        self.environment: dict[str, str] = {}  # in addition to this process's
        self.fresh = False  # start new interpreters, not forks with everything imported
        self.processes: dict[str, Started] = {}

    def start(self, name: str, *flags: str) -> Started:
        """Start one process; `name` is for its log and for `wait`."""
        given = [f"--port={self.port}", f"--run_dir={self.run_dir}", *self.common, *flags]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | self.environment
        if self.main != MAIN:  # a program of the tests, which imports them
            environment["PYTHONPATH"] = str(ROOT)
        with open(self.folder / f"{name}.out", "ab") as log:
            start = _afresh if self.fresh else forker().start
            self.processes[name] = start([str(self.main), *given], log, environment)
        return self.processes[name]

    def cluster(
        self, nb_workers: int, *flags: str, nb_ps: int = 1, supervisor: bool = False
    ) -> None:
        """Start shards and workers one by one, as by hand; shard 0 is called `ps`."""
        self.nb_ps = nb_ps
        hosts = ",".join(f"127.0.0.1:{port}" for port in (self.port, *free_ports(nb_ps - 1)))
        self.common += (f"--nb_workers={nb_workers}", f"--nb_ps={nb_ps}", f"--ps_hosts={hosts}")
        self.common += flags
        linger = () if supervisor else ("--linger_seconds=4",)  # no Supervisor to wait for
        for shard in range(nb_ps):
            name = f"ps-{shard}" if shard else "ps"
            self.start(name, "--type_node=PS", f"--id_ps={shard}", *linger)
        for worker in range(1, nb_workers + 1):
            self.worker(worker)
        if supervisor:
            self.supervisor()

    def worker(self, number: int) -> None:
        self.start(f"worker-{number}", "--type_node=Worker", f"--id_worker={number}")

    def supervisor(self) -> None:
        self.start("supervisor", "--type_node=Supervisor", "--eval_interval_seconds=1")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(10)

    def wait(self, name: str, seconds: float = 60) -> int:
        """Return the exit code of a process."""
        try:
            return self.processes[name].wait(patience(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end; {self.output(name)[-3000:]}") from None

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def watch(
        self,
        until: Callable[[run_status.RunStatus], bool],
        seconds: float = 60,
        halt: str | None = None,
    ) -> None:
        """Watch the run through a Supervisor's stream until a status fits; end it if requested.

        Args:
            until: Returns True for the awaited status.
            seconds: Time limit, in seconds.
            halt: The stop reason to send.
        """
        deadline = time.monotonic() + patience(seconds)
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_SUPERVISOR,
            num_shards=self.nb_ps,
        )
        status: run_status.RunStatus | None = None
        while time.monotonic() < deadline:
            session = ClientSession(f"127.0.0.1:{self.port}", hello, 1 << 28)
            try:
                session.open(deadline - time.monotonic())
                while time.monotonic() < deadline:
                    message, _ = session.receive(deadline - time.monotonic())
                    if message.WhichOneof("body") == "report":
                        status = run_status.RunStatus.from_json(message.report.document)
                        if until(status):
                            if halt is not None:
                                session.send_control(pb.ToServer(halt=pb.Halt(cause=halt)))
                            session.send_control(pb.ToServer(leave=pb.Leave(cause="seen enough")))
                            session.close()
                            return
            except (StreamLost, Unreachable):
                pass
            except RequestRejected as error:
                if error.reason != pb.REASON_STARTING:
                    raise
                time.sleep(0.1)
            session.close(0.0)
        logs = {name: self.output(name)[-1500:] for name in self.processes}
        raise AssertionError(f"not seen within {seconds} s: {status}, {logs}")

    def reap(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

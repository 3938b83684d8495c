"""Real processes of a run; proxies between each client and each shard can tamper with the traffic.

Each client dials its own loopback address at the shard's port, where a proxy listens; the shard
listens at 127.0.0.1. Datagrams go to the same host at ports that the shard names, so they pass
through a proxy too.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable

from tests.chaos.history import History
from tests.chaos.proxy import Proxy, Switchboard
from tests.chaos.proxy_datagrams import DatagramProxy, Weather
from tests.chaos.proxy_messages import BulkMessages, Hearing
from tests.nodes import Nodes, free_port
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.proto.security import certificates
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.telemetry import run_status

#: Small, so that a run takes seconds; snapshots come fast, so that many kills meet one.
SMALL = (
    *("--worker_threads=1", "--batch_size=10", "--learning_rate=0.01"),
    *("--checkpoint_interval_seconds=0.5", "--keep_checkpoints=8", "--lease_seconds=3"),
    "--iter_max=100000000",
)
LENET = "--network=lenet"
#: Prepares the process by its environment, then runs the node that its flags name.
NODE = pathlib.Path(__file__).with_name("node.py")
TOKEN = "what only the nodes of this run know"


class Cast:
    """One run.

    Args:
        folder: Folder for all files of the run.
        flags: Flags of all nodes, in addition to SMALL.
        nb_workers: Workers 1..n.
        nb_ps: Shards 0..n-1.
        seed: Seed of the run and of the proxies.
        protected: True to use certificates and a token; proxies then cannot read the traffic.
        model: Command-line flag that names the model.
        plant: A bug planted in every node.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        flags: tuple[str, ...],
        nb_workers: int = 2,
        nb_ps: int = 1,
        seed: int = 1,
        protected: bool = False,
        model: str = LENET,
        plant: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.nb_workers, self.nb_ps, self.seed = folder, nb_workers, nb_ps, seed
        self.nodes, self.hearing, self.board = Nodes(folder), Hearing(), Switchboard()
        self.ports = [free_port() for _ in range(nb_ps)]
        # Another test may run at the same time, and be given a port that a proxy here still has.
        self._net = f"127.{os.getpid() % 200 + 1}.{self.ports[0] % 250 + 1}"
        self.nodes.port, self.nodes.nb_ps = self.ports[0], nb_ps
        counts = (f"--nb_workers={nb_workers}", f"--nb_ps={nb_ps}", f"--seed={seed}")
        self.nodes.common = (*SMALL, model, *counts, *flags)
        self.nodes.main, self._plant = NODE, plant
        self.protected = protected
        self.wires: dict[tuple[str, int], Proxy] = {}
        self.weather = Weather()
        self._datagrams: dict[tuple[str, int], DatagramProxy] = {}
        self.names = [*self.shards, *self.workers, "supervisor"]
        for name in self.names:
            for shard in range(nb_ps):
                # A shard announces its own address to shard 0. If a proxy listened there, workers
                # behind a cut would go around their own proxies, and nobody would hear them.
                if name != f"ps-{shard}":
                    self._wire(name, shard)
        if protected:
            self._protect()
        self.hearing.on_ports = self._open_for_datagrams
        self.hearing.on_bulk = self._open_for_bulk

    @property
    def shards(self) -> list[str]:
        """Names of the shards."""
        return [f"ps-{number}" for number in range(self.nb_ps)]

    @property
    def workers(self) -> list[str]:
        """Names of the workers."""
        return [f"worker-{number}" for number in range(1, self.nb_workers + 1)]

    @property
    def run_dir(self) -> pathlib.Path:
        """Flags of all nodes."""
        return self.nodes.run_dir

    # -- processes ------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start nodes; the name of an ended node may be started again."""
        for name in names:
            kind, _, number = name.partition("-")
            hosts = ",".join(f"{self._host_of(name)}:{port}" for port in self.ports)
            role = {
                "ps": ("--type_node=PS", f"--id_ps={number}", "--linger_seconds=6"),
                "worker": ("--type_node=Worker", f"--id_worker={number}"),
                "supervisor": ("--type_node=Supervisor", "--eval_interval_seconds=2"),
            }[kind]
            self._prepare(name, number)
            self.nodes.start(name, *role, f"--ps_hosts={hosts}", *self._credentials(name))

    def _prepare(self, name: str, number: str) -> None:
        """Have a node's next life write its history, with the bug if there is one."""
        self.nodes.environment = {
            "CHAOS_HISTORY": str(self.folder / f"{name}.history"),
            "CHAOS_SHARD": number if name.startswith("ps-") else "-1",
            "CHAOS_PLANT": self._plant,
            "CHAOS_TROUBLE": str(self.folder / f"{name}.trouble"),
        }

    def trouble(self, name: str, **what: float) -> None:
        """Let a node's disk or clock do this from now on; see `tests.chaos.node.TROUBLE`."""
        path = self.folder / f"{name}.trouble"
        path.with_suffix(".new").write_text(json.dumps(what))
        path.with_suffix(".new").replace(path)

    def start_second(self, name: str) -> None:
        """Start a shard once more, on the same files and another port."""
        ports = [free_port() for _ in self.ports]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        role = ("--type_node=PS", f"--id_ps={name[3:]}", f"--port={ports[0]}")
        self._prepare(name, name[3:])
        self.nodes.start(f"second-{name}", *role, f"--ps_hosts={hosts}", *self._credentials(name))

    def history(self) -> History:
        """Return what all nodes have written so far."""
        return History.read(sorted(self.folder.glob("*.history")))

    def start_all(self, supervisor: bool = True) -> None:
        """Start all nodes."""
        self.start(*(name for name in self.names if supervisor or name != "supervisor"))

    def kill(self, name: str) -> None:
        """Kill -9."""
        self.nodes.kill(name)

    def signal(self, name: str, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.is_running(name):
            self.nodes.processes[name].send_signal(number)

    def is_running(self, name: str) -> bool:
        """Whether the process was started and has not ended."""
        process = self.nodes.processes.get(name)
        return process is not None and process.poll() is None

    def pid(self, name: str) -> int:
        """Return its process id."""
        return self.nodes.processes[name].pid

    def forget(self, name: str) -> None:
        """Remove a node's files, so that its next process is a new incarnation."""
        shutil.rmtree(checkpoints_of(self.run_dir, name), ignore_errors=True)

    # -- wires ----------------------------------------------------------------------------------

    def wires_of(self, name: str) -> list[Proxy]:
        """Return the wires from a client to all shards, or from all clients to a shard."""
        if name.startswith("ps-"):
            number = int(name[3:])
            return [wire for (_, shard), wire in self.wires.items() if shard == number]
        return [self.wires[name, shard] for shard in range(self.nb_ps)]

    def fall_silent(self, shard: int, seconds: float = 3.0) -> None:
        """Wait until nothing is under way any more from a shard that has died."""
        wires = self.wires_of(f"ps-{shard}")
        wait_until(lambda: not any(wire.reaches_target for wire in wires), seconds)

    def _wire(self, name: str, shard: int) -> None:
        port = self.ports[shard]
        heard = None
        if name.startswith("worker-") and not self.protected:
            heard = self.hearing.between(int(name[7:]), shard)
        seed = random.Random(f"{self.seed} {name} {shard}").getrandbits(32)
        listen, target = (self._host_of(name), port), ("127.0.0.1", port)
        self.wires[name, shard] = Proxy(self.board, listen, target, seed, heard)

    def _open_for_bulk(self, worker: int, shard: int, port: int) -> None:
        """Forward to the port that a worker is about to dial."""
        heard = self.hearing.between(worker, shard, BulkMessages)
        self.wires[f"worker-{worker}", shard].open_beside(port, heard)

    def _open_for_datagrams(self, worker: int, ports: tuple[int, ...]) -> None:
        """Listen where a worker is about to send datagrams."""
        name = f"worker-{worker}"
        for port in ports:
            if (name, port) not in self._datagrams:
                listen, target = (self._host_of(name), port), ("127.0.0.1", port)
                seed = self.seed + worker
                passing = DatagramProxy(self.board, listen, target, self.weather, seed)
                self._datagrams[name, port] = passing

    def _host_of(self, name: str) -> str:
        return f"{self._net}.{10 + self.names.index(name)}"

    def _protect(self) -> None:
        hosts = ("127.0.0.1", *(self._host_of(name) for name in self.names))
        holders = certificates.holders(hosts, self.nb_ps, self.nb_workers)
        certificates.make(self.folder / "certs", holders, days=1)
        token = self.folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)

    def _credentials(self, name: str) -> tuple[str, ...]:
        if not self.protected:
            return ()
        paper = self.folder / "certs" / ("supervisor-0" if name == "supervisor" else name)
        return (
            f"--tls_cert={paper}.crt",
            f"--tls_key={paper}.key",
            f"--tls_ca={paper.parent}/ca.crt",
            f"--token_file={self.folder}/token",
        )

    # -- the end --------------------------------------------------------------------------------

    def status(self, seconds: float = 60.0, halt: bool = False) -> run_status.RunStatus:
        """Return the run's status from shard 0, requested as a Supervisor that evaluates nothing.

        Args:
            seconds: Patience.
            halt: Whether to end the run then.

        Raises:
            AssertionError: It says nothing within that time.
        """
        awake, failure = Awake(25.0), ""
        while (left := seconds - awake()) > 0:
            hello = pb.Hello(
                protocol_version=messages.PROTOCOL_VERSION,
                role=pb.ROLE_SUPERVISOR,
                num_shards=self.nb_ps,
            )
            address = f"127.0.0.1:{self.ports[0]}"
            session = ClientSession(address, hello, 1 << 28, credentials=self._own_credentials())
            try:
                session.open(min(5.0, left))
                while (message := session.receive(20.0)[0]).WhichOneof("body") != "report":
                    pass
                if halt:
                    session.send_control(pb.ToServer(halt=pb.Halt(cause="max_seconds")))
                session.send_control(pb.ToServer(leave=pb.Leave(cause="seen enough")))
                return run_status.RunStatus.from_json(message.report.document)
            except (StreamLost, Unreachable, RequestRejected) as error:
                failure = str(error)
                time.sleep(0.2)
            finally:
                session.close()
        raise AssertionError(f"shard 0 says nothing in {seconds:g} s: {failure}")

    def halt(self) -> run_status.RunStatus:
        """End the run; return how it stood."""
        return self.status(150.0, halt=True)

    def _own_credentials(self) -> Credentials:
        if not self.protected:
            return NO_CREDENTIALS
        folder = self.folder / "certs"
        paper = [(folder / f"supervisor-0.{end}").read_bytes() for end in ("crt", "key")]
        return Credentials(*paper, (folder / "ca.crt").read_bytes(), TOKEN.encode())

    def wait(self, names: list[str], seconds: float = 90) -> dict[str, int]:
        """Return the exit code of each.

        Raises:
            AssertionError: One does not end.
        """
        for name in names:
            if not wait_until(lambda name=name: not self.is_running(name), seconds):  # type: ignore[misc]
                raise AssertionError(f"{name} did not end; {self.nodes.output(name)[-3000:]}")
        return {name: self.nodes.processes[name].returncode for name in names}

    def close(self) -> None:
        """Reap all nodes."""
        for process in self.nodes.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        self.nodes.reap()
        self.board.close()


class Awake:
    """Seconds since this object was made, without the time in which this process was stopped.

    Call it often: at most `most_seconds` count between two calls.
    """

    def __init__(self, most_seconds: float = 2.0) -> None:
        self._most_seconds, self._seconds, self._asked = most_seconds, 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._asked, self._most_seconds)
        self._asked = now
        return self._seconds


def wait_until(holds: Callable[[], bool], seconds: float, what: str = "") -> bool:
    """Wait until the condition holds; return False after this many seconds.

    Raises:
        AssertionError: The condition does not hold; `what` names the awaited event.
    """
    awake = Awake()
    while not holds():
        if awake() >= seconds:
            if what:
                raise AssertionError(f"not within {seconds:g} s: {what}")
            return False
        time.sleep(0.005)
    return True


def open_files(pid: int) -> int:
    """Return how many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))

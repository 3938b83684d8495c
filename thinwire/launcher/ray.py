"""Nodes as actors of a Ray cluster; the Supervisor stays on the launching node.

Each actor runs a node as a process of its own, under a watchdog that ends it with the actor; Ray
ends the actors of a launcher that is gone. Ray only finds the places: the nodes' messages do not
pass through it.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from thinwire.flags import launch, security
from thinwire.launcher import watchdog
from thinwire.launcher.local import SupervisedProcess, exit_code, start_here, watchdog_command
from thinwire.launcher.output import READ_BYTES, each_line
from thinwire.launcher.role import LineSink, Node, threads_of
from thinwire.launcher.ssh import code_deployment
from thinwire.ops.run.settings import Run
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable, check_bind
from thinwire.proto.grpc.common import host_and_port
from thinwire.proto.security.credentials import TOKEN_VARIABLE

FLAGS = flags.FLAGS
_PLACE_SECONDS = 60.0
_BEAT_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0
_BYTE_OF = {number: byte for byte, number in watchdog.SIGNALS.items()}


@dataclasses.dataclass(frozen=True)
class ActorLocation:
    """Where Ray has placed an actor."""

    ray_node: str
    address: str
    num_cpus: int
    free_port: int
    has_token: bool  # in its environment


def _actor_class() -> type:
    """Return the class of the actors.

    Made here so that Ray sends it by value: on its nodes nothing of this project can be imported.
    """

    class NodeActor:
        """One node of the run, on a node of Ray."""

        def find(self) -> tuple[str, str, int, int, bool]:
            import importlib
            import os
            import socket

            ray = importlib.import_module("ray")

            address = ray.util.get_node_ip_address()
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
            node = ray.get_runtime_context().get_node_id()
            has_token = bool(os.environ.get("THINWIRE_TOKEN"))
            return node, address, len(os.sched_getaffinity(0)), port, has_token

        def unpack(self, folder: str, archive: bytes) -> None:
            import os
            import subprocess

            folder = os.path.join(os.path.expanduser("~"), folder)
            os.makedirs(folder, exist_ok=True)
            command = ["tar", "-x", "-z", "-o", "-f", "-", "-C", folder]
            subprocess.run(command, input=archive, check=True)

        def start(self, folder: str, command: list[str], is_followed: bool) -> None:
            import os
            import subprocess

            environment = dict(os.environ)
            environment.pop("TF_CONFIG", None)
            if not environment.get("CUDA_VISIBLE_DEVICES"):  # Ray hides GPUs not requested
                environment.pop("CUDA_VISIBLE_DEVICES", None)
            pipe = subprocess.PIPE if is_followed else None
            self.process = subprocess.Popen(
                command,
                cwd=os.path.join(os.path.expanduser("~"), folder),
                stdin=subprocess.PIPE,
                stdout=pipe,
                stderr=pipe,
                env=environment,
            )

        def read(self, begun: None, is_error: bool, most: int) -> bytes:
            import os

            stream = self.process.stderr if is_error else self.process.stdout
            return b"" if stream is None else os.read(stream.fileno(), most)

        def wait(self, begun: None) -> int:
            return self.process.wait()

        def write(self, begun: None, message: bytes) -> None:
            import contextlib
            import os

            if self.process.stdin is not None:
                with contextlib.suppress(OSError):  # it has ended
                    os.write(self.process.stdin.fileno(), message)

    return NodeActor


class RayProcess:
    """A node in an actor; see `thinwire.launcher.role.Process`."""

    def __init__(
        self, ray: Any, actor: Any, folder: str, command: list[str], output: LineSink | None
    ) -> None:
        """Start it.

        Args:
            ray: The package.
            actor: In which it runs.
            folder: The current one, on the actor's host.
            command: The watchdog's command line.
            output: Takes each line that it writes; None: Ray shows them.
        """
        self._ray, self._actor = ray, actor
        self.is_followed = output is not None
        self._last_beat = time.monotonic()
        self.begun = actor.start.remote(folder, command, self.is_followed)
        # Calls of an actor run side by side: each takes the result of the one that must precede it.
        self._end = actor.wait.remote(self.begun)
        self._code: int | None = None
        self._readers = [
            threading.Thread(target=self._follow, args=(output, is_error), daemon=True)
            for is_error in (False, True)
            if output is not None
        ]
        for reader in self._readers:
            reader.start()

    def _follow(self, output: LineSink, is_error: bool) -> None:
        """Pass on what the node writes, line by line."""
        for line in each_line(lambda: self._read(is_error)):
            output.on_line(line, is_error)

    def _read(self, is_error: bool) -> bytes:
        """Return the next bytes of the node's output; none: its end, or that of its actor."""
        try:
            pending = self._actor.read.remote(self.begun, is_error, READ_BYTES)
            return bytes(self._ray.get(pending))
        except (self._ray.exceptions.RayError, RuntimeError):  # or Ray was left
            return b""

    def poll(self) -> int | None:
        """Return the exit code; a lost actor counts as a killed node."""
        if self._code is None and self._ray.wait([self._end], timeout=0)[0]:
            self._code = self.wait()
        return self._code

    def send_signal(self, number: int) -> None:
        """Let the watchdog send a signal to the node."""
        self._actor.write.remote(self.begun, _BYTE_OF[signal.Signals(number)])

    def beat(self) -> None:
        """Show the watchdog from time to time that the launcher is alive."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._actor.write.remote(self.begun, watchdog.BEAT)

    def kill(self) -> None:
        """End the node immediately, and then its actor."""
        self.send_signal(signal.SIGKILL)
        if not self._ray.wait([self._end], timeout=_PATIENCE_SECONDS)[0]:
            self._ray.kill(self._actor)

    def wait(self) -> int:
        """Wait for the end; return what `poll` returns."""
        try:
            code = exit_code(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
            code = -signal.SIGHUP
        for reader in self._readers:
            reader.join(_PATIENCE_SECONDS)
        return code


class RayLauncher:
    """Starts nodes in actors."""

    def __init__(self, run: Run, script: pathlib.Path | None = None) -> None:
        """Make the actors, find out where they are, and copy the code.

        Args:
            run: The run's settings.
            script: What workers run; None: they play their role.

        Raises:
            ConfigurationError: No ray here, or an address beyond one machine without --insecure.
            Unreachable: Ray cannot be reached, or does not give the actors a place.
        """
        if FLAGS["ip_PS"].present:
            launch.refuse_chosen_addresses()
        self._ray = _connect()
        try:
            self._prepare(run, script)
        except BaseException:
            self.close()
            raise

    def _prepare(self, run: Run, script: pathlib.Path | None) -> None:
        self._overwrite = ["--overwrite"] if run.overwrite else []
        self._code, self._python = code_deployment(script), launch.remote_python()
        roles = [("PS", shard) for shard in range(run.nb_ps)]
        roles += [("Worker", worker) for worker in range(1, run.nb_workers + 1)]
        make = self._ray.remote(_actor_class()).options(
            num_cpus=0, scheduling_strategy="SPREAD", max_concurrency=8
        )
        self._actors = {role: make.remote() for role in roles}
        answers = self._get([actor.find.remote() for actor in self._actors.values()])
        self._found = {
            role: ActorLocation(*each) for role, each in zip(roles, answers, strict=True)
        }
        demand_token([*self._found.values()])
        self._workers = collections.Counter(
            found.ray_node for (role, _), found in self._found.items() if role == "Worker"
        )
        shards = [self._found["PS", shard] for shard in range(run.nb_ps)]
        self.addresses = (
            run.addresses
            if FLAGS.ps_hosts
            else tuple(
                host_and_port(each.address, FLAGS.port + shard if FLAGS.port else each.free_port)
                for shard, each in enumerate(shards)
            )
        )
        for address in dict.fromkeys(each.address for each in shards):
            check_bind(address, FLAGS.insecure, security.protection(FLAGS))
        if self._code.archive is not None:
            one_each = {found.ray_node: role for role, found in self._found.items()}
            archive = self._ray.put(self._code.archive)
            folder = self._code.folder
            self._get(
                [self._actors[role].unpack.remote(folder, archive) for role in one_each.values()]
            )
        self._started: list[RayProcess] = []
        self._supervisor: SupervisedProcess | None = None

    def start(self, node: Node) -> RayProcess | SupervisedProcess:
        """Start a node."""
        if node.role == "Supervisor":
            self._supervisor = start_here(node)
            return self._supervisor
        found = self._found[node.role, node.number]
        threads = threads_of(found.num_cpus, self._workers[found.ray_node])
        own = [f"--ip_PS={found.address}"] if node.role == "PS" else []
        own.append(f"--worker_threads={threads}")
        if not node.num_restarts:  # a restarted worker resumes
            own += self._overwrite
        command = [self._python, *self._code.words(node, own)]
        supervised = watchdog_command(self._python, self._code.watchdog, command, announce=False)
        actor = self._actors[node.role, node.number]
        process = RayProcess(self._ray, actor, self._code.folder, supervised, node.output)
        self._started.append(process)
        return process

    def settle(self) -> None:
        """Wait until every node has been started; raises Unreachable if one cannot."""
        self._get([process.begun for process in self._started])

    def tend(self) -> None:
        """Show the watchdogs that the launcher is alive."""
        for process in self._started:
            process.beat()
        if self._supervisor is not None:
            self._supervisor.beat()

    def close(self) -> None:
        """Leave Ray, which ends the actors."""
        self._ray.shutdown()

    def _get(self, pending: list[Any]) -> list[Any]:
        try:
            return list(self._ray.get(pending, timeout=_PLACE_SECONDS))
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise Unreachable(
                f"Ray did not start the nodes ({type(error).__name__}: {last}); look at `ray "
                "status`, --sync_dst_dir and --remote_python."
            ) from error


def prepare(run: Run, script: pathlib.Path | None = None) -> RayLauncher:
    """Return the launcher of a run; raises as `RayLauncher` does."""
    return RayLauncher(run, script)


def demand_token(found: Sequence[ActorLocation]) -> None:
    """Refuse a token that only the launcher has: Ray passes no environment on, and must not.

    What Ray passes on, its dashboard shows.

    Raises:
        ConfigurationError: The token is in our environment, and not in that of Ray's nodes.
    """
    lacking = [each.address for each in found if not each.has_token]
    if os.environ.get(TOKEN_VARIABLE) and not FLAGS.token_file and lacking:
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set here and not on Ray's nodes ({', '.join(lacking):.200}), and "
            "Ray does not carry it: give --token_file, at the same path on every host, or set the "
            "variable where Ray is started there."
        )


def _connect() -> Any:
    """Return the package, connected to its cluster."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            "--launcher=ray needs the package ray, which is not installed here; install it (pip "
            "install 'thinwire[ray]'), or choose --launcher=local or ssh."
        ) from error
    try:
        ray.init(address=FLAGS.ray_address, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Unreachable(
            f"--ray_address={FLAGS.ray_address}: no Ray cluster answers there ({error})."
        ) from error
    return ray

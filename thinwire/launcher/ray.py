"""Starts PS and workers in actors of a Ray cluster, and the Supervisor on the launching host.

Every PS and worker has one bundle (its resources) in a Ray placement group, which is spread over
Ray's nodes. In each bundle a Ray actor (`ray_actor`) runs the PS or worker as a process under a
watchdog, which ends the process when the actor ends. Ray ends the actors of a launcher that has
died. The package thinwire, the user's script and the files that flags name are the working
directory of the run's runtime environment in Ray. Ray only places the PS and workers, which send
their messages to each other directly.

When a node of Ray is lost, Ray moves the node's bundles to other nodes and restarts the bundles'
actors there. After Ray has restarted actors, `role.Cluster` restarts the lost PS and workers in
them, as --restart_workers and --restart_ps allow. A restarted PS has a new address, which every Ray
actor writes to a file for the actor's worker or PS (`thinwire.proto.moved`).
"""

from __future__ import annotations

import collections
import importlib
import json
import math
import os
import pathlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags, logging

from thinwire.flags import launch, security
from thinwire.launcher import deployment, watchdog
from thinwire.launcher.local import SupervisedProcess, exit_code, start_here, watchdog_command
from thinwire.launcher.output import READ_BYTES, NodeOutput, Screen, follow, report_losses
from thinwire.launcher.ray_actor import ActorLocation, NodeActor
from thinwire.launcher.role import Launcher, LineSink, Node, threads_of, whole_input
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable, check_bind
from thinwire.proto.grpc.common import host_and_port
from thinwire.proto.moved import MOVED_VARIABLE, moved_lines
from thinwire.proto.security.credentials import TOKEN_VARIABLE
from thinwire.runtime.run.devices import ON_SHARED_GPU, unless_set
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import Run
from thinwire.runtime.standard_input import StandardInput

FLAGS = flags.FLAGS
#: Time limit for the placement of a run's actors, in seconds. A Ray cluster that starts cloud
#: machines on demand takes minutes.
_PLACE_SECONDS = 600.0
#: Time limit for the start of all PS and workers after Ray has placed their actors, in seconds.
_START_SECONDS = 60.0
# Seconds between two polls, and between two log lines, of a wait
_LOOK_SECONDS, _LOG_SECONDS = 0.2, 15.0
#: Time limit of a wait for a killed node, and for a thread that reads a node's last output.
_PATIENCE_SECONDS = 10.0
_BYTE_OF = {number: byte for byte, number in watchdog.SIGNALS.items()}
#: Short name of a resource in flags -> Ray's name. A name that is not listed is a custom resource.
_RAY_NAMES = {"cpus": "CPU", "gpus": "GPU"}

#: Role ("PS" or "Worker") and number of a node, for example ("Worker", 1).
Place = tuple[str, int]


class RayProcess:
    """A PS or worker that a Ray actor runs; implements `thinwire.launcher.role.Process`.

    Attributes:
        started: Event that is set when the PS or worker has started, or has failed to start.
        error: Ray's error if the PS or worker, or its actor, was lost; else None.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        arrange: Callable[[ActorLocation], tuple[list[str], str, dict[str, str]]],
        output: LineSink,
    ) -> None:
        """Start a thread that starts the PS or worker when Ray has placed the node's actor.

        Args:
            ray: The Python package `ray`, imported.
            actor: Ray's handle of the `NodeActor` that runs the PS or worker.
            arrange: Function that returns the arguments of `NodeActor.start` for the actor's
                location.
            output: `LineSink` that receives each output line of the PS or worker.
        """
        self._ray, self._actor = ray, actor
        self._arrange, self._output = arrange, output
        self.started = threading.Event()
        self.error: Exception | None = None
        self._code: int | None = None
        self._early: list[int] = []  # numbers of the signals to send as soon as the node runs
        self._lock = threading.Lock()
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-node", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Start the PS or worker, read its output to the end, and store its exit code.

        If Ray loses the actor, the actor's PS or worker counts as killed by SIGHUP.
        """
        try:
            location = find(self._ray, self._actor, self._killed)
            self._ray.get(self._actor.start.remote(*self._arrange(location)))
            with self._lock:
                self.started.set()
                for number in self._early:
                    self._send(number)
            readers = [
                threading.Thread(target=self._follow, args=(is_error,), daemon=True)
                for is_error in (False, True)
            ]
            for reader in readers:
                reader.start()
            code = exit_code(self._ray.get(self._actor.wait.remote()))
            for reader in readers:
                reader.join(_PATIENCE_SECONDS)
        # Ray raises RuntimeError after `ray.shutdown`.
        except (self._ray.exceptions.RayError, RuntimeError, OSError) as error:
            logging.debug("lost an actor: %s", error)
            self.error, code = error, -signal.SIGHUP
        self._code = code
        self.started.set()

    def _follow(self, is_error: bool) -> None:
        """Pass each line of the node's stdout or stderr to the object `output`."""
        follow(
            lambda: self._read(is_error),
            lambda line: self._output.on_line(line, is_error),
        )

    def _read(self, is_error: bool) -> bytes:
        """Return the next bytes of the node's output; empty if the node or its actor has ended."""
        try:
            return bytes(self._ray.get(self._actor.read.remote(is_error, READ_BYTES)))
        # RuntimeError is raised after `ray.shutdown`
        except (self._ray.exceptions.RayError, RuntimeError):
            return b""

    def poll(self) -> int | None:
        """Return the node's exit code, or None while the node runs."""
        return self._code

    def send_signal(self, number: int) -> None:
        """Make the watchdog send a signal to the node, immediately or when the node has started."""
        with self._lock:
            if self.started.is_set():
                self._send(number)
            else:
                self._early.append(number)

    def _send(self, number: int) -> None:
        self._actor.write.remote(_BYTE_OF[signal.Signals(number)])

    def kill(self) -> None:
        """Kill the node; kill its actor too if the node does not end in `_PATIENCE_SECONDS`."""
        self._killed.set()
        self.send_signal(signal.SIGKILL)
        self._thread.join(_PATIENCE_SECONDS if self.started.is_set() else 0.0)
        if self._thread.is_alive():
            self._ray.kill(self._actor)

    def wait(self) -> int:
        """Wait for the end of the PS or worker; return its exit code."""
        self._thread.join()
        return -signal.SIGHUP if self._code is None else self._code


def find(ray: Any, actor: Any, given_up: threading.Event) -> ActorLocation:
    """Wait until Ray has placed or restarted an actor; return the actor's location.

    Args:
        ray: The Python package `ray`, imported.
        actor: Ray's handle of the `NodeActor` to wait for.
        given_up: Event by which another thread ends the wait.

    Raises:
        RayError: Ray has lost the actor and does not restart it, or `given_up` is set.
    """
    logged_at = time.monotonic()
    while True:
        try:
            location: ActorLocation = ray.get(actor.find.remote(TOKEN_VARIABLE))
            return location
        except ray.exceptions.ActorUnavailableError:  # Ray is restarting the actor
            if given_up.wait(_LOOK_SECONDS):
                raise
        if time.monotonic() - logged_at >= _LOG_SECONDS:
            logged_at = time.monotonic()
            logging.warning("waiting for Ray to find resources to restart a node; see `ray status`")


class RayLauncher(Launcher):
    """Starts PS and workers in actors of a Ray cluster, and the Supervisor on this host."""

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Connect to Ray, send the code, and wait until Ray has placed the actors.

        Args:
            run: Settings of the run, from the flags.
            script_folder: Folder of the user's script that workers run; None if they run no script.

        Raises:
            ConfigurationError: The package ray is not installed, the resources or the runtime
                environment are invalid, or a PS without protection (token or TLS) and without
                --insecure would listen on an address that other machines reach.
            Unreachable: The Ray cluster cannot be reached, or Ray does not place the actors in
                time.
        """
        if FLAGS["ip_PS"].present:
            launch.refuse_chosen_addresses()
        if run.device.startswith("gpu:"):
            raise ConfigurationError(
                f"--device={run.device}: Ray chooses the GPUs of each worker; leave --device out, "
                "and set --ray_worker_resources=gpus=1."
            )
        if run.nb_ps > 1 and FLAGS.restart_ps and FLAGS.ps_hosts:
            raise ConfigurationError(
                "--ps_hosts with --restart_ps: a PS that Ray restarts on another machine has "
                "another address than in --ps_hosts; leave one of the two flags out."
            )
        self._run = run
        self._input: Any = None
        self._is_input_known = False
        self._bundles = {
            **{("PS", shard): requested("PS") for shard in range(run.nb_ps)},
            **{("Worker", number): requested("Worker") for number in range(1, run.nb_workers + 1)},
        }
        self._screen = Screen()  # shows the output of nodes whose `output` is None
        self._code = deployment.copied_code("", script_folder)
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-ray-")
        self._ray = _import_ray()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        run = self._run
        code = pathlib.Path(self._folder.name) / "code"
        deployment.unpack(self._code.archive or b"", code)
        environment = {**own_environment(), "working_dir": str(code)}
        _connect(self._ray, environment, total(self._bundles.values()))
        self._actors = self._place()
        self._found: dict[Place, ActorLocation] = {}  # node -> location of the node's Ray actor
        pending_of = {
            place: actor.find.remote(TOKEN_VARIABLE) for place, actor in self._actors.items()
        }
        for place, pending in pending_of.items():
            self._found[place] = self._get(pending, _PLACE_SECONDS)
        demand_token([*self._found.values()])
        # Former address (host:port) -> id of the PS shard that has moved to another address
        self._former: dict[str, int] = {}
        self._lock = threading.Lock()
        self._addresses = [self._address(shard) for shard in range(run.nb_ps)]
        self.addresses = run.addresses if FLAGS.ps_hosts else tuple(self._addresses)
        for place, location in self._found.items():
            if place[0] == "PS":
                check_bind(location.address, FLAGS.insecure, security.protection(FLAGS))
        self._started: dict[Place, RayProcess] = {}
        self._supervisor: SupervisedProcess | None = None

    def _place(self) -> dict[Place, Any]:
        """Place one actor per PS and worker in a placement group; return node -> actor."""
        util = importlib.import_module("ray.util")
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        # The strategy SPREAD assigns bundles in order, each to an unused Ray node while one exists.
        # The PS come first, so a PS shares a Ray node only if there are too few nodes.
        group = util.placement_group([*self._bundles.values()], strategy="SPREAD")
        self._await(group)
        actors = {}
        for index, ((role, number), bundle) in enumerate(self._bundles.items()):
            restarts = FLAGS.restart_ps if role == "PS" else FLAGS.restart_workers
            custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
            options = self._ray.remote(NodeActor).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=custom,
                # -1 means no limit: `role.Restarts` limits restarts
                max_restarts=-1 if restarts else 0,
                max_concurrency=8,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(group, index),
            )
            actors[role, number] = options.remote()
        return actors

    def _await(self, group: Any) -> None:
        """Wait until Ray has allocated the placement group of the run's actors.

        Raises:
            Unreachable: Ray has not allocated the placement group within `_PLACE_SECONDS` seconds.
        """
        deadline, logged_at = time.monotonic() + _PLACE_SECONDS, time.monotonic()
        ready = group.ready()
        while not self._ray.wait([ready], timeout=_LOOK_SECONDS)[0]:
            wants, has = total(self._bundles.values()), self._ray.cluster_resources()
            lacks = ", ".join(
                f"{name} {has.get(name, 0):g} of {amount:g}"
                for name, amount in wants.items()
                if has.get(name, 0) < amount
            )
            why = (
                f"the whole cluster has only {lacks}"
                if lacks
                else "other jobs use the resources, or no single node has enough"
            )
            if time.monotonic() >= deadline:
                raise Unreachable(
                    f"Ray has no place for this run's nodes: {why}. Lower --ray_worker_resources, "
                    "--ray_ps_resources or --nb_workers; `ray status` shows the used resources."
                )
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()
                logging.info("waiting for Ray to find resources for the nodes: %s", why)
        self._ray.get(ready)

    def _address(self, shard: int) -> str:
        """Return the address (host:port) at which a PS shard must listen on its actor's host."""
        location = self._found["PS", shard]
        return host_and_port(
            location.address, FLAGS.port + shard if FLAGS.port else location.free_port
        )

    def start(self, node: Node) -> RayProcess | SupervisedProcess:
        """Start a PS or worker in its Ray actor, which Ray may have restarted on another host."""
        if node.role == "Supervisor":
            path = pathlib.Path(self._folder.name) / "ps_moved"
            self._supervisor = start_here(node, variables={MOVED_VARIABLE: str(path)})
            return self._supervisor
        place = node.role, node.number
        if node.input is not None and not self._is_input_known:
            self._input, self._is_input_known = self._put_input(node.input), True
        output = node.output or NodeOutput(node.name, self._screen, only_stderr=True)
        process = RayProcess(
            self._ray, self._actors[place], lambda found: self._arrange(node, found), output
        )
        self._started[place] = process
        return process

    def _put_input(self, given: StandardInput) -> Any:
        """Put the workers' standard input into Ray's object store; return its reference or None."""
        file = whole_input(given)
        if file is None:
            return None
        with file:
            return self._ray.put(file.read())

    def _arrange(self, node: Node, found: ActorLocation) -> tuple[list[str], str, dict[str, str]]:
        """Return a node's command line for its actor's host, moved PS addresses and variables."""
        place = node.role, node.number
        with self._lock:
            before, self._found[place] = self._found[place], found
            if before.ray_node != found.ray_node:
                logging.warning("node %s now runs on machine %s", node.name, found.address)
                if node.role == "PS":
                    self._move(node.number)
            addresses = ",".join(self._addresses)
            moved = self._moved()
        more_flags = [f"--run_dir={self._run.run_dir.resolve()}"]
        if node.role == "PS":
            more_flags.append(f"--ip_PS={found.address}")
        more_flags.append(
            f"--worker_threads={threads_of(int(self._bundles[place].get('CPU', 1)), 1)}"
        )
        if not FLAGS.ps_hosts:
            more_flags.append(f"--ps_hosts={addresses}")
        # A restarted node must resume the run, not clear its files
        if self._run.overwrite and not node.num_restarts:
            more_flags.append("--overwrite")
        python = launch.remote_python() if FLAGS.remote_python else found.python
        command = [python, *self._code.words(node, more_flags)]
        given_input = ""
        if node.input is not None and self._input is not None:
            path = self._ray.get(self._actors[place].take_input.remote(self._input))
            given_input = f"file:{path}"
        # The watchdog sends SIGKILL without a SIGTERM before: a PS or worker that ends on SIGTERM
        # ends the run for all nodes. A node whose actor is lost must not end the run, because the
        # `Cluster` starts the node again.
        supervised = watchdog_command(
            python,
            self._code.programs.watchdog,
            command,
            grace_seconds=0.0,
            given_input=given_input,
        )
        return supervised, moved, self._variables(node)

    def _variables(self, node: Node) -> dict[str, str]:
        """Return a node's environment variables; Ray itself chooses the GPUs of a worker."""
        gpus = self._bundles[node.role, node.number].get("GPU", 0.0)
        is_shared = node.role == "Worker" and gpus != int(gpus)
        return {**node.variables, **(unless_set(ON_SHARED_GPU) if is_shared else {})}

    def _move(self, shard: int) -> None:
        """Send a restarted PS shard's address to every node's actor; the caller holds `_lock`."""
        self._former[self._addresses[shard]] = shard
        self._addresses[shard] = self._address(shard)
        self._former.pop(self._addresses[shard], None)
        draft = pathlib.Path(self._folder.name) / "ps_moved.new"
        draft.write_text(self._moved())
        # The Supervisor reads new addresses of PS shards from this file
        draft.replace(draft.with_name("ps_moved"))
        for actor in self._actors.values():
            actor.note_moved.remote(self._moved())

    def _moved(self) -> str:
        return moved_lines(
            {former: self._addresses[shard] for former, shard in self._former.items()}
        )

    def settle(self) -> None:
        """Wait until every PS and worker has started.

        Raises:
            Unreachable: A PS or worker failed to start, or did not start within `_START_SECONDS`
                seconds.
        """
        deadline = time.monotonic() + _START_SECONDS
        for (role, number), process in self._started.items():
            in_time = process.started.wait(max(0.0, deadline - time.monotonic()))
            if process.error is not None or not in_time:
                why = process.error or f"no answer within {_START_SECONDS:g} s"
                raise Unreachable(f"Ray did not start {role.lower()}-{number}: {_last_line(why)}")

    def close(self) -> None:
        """Disconnect from Ray, which ends the actors, and close the nodes' output."""
        self._ray.shutdown()
        self._folder.cleanup()
        self._screen.close()
        report_losses(self._screen.copies)

    def _get(self, pending: Any, seconds: float) -> Any:
        try:
            return self._ray.get(pending, timeout=seconds)
        except self._ray.exceptions.RayError as error:
            raise Unreachable(
                f"Ray did not start an actor ({type(error).__name__}: {_last_line(error)}); look "
                "at `ray status` and --ray_runtime_env. Its nodes need Python with this project's "
                "requirements."
            ) from error


def requested(role: str) -> dict[str, float]:
    """Return name of a Ray resource -> amount that one PS, or one worker, requests."""
    words = FLAGS.ray_ps_resources if role == "PS" else FLAGS.ray_worker_resources
    return {_RAY_NAMES.get(name, name): amount for name, amount in launch.amounts(words).items()}


def total(bundles: Sequence[Mapping[str, float]] | Any) -> dict[str, float]:
    """Return name of a Ray resource -> amount that all PS and workers request together."""
    return dict(sum(map(collections.Counter, bundles), collections.Counter()))


def own_environment() -> dict[str, Any]:
    """Read Ray's runtime environment from the file of --ray_runtime_env; empty without the flag.

    Raises:
        ConfigurationError: The file of --ray_runtime_env is not a JSON object, or has a key that
            the launcher sets.
    """
    if FLAGS.ray_runtime_env is None:
        return {}
    what = f"--ray_runtime_env={FLAGS.ray_runtime_env}"
    try:
        document = json.loads(read_bounded(FLAGS.ray_runtime_env))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f'{what} cannot be read: {error}; expected a JSON file, such as {{"pip": ["keras"]}}.'
        ) from error
    if not isinstance(document, dict) or "working_dir" in document:
        raise ConfigurationError(
            f"{what}: expected a JSON object without the keys working_dir, which the "
            "launcher sets to send the code; add more modules with py_modules."
        )
    return document


def demand_token(found: Sequence[ActorLocation]) -> None:
    """Reject a token that is in the launcher's environment but not in a Ray node's environment.

    The launcher must not pass the token through Ray, because Ray's dashboard shows runtime
    environments.

    Args:
        found: Locations of the Ray actors of the run's PS and workers.

    Raises:
        ConfigurationError: The environment of a Ray actor lacks the token, and no --token_file is
            given.
    """
    lacking = [location.address for location in found if not location.has_token]
    if os.environ.get(TOKEN_VARIABLE) and not FLAGS.token_file and lacking:
        raise ConfigurationError(
            f"{TOKEN_VARIABLE} is set on this host but not on Ray's nodes "
            f"({', '.join(lacking):.200}), and Ray does not pass the variable on. Give "
            "--token_file, at the same path on every host, or set the variable where Ray is "
            "started on these nodes."
        )


def _last_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            "--launcher=ray needs the package ray, which is not installed on this machine; "
            "install it (pip install 'thinwire[ray]'), or choose --launcher=local or ssh."
        ) from error


def _connect(ray: Any, environment: dict[str, Any], wanted: dict[str, float]) -> None:
    """Connect to a running Ray cluster, or start a local Ray on this machine.

    Args:
        ray: The Python package `ray`, imported.
        environment: The runtime environment (in Ray's sense) of the run's actors.
        wanted: Name of a Ray resource -> amount that all actors request together. A local Ray gets
            this number of CPUs or more.

    Raises:
        Unreachable: No Ray cluster answers at the address that the flags give.
    """
    # The variable makes Ray merge the run's runtime environment into the environment of a
    # surrounding Ray job instead of failing on conflicts. The run's working directory replaces the
    # working directory of the Ray job.
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    configured = FLAGS.ray_address or os.environ.get("RAY_ADDRESS")
    for address in [configured] if configured else ["auto", "local"]:
        options: dict[str, Any] = {}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            num_cpus = max(os.cpu_count() or 1, math.ceil(wanted.get("CPU", 0)))
            options = {"num_cpus": num_cpus, "include_dashboard": False}
        try:
            ray.init(
                address=address,
                runtime_env=environment,
                log_to_driver=False,
                logging_level="warning",
                **options,
            )
            return
        except (ConnectionError, ValueError, RuntimeError) as error:
            if configured or address == "local":
                raise Unreachable(
                    f"--ray_address={address}: no Ray cluster answers there ({error})."
                ) from error

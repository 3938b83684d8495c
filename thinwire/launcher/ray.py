"""Nodes as actors of a Ray cluster; the Supervisor stays on the launching node.

Every PS and worker has a bundle of its own in one placement group, spread over Ray's nodes, and in
it an actor (`ray_actor`) that runs the node as a process, under a watchdog that ends it with the
actor; Ray ends the actors of a launcher that is gone. The package, the script and the files that
flags name are the working directory of the run's runtime environment. Ray only finds the places:
the nodes' messages do not pass through it.

When a node of Ray is lost, Ray moves the bundles and starts their actors again elsewhere, and
`role` starts the nodes again there: --restart_workers, --restart_ps. A PS then has another address,
which all actors keep for their nodes (`thinwire.proto.moved`).
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
from thinwire.launcher.local import (
    NO_SILENCE_SECONDS,
    SupervisedProcess,
    exit_code,
    start_here,
    watchdog_command,
)
from thinwire.launcher.output import READ_BYTES, NamedLines, Screen, follow, report_losses
from thinwire.launcher.ray_actor import ActorLocation, NodeActor
from thinwire.launcher.role import LineSink, Node, threads_of, whole_input
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable, check_bind
from thinwire.proto.grpc.common import host_and_port
from thinwire.proto.moved import MOVED_VARIABLE, moved_lines
from thinwire.proto.security.credentials import TOKEN_VARIABLE
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import Run
from thinwire.runtime.standard_input import StandardInput

FLAGS = flags.FLAGS
#: A Ray that grows by machines of a cloud takes minutes.
_PLACE_SECONDS = 600.0
_START_SECONDS = 60.0
_LOOK_SECONDS, _LOG_SECONDS = 0.2, 15.0
_PATIENCE_SECONDS = 10.0
_BYTE_OF = {number: byte for byte, number in watchdog.SIGNALS.items()}
#: Ray's names of what flags name shortly; others are custom resources.
_RAY_NAMES = {"cpus": "CPU", "gpus": "GPU"}
#: What the runtime environment has from this launcher alone.
_OURS = ("working_dir",)

#: Role and number of a node.
Place = tuple[str, int]


class RayProcess:
    """A node in an actor; see `thinwire.launcher.role.Process`.

    Attributes:
        started: Set once the node runs, or cannot.
        error: Why it does not.
    """

    is_followed = True

    def __init__(
        self,
        ray: Any,
        actor: Any,
        arrange: Callable[[ActorLocation], tuple[list[str], str]],
        output: LineSink,
    ) -> None:
        """Start it, as soon as Ray has placed the actor.

        Args:
            ray: The package.
            actor: In which it runs.
            arrange: Returns what `NodeActor.start` takes, for where the actor is.
            output: Takes each line that it writes.
        """
        self._ray, self._actor = ray, actor
        self._arrange, self._output = arrange, output
        self.started = threading.Event()
        self.error: Exception | None = None
        self._code: int | None = None
        self._early: list[int] = []  # signals that came before it ran
        self._lock = threading.Lock()
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-node", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Start the node, follow it to its end, and note its code; a lost actor is a killed one."""
        try:
            found = find(self._ray, self._actor, self._killed)
            command, moved = self._arrange(found)
            self._ray.get(self._actor.start.remote(command, moved))
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
        except (self._ray.exceptions.RayError, RuntimeError, OSError) as error:  # or Ray was left
            logging.debug("lost an actor: %s", error)
            self.error, code = error, -signal.SIGHUP
        self._code = code
        self.started.set()

    def _follow(self, is_error: bool) -> None:
        """Pass on what the node writes, line by line."""
        follow(
            lambda: self._read(is_error),
            lambda line: self._output.on_line(line, is_error),
        )

    def _read(self, is_error: bool) -> bytes:
        """Return the next bytes of the node's output; none: its end, or that of its actor."""
        try:
            return bytes(self._ray.get(self._actor.read.remote(is_error, READ_BYTES)))
        except (self._ray.exceptions.RayError, RuntimeError):  # or Ray was left
            return b""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._code

    def send_signal(self, number: int) -> None:
        """Let the watchdog send a signal to the node."""
        with self._lock:
            if self.started.is_set():
                self._send(number)
            else:
                self._early.append(number)

    def _send(self, number: int) -> None:
        self._actor.write.remote(_BYTE_OF[signal.Signals(number)])

    def kill(self) -> None:
        """End the node immediately; where it does not end, its actor."""
        self._killed.set()
        self.send_signal(signal.SIGKILL)
        self._thread.join(_PATIENCE_SECONDS if self.started.is_set() else 0.0)
        if self._thread.is_alive():
            self._ray.kill(self._actor)

    def wait(self) -> int:
        """Wait for the end; return what `poll` returns."""
        self._thread.join()
        return -signal.SIGHUP if self._code is None else self._code


def find(ray: Any, actor: Any, given_up: threading.Event) -> ActorLocation:
    """Return where an actor is, once Ray has placed it, again if need be.

    Raises:
        RayError: It is gone for good, or nobody waits any more.
    """
    logged_at = time.monotonic()
    while True:
        try:
            found: ActorLocation = ray.get(actor.find.remote(TOKEN_VARIABLE))
            return found
        except ray.exceptions.ActorUnavailableError:  # it is being started again
            if given_up.wait(_LOOK_SECONDS):
                raise
        if time.monotonic() - logged_at >= _LOG_SECONDS:
            logged_at = time.monotonic()
            logging.warning("waiting for Ray to find a place for a node again; see `ray status`")


class RayLauncher:
    """Starts nodes in actors."""

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Connect to Ray with the code, and have the actors placed.

        Args:
            run: The run's settings.
            script_folder: That of the workers' script; None: they play their role.

        Raises:
            ConfigurationError: No ray here, bad resources or runtime environment, or an address
                beyond one machine without --insecure.
            Unreachable: Ray cannot be reached, or does not give the actors a place.
        """
        if FLAGS["ip_PS"].present:
            launch.refuse_chosen_addresses()
        if run.device.startswith("gpu:"):
            raise ConfigurationError(
                f"--device={run.device}: Ray gives each worker its GPUs; leave this out, and set "
                "--ray_worker_resources=gpus=1."
            )
        if run.nb_ps > 1 and FLAGS.restart_ps and FLAGS.ps_hosts:
            raise ConfigurationError(
                "--ps_hosts with --restart_ps: a PS that Ray starts elsewhere has another address; "
                "leave one out."
            )
        self._run = run
        self._input: Any = None
        self._is_input_known = False
        self._bundles = {
            **{("PS", shard): requested("PS") for shard in range(run.nb_ps)},
            **{("Worker", number): requested("Worker") for number in range(1, run.nb_workers + 1)},
        }
        self._screen = Screen()  # of nodes whose output nobody else takes
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
        self._found: dict[Place, ActorLocation] = {}
        pending_of = {
            place: actor.find.remote(TOKEN_VARIABLE) for place, actor in self._actors.items()
        }
        for place, pending in pending_of.items():
            self._found[place] = self._get(pending, _PLACE_SECONDS)
        demand_token([*self._found.values()])
        self._former: dict[str, int] = {}  # address -> its shard
        self._lock = threading.Lock()
        self._addresses = [self._address(shard) for shard in range(run.nb_ps)]
        self.addresses = run.addresses if FLAGS.ps_hosts else tuple(self._addresses)
        for place, found in self._found.items():
            if place[0] == "PS":
                check_bind(found.address, FLAGS.insecure, security.protection(FLAGS))
        self._started: dict[Place, RayProcess] = {}
        self._supervisor: SupervisedProcess | None = None

    def _place(self) -> dict[Place, Any]:
        """Return the actors, for which Ray has found places."""
        util = importlib.import_module("ray.util")
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        # SPREAD takes another node for every bundle as long as there is one, in this order: where
        # there are enough, a PS is beside nobody.
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
                max_restarts=-1 if restarts else 0,  # `role` counts
                max_concurrency=8,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(group, index),
            )
            actors[role, number] = options.remote()
        return actors

    def _await(self, group: Any) -> None:
        """Wait for the places of a placement group.

        Raises:
            Unreachable: Ray has none.
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
            why = f"it has in all {lacks}" if lacks else "others use it, or no node has enough"
            if time.monotonic() >= deadline:
                raise Unreachable(
                    f"Ray has no place for this run's nodes: {why}. Set --ray_worker_resources, "
                    "--ray_ps_resources or --nb_workers lower; `ray status` shows what is used."
                )
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()
                logging.info("waiting for Ray to find places for the nodes: %s", why)
        self._ray.get(ready)

    def _address(self, shard: int) -> str:
        """Return where a shard is to listen, at its place."""
        found = self._found["PS", shard]
        return host_and_port(found.address, FLAGS.port + shard if FLAGS.port else found.free_port)

    def start(self, node: Node) -> RayProcess | SupervisedProcess:
        """Start a node; one that is started again, wherever Ray has placed its actor anew."""
        if node.role == "Supervisor":
            path = pathlib.Path(self._folder.name) / "ps_moved"
            self._supervisor = start_here(node, variables={MOVED_VARIABLE: str(path)})
            return self._supervisor
        place = node.role, node.number
        if node.input is not None and not self._is_input_known:
            self._input, self._is_input_known = self._put_input(node.input), True
        output = node.output or NamedLines(node.name, self._screen)
        process = RayProcess(
            self._ray, self._actors[place], lambda found: self._arrange(node, found), output
        )
        self._started[place] = process
        return process

    def _put_input(self, given: StandardInput) -> Any:
        """Return a reference to the standard input in Ray's store; None: there is none."""
        found = whole_input(given)
        if found is None:
            return None
        with found:
            return self._ray.put(found.read())

    def _arrange(self, node: Node, found: ActorLocation) -> tuple[list[str], str]:
        """Return a node's command line at its place, and where shards have moved."""
        place = node.role, node.number
        with self._lock:
            before, self._found[place] = self._found[place], found
            if before.ray_node != found.ray_node:
                logging.warning("%s is now on %s", node.name, found.address)
                if node.role == "PS":
                    self._move(node.number)
            addresses = ",".join(self._addresses)
            moved = self._moved()
        own = [f"--run_dir={self._run.run_dir.resolve()}"]
        if node.role == "PS":
            own.append(f"--ip_PS={found.address}")
        own.append(f"--worker_threads={threads_of(int(self._bundles[place].get('CPU', 1)), 1)}")
        if not FLAGS.ps_hosts:
            own.append(f"--ps_hosts={addresses}")
        if self._run.overwrite and not node.num_restarts:  # one that is started again resumes
            own.append("--overwrite")
        python = launch.remote_python() if FLAGS.remote_python else found.python
        command = [python, *self._code.words(node, own)]
        given_input = ""
        if node.input is not None and self._input is not None:
            path = self._ray.get(self._actors[place].take_input.remote(self._input))
            given_input = f"file:{path}"
        # What is lost is replaced, so it must not end the run for all by a gentle end of its own.
        supervised = watchdog_command(
            python,
            self._code.watchdog,
            command,
            announce=False,
            silence_seconds=NO_SILENCE_SECONDS,
            grace_seconds=0.0,
            given_input=given_input,
        )
        return supervised, moved

    def _move(self, shard: int) -> None:
        """Let every node know another address of a shard; the lock is held."""
        self._former[self._addresses[shard]] = shard
        self._addresses[shard] = self._address(shard)
        self._former.pop(self._addresses[shard], None)
        draft = pathlib.Path(self._folder.name) / "ps_moved.new"
        draft.write_text(self._moved())
        draft.replace(draft.with_name("ps_moved"))  # for the Supervisor
        for actor in self._actors.values():
            actor.note_moved.remote(self._moved())

    def _moved(self) -> str:
        return moved_lines(
            {former: self._addresses[shard] for former, shard in self._former.items()}
        )

    def settle(self) -> None:
        """Wait until every node has been started; raises Unreachable if one cannot."""
        deadline = time.monotonic() + _START_SECONDS
        for (role, number), process in self._started.items():
            in_time = process.started.wait(max(0.0, deadline - time.monotonic()))
            if process.error is not None or not in_time:
                why = process.error or f"no answer within {_START_SECONDS:g} s"
                raise Unreachable(f"Ray did not start {role.lower()}-{number}: {_last_line(why)}")

    def tend(self) -> None:
        """Do nothing: Ray ends the actors of a launcher that has died."""

    def close(self) -> None:
        """Leave Ray, which ends the actors, and finish the nodes' output."""
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


def prepare(run: Run, script_folder: pathlib.Path | None = None) -> RayLauncher:
    """Return the launcher of a run; raises as `RayLauncher` does."""
    return RayLauncher(run, script_folder)


def requested(role: str) -> dict[str, float]:
    """Return what a node of a role requests, by Ray's names."""
    given = FLAGS.ray_ps_resources if role == "PS" else FLAGS.ray_worker_resources
    return {_RAY_NAMES.get(name, name): amount for name, amount in launch.amounts(given).items()}


def total(bundles: Sequence[Mapping[str, float]] | Any) -> dict[str, float]:
    """Return what bundles request together."""
    found: collections.Counter[str] = collections.Counter()
    for bundle in bundles:
        found.update(bundle)
    return dict(found)


def own_environment() -> dict[str, Any]:
    """Return the runtime environment of --ray_runtime_env.

    Raises:
        ConfigurationError: No JSON object, or one with what the launcher sets.
    """
    if FLAGS.ray_runtime_env is None:
        return {}
    what = f"--ray_runtime_env={FLAGS.ray_runtime_env}"
    try:
        found = json.loads(read_bounded(FLAGS.ray_runtime_env))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f'{what}: {error}; expected a file such as {{"pip": ["keras"]}}.'
        ) from error
    if not isinstance(found, dict) or set(_OURS) & found.keys():
        raise ConfigurationError(
            f"{what}: expected a JSON object without {', '.join(_OURS)}: that is the code, which "
            "is sent anyway; give more modules by py_modules."
        )
    return found


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


def _last_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _import_ray() -> Any:
    """Return the package."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            "--launcher=ray needs the package ray, which is not installed here; install it (pip "
            "install 'thinwire[ray]'), or choose --launcher=local or ssh."
        ) from error


def _connect(ray: Any, environment: dict[str, Any], wanted: dict[str, float]) -> None:
    """Connect to a cluster, or start one of this machine's own.

    Args:
        ray: The package.
        environment: The runtime environment of the run's actors.
        wanted: What they request; a Ray of our own has as many CPUs as that.

    Raises:
        Unreachable: No cluster answers.
    """
    # A job's own environment stays, but for the working directory, which is the run's.
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    given = FLAGS.ray_address or os.environ.get("RAY_ADDRESS")
    for address in [given] if given else ["auto", "local"]:
        own: dict[str, Any] = {}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            num_cpus = max(os.cpu_count() or 1, math.ceil(wanted.get("CPU", 0)))
            own = {"num_cpus": num_cpus, "include_dashboard": False}
        try:
            ray.init(
                address=address,
                runtime_env=environment,
                log_to_driver=False,
                logging_level="warning",
                **own,
            )
            return
        except (ConnectionError, ValueError, RuntimeError) as error:
            if given or address == "local":
                raise Unreachable(
                    f"--ray_address={address}: no Ray cluster answers there ({error})."
                ) from error

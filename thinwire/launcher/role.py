"""The Cluster role: runs every node of a run as a process, on this host or on other hosts.

A `Cluster` starts PS shards, workers and a Supervisor as child processes, forwards signals to the
processes, reaps them, and returns the worst exit code. A launcher (`LAUNCHERS`) starts a node (PS
shard, worker or Supervisor) on the node's host. `Restarts` decides whether and when a dead worker
or PS is restarted.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import pathlib
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, Protocol

from absl import flags, logging

from thinwire.flags import environment as flags_in_environment
from thinwire.flags import launch, observability, security
from thinwire.launcher.hosts import read_hosts
from thinwire.launcher.output import Screen, shown_log
from thinwire.launcher.program import HostPrograms
from thinwire.launcher.run_start import start_in_claimed_directory
from thinwire.proto.grpc import Unreachable
from thinwire.runtime.persistence.places import CHECKPOINTS, REPORTS, check_place
from thinwire.runtime.run.devices import ON_CPU
from thinwire.runtime.run.quiet import import_quietly
from thinwire.runtime.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    Run,
)
from thinwire.runtime.run.signals import END_SIGNALS, handle_signals
from thinwire.runtime.standard_input import InputKind, StandardInput
from thinwire.supervisor import metrics_hook
from thinwire.worker.flags import devices

FLAGS = flags.FLAGS
#: Value of --launcher -> module and name of the `Launcher`, which is called with the run and the
#: folder of the user's script (None without a script).
LAUNCHERS = {
    "local": "thinwire.launcher.local:LocalLauncher",
    "ssh": "thinwire.launcher.ssh:SshLauncher",
    "ray": "thinwire.launcher.ray:RayLauncher",
    "slurm": "thinwire.launcher.local:SlurmLauncher",
}
#: Values of --launcher that may start PS on hosts that do not share this host's disk.
ELSEWHERE = ("ssh", "ray")
#: Flags of this process that nodes do not inherit, because `_node` sets or omits them for each
#: node.
_OWN_FLAGS = (
    "type_node",
    "id_worker",
    "id_ps",
    "ip_PS",
    "port",
    "ps_hosts",
    "nb_ps",
    "run_dir",
    "overwrite",
    "resume",
    "flagfile",
    "batch_size",
    "linger_seconds",
    "worker_threads",
    "metrics_port",
)
#: Environment variables that give flags to this process. Nodes get these flags on their command
#: lines, so nodes must not read the variables.
NOT_INHERITED = ("TF_CONFIG", flags_in_environment.VARIABLE)
#: Environment variable that names Keras' backend.
_BACKEND = "KERAS_BACKEND"
_TURN_SECONDS = 0.1  # seconds between two checks of the node processes
#: Time limit for the first bytes of a standard input that is copied to other hosts, in seconds. The
#: limit is short, because many programs are started with a pipe that never gets data.
_INPUT_SECONDS = 2.0
#: Longest time in which PS and Supervisor may end without a signal after the last worker's end, in
#: seconds.
_ALONE_SECONDS = 2.0
#: Signals that the launcher forwards to nodes, because nodes run in separate sessions, so that a
#: signal of the terminal (for example SIGHUP) does not reach them.
_END_SIGNALS = (*END_SIGNALS, signal.SIGHUP)
#: Exit codes of a worker after which a restart may succeed. EXIT_BAD_FLAG is also Python's exit
#: code for an uncaught error, and the flags were valid at the worker's first start.
#: EXIT_UNREACHABLE means that the PS was unreachable for a while. Exit codes of workers that a
#: signal killed are negative and not listed.
_MENDABLE = (EXIT_BAD_FLAG, EXIT_UNREACHABLE)
#: Backoff before a node's restart, in seconds. The backoff is 1 s before the first restart, doubles
#: with each recent restart, and is at most 30 s.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
#: Prefixes of the flags that a node's restart replaces. "--resume" also matches --resume_only.
_OF_RESTARTS = ("--num_restarts=", "--resume")


class Restarts:
    """Counts restarts of a run's PS or workers, and decides whether a dead one is restarted.

    Attributes:
        counts: Number of a node (shard or worker id) -> number of times that it was restarted.

    Args:
        most: Maximum number of restarts of one node within the window; 0 for no restarts.
        window_seconds: Length of the sliding window for the number of restarts, in seconds. A
            restart before the window does not count.
        clock: Function that returns the current time in seconds; replaced in tests.
        mendable: Exit codes of a node after which a restart may succeed. A node that a signal
            killed may be restarted too.
    """

    def __init__(
        self,
        most: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        mendable: Sequence[int] = _MENDABLE,
    ) -> None:
        self._most, self._window_seconds, self._clock = most, window_seconds, clock
        self._mendable = mendable
        self._recent: dict[int, collections.deque[float]] = {}
        self.counts: collections.Counter[int] = collections.Counter()

    def pause(self, number: int, code: int) -> float | None:
        """Return the seconds to wait before a dead node's restart; None for no restart.

        Args:
            number: Shard id or worker id of the dead node.
            code: Exit code of the dead node; -n if signal n killed the node.
        """
        recent, now = self._recent.setdefault(number, collections.deque()), self._clock()
        while recent and now - recent[0] >= self._window_seconds:
            recent.popleft()
        # After a network failure, a node's earlier process may hold the node's id, or the lock of
        # its directory, for some time. Then the PS or the lock rejects the restarted node, which
        # must be restarted once more. A node that is rejected at its first start has a permanent
        # error.
        held = code in (EXIT_REFUSED, EXIT_CONFIGURATION) and bool(recent)
        if not (code < 0 or code in self._mendable or held) or len(recent) >= self._most:
            return None
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** len(recent))

    def started(self, number: int) -> int:
        """Count a restart of a node; return the number of the node's restarts so far."""
        self._recent.setdefault(number, collections.deque()).append(self._clock())
        self.counts[number] += 1
        return self.counts[number]


class LineSink(Protocol):
    """Interface of an object that receives the lines that a node writes to stdout and stderr."""

    def on_line(self, line: str, is_error: bool) -> None:
        """Receive one line of a node's output.

        Args:
            line: Text of the node's output line, without its line end.
            is_error: True for a line of the node's stderr, False for a line of its stdout.
        """


@dataclasses.dataclass(frozen=True)
class Node:
    """Description of a PS shard, worker or Supervisor that a launcher starts."""

    name: str  # role and number of the node, for example "worker-1"
    role: str  # role of the node, a value of --type_node
    number: int  # id of the shard (from 0) or worker (from 1); 0 for the Supervisor
    flags: tuple[str, ...]  # flags on the node's command line, as --name=value
    num_restarts: int = 0  # number of times this node was restarted
    script: tuple[str, ...] = ()  # a worker's script and its arguments; empty without a script
    # Object that receives the node's output lines; None if the node writes to the terminal
    output: LineSink | None = None
    input: StandardInput | None = None  # standard input of the node; None for /dev/null
    # Environment variables of the node, in addition to those of its host
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self, programs: HostPrograms, own_flags: Sequence[str]) -> list[str]:
        """Return Python's arguments on the command line that starts the node.

        Args:
            programs: Python's arguments that run a node or a script on the node's host.
            own_flags: Flags that the launcher adds to the command line for the node's host.
        """
        if self.script:
            return [*programs.script, *self.flags, *own_flags, "--", *self.script]
        return [*programs.node, *self.flags, *own_flags]


@dataclasses.dataclass(frozen=True)
class EndRules:
    """Rules for ending the remaining nodes of a run after the end of one node.

    Attributes:
        one_failure_is_all: True if the first failure of a worker ends the run; False if the run
            ends only when all workers have failed.
        mendable: Exit codes of a worker process after which its restart may succeed.
        workers_first_seconds: Time after a failure in which PS and Supervisor may end without a
            signal, before they get SIGTERM, in seconds.
        kill_after_seconds: Time from a failure, an interruption or the end of all PS to the kill of
            the remaining nodes, in seconds.
    """

    one_failure_is_all: bool = False
    mendable: tuple[int, ...] = _MENDABLE
    workers_first_seconds: float = 0.0
    kill_after_seconds: float = 20.0


#: Rules for ending a run whose workers run no user's script.
RULES = EndRules()


class Process(Protocol):
    """Handle of a node's process that a launcher has started on some host."""

    def poll(self) -> int | None:
        """Return the node's exit code: -n if signal n killed the node, None while the node runs."""

    def send_signal(self, number: int) -> None:
        """Send the signal `number` to the node."""

    def kill(self) -> None:
        """Kill the node immediately, without a signal that the node could handle."""

    def wait(self) -> int:
        """Wait for the end of the node's process; return the node's exit code."""


class Launcher(Protocol):
    """Starts the nodes of a run on their hosts, for example over ssh."""

    addresses: tuple[str, ...]  # host:port of every PS shard, to which workers connect

    def start(self, node: Node) -> Process:
        """Start a node on the node's host; return the handle of its process."""

    def settle(self) -> None:
        """Wait until every started node runs; raise Unreachable if a node does not start.

        Without a method of its own, a launcher's `start` has waited until the node's process runs.
        """

    def tend(self) -> None:
        """Send heartbeats to the watchdogs of the nodes; called every `_TURN_SECONDS` seconds.

        A launcher without a method of its own sends none: its watchdogs notice its death without
        heartbeats, because its pipes close.
        """

    def close(self) -> None:
        """Release the launcher's resources, after every node's process has ended."""


@dataclasses.dataclass
class Child:
    """State of one node (process), which the `Cluster` has started one or more times."""

    node: Node  # description of the node at its last start
    process: Process  # process of the node's last start
    # Function that maps a node's exit code, as the docstring of `Cluster` describes
    read_code: Callable[[Node, Process, int], int]
    code: int | None = None  # exit code of `process`; None while it runs
    again_at: float | None = None  # time.monotonic() of the next restart; None if no restart is due
    # True if the `Cluster` has decided whether to restart the node after its last end
    restart_decided: bool = False

    @property
    def is_gone(self) -> bool:
        """True if the node has ended and will not be restarted."""
        return self.restart_decided and self.poll() is not None

    def poll(self) -> int | None:
        """Return the node's exit code, or None while the node runs or waits for its restart."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code = self.read_code(self.node, self.process, code)
        return self.code if self.again_at is None else None


def main(run: Run) -> int:
    """Run a PS, workers and a Supervisor to their end; return the worst exit code of these nodes.

    Raises:
        ConfigurationError: Flags contradict the chosen launcher (--launcher).
        Unreachable: A host cannot be used. `main` has ended the nodes that had started.
    """
    devices(run.nb_workers)  # rejects devices that cannot be emulated, before any node starts
    name = launch.check()
    check_nodes_here(run, name)
    start = start_in_claimed_directory(run, is_elsewhere=name in ELSEWHERE)
    if start.finished is not None:
        return EXIT_DONE
    run = start.run
    launcher: Launcher = pkgutil.resolve_name(LAUNCHERS[name])(run, None)
    try:
        cluster = Cluster(run, launcher, nodes_of(run, launcher.addresses), RULES)
        with shown_log(Screen()):
            code = cluster.run()
    finally:
        launcher.close()
    if code not in (EXIT_DONE, EXIT_INTERRUPTED):  # the last log line states the reason
        logging.error("%s", cluster.describe_end())
    return code


#: With more PS shards than `_MOST_UNCHECKED_SHARDS`, the launcher checks the placement of the model
#: on the shards first. Otherwise every shard would build the model only to reject the placement.
_MOST_UNCHECKED_SHARDS = 4


def check_nodes_here(run: Run, launcher: str, folders: Sequence[pathlib.Path] = ()) -> None:
    """Reject settings that every node would reject, before a node is started.

    Args:
        run: Settings of the run, from the flags.
        launcher: Value of --launcher. Files that flags name are checked only for "local": with
            another launcher, nodes may read these files on other hosts.
        folders: Folders to search for the module of --on_metrics, in addition to the usual ones.

    Raises:
        ConfigurationError: A file or folder that a flag names is not usable, or the run has more PS
            shards than the model has tensors.
    """
    if run.on_metrics is not None:
        metrics_hook.check(run.on_metrics, folders)
    if FLAGS.hosts_file:
        read_hosts(FLAGS.hosts_file)
    if launcher == "local":
        security.check_nodes(FLAGS, run.nb_ps, run.nb_workers)
        if run.checkpoint_dir is not None:
            check_place(run.checkpoint_dir, CHECKPOINTS)
        if run.report_dir is not None:
            check_place(run.report_dir, REPORTS)
    if run.nb_ps > _MOST_UNCHECKED_SHARDS and not run.model_is_offered:
        import_quietly("tensorflow")
        from thinwire.models.flat_model import SharedModel

        run.method.place(SharedModel(run.model, run.seed).spec, run.nb_ps)


def nodes_of(run: Run, addresses: Sequence[str]) -> list[Node]:
    """Return the nodes to start: PS shards, then workers, then the Supervisor.

    `nodes_of` returns all nodes of the run, or in a Slurm step the nodes that this task starts.

    Args:
        run: Settings of the run, from the flags.
        addresses: Address host:port of every PS shard, by shard id.
    """
    resume = ["--resume"] if run.resume else []
    nodes = [
        _node(run, addresses, "PS", shard, [f"--id_ps={shard}", "--linger_seconds=60", *resume])
        for shard in range(run.nb_ps)
    ]
    nodes += [
        _node(run, addresses, "Worker", worker, [f"--id_worker={worker}"])
        for worker in range(1, run.nb_workers + 1)
    ]
    nodes.append(_node(run, addresses, "Supervisor", 0, ["--batch_size=1000", *resume]))
    part = launch.part_here()
    return [node for node in nodes if part is None or part.starts(node.role, node.number)]


def _node(run: Run, addresses: Sequence[str], role: str, number: int, own: list[str]) -> Node:
    words = [f"--type_node={role}", *given_flags((*_OWN_FLAGS, "device", *launch.NAMES))]
    if run.device != "auto":
        words.append(f"--device={run.device if role == 'Worker' else 'cpu'}")
    words.append(f"--run_dir={run.run_dir}")
    # Only the Supervisor writes to the terminal. PS and workers log to files.
    if role != "Supervisor":
        words += [f"--batch_size={FLAGS.batch_size}", "--quiet"]
    words.append(f"--ps_hosts={','.join(addresses)}")
    if base := FLAGS.metrics_port:
        port = observability.port_of(base, role, number, run.nb_ps, run.nb_workers)
        words.append(f"--metrics_port={port}")
    variables = _variables(run, role, number)
    return Node(f"{role.lower()}-{number}", role, number, (*words, *own), variables=variables)


def _variables(run: Run, role: str, number: int) -> dict[str, str]:
    """Return the environment variables of a node that do not depend on its host.

    PS and Supervisor compute on the CPU: a Keras backend that finds a GPU would reserve memory
    which the workers need.
    """
    backends = launch.keras_backends(run.nb_workers)
    if role == "Worker":
        return {_BACKEND: backends[number - 1]} if backends else {}
    if role == "PS":
        return dict(ON_CPU)
    # The evaluator, which runs the script, inherits the variables of the Supervisor.
    here = [name for name in backends if importlib.util.find_spec(name) is not None]
    return ON_CPU | ({_BACKEND: here[0]} if here else {})


def threads_of(num_cpus: int, num_workers: int) -> int:
    """Return the number of threads that each worker of a host may use.

    Args:
        num_cpus: Number of CPUs of the host on which the workers run.
        num_workers: Number of workers that run on the host.
    """
    return FLAGS.worker_threads or max(1, num_cpus // max(1, num_workers))


def given_flags(left_out: Collection[str]) -> list[str]:
    """Return this process's given flags as words of a node's command line.

    Args:
        left_out: Names of flags that the returned list omits.
    """
    serialized = (
        FLAGS[name].serialize() for name in FLAGS if FLAGS[name].present and name not in left_out
    )
    return [part for text in serialized for part in text.split("\n") if part]


def environment() -> dict[str, str]:
    """Return the environment of a node: this process's variables except those that hold flags."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def _signal_name(code: int) -> str:
    """Return the signal's name for a negative exit code, for example "SIGKILL" for -9."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def whole_input(given: StandardInput) -> IO[bytes] | None:
    """Read the launcher's whole standard input, to copy it to workers on other hosts.

    Args:
        given: Standard input of the launcher.

    Returns:
        A file with the standard input. None if there is no input, or if the input is a stream that
        has brought no data for `_INPUT_SECONDS` and has not ended; a warning reports this stream.
    """
    file = given.whole(_INPUT_SECONDS)
    if file is None and given.kind is InputKind.STREAM:
        logging.warning(
            "stdin has brought no data for %g s and has not ended: the workers on other hosts get "
            "an empty stdin. Give the input as a file, or give < /dev/null if there is no input.",
            _INPUT_SECONDS,
        )
    return file


@dataclasses.dataclass(eq=False)
class Cluster:
    """Starts, supervises and ends the nodes (PS shards, workers, Supervisor) of one run.

    Attributes:
        run_settings: Settings of the run, from the flags.
        launcher: Launcher that starts each node on the node's host.
        nodes: PS shards, workers and Supervisor, in the order of their starts.
        rules: Rules for ending the remaining nodes after the end of one node.
        read_code: Function of a node that has ended, its process and its exit code; returns the
            exit code with which the node's end is treated.
        on_turn: Function that is called every `_TURN_SECONDS` seconds while nodes run.
        children: State of each started node, in the order of the nodes' first starts.
        interrupted: Event that the first signal to end (for example Ctrl-C) sets. Then all nodes
            end.
        impatient: Event that the second signal to end sets. Then all nodes are killed.
        root_cause: Exit code of the node whose failure ended the run; None before a failure.
        culprit: The node whose failure ended the run; None before a failure.
        at_fault: Ids of the workers whose scripts reported a failure caused by the worker itself.
        restarts: Role ("PS" or "Worker") -> `Restarts`, which counts restarts of the role's nodes.
    """

    run_settings: Run
    launcher: Launcher
    nodes: Sequence[Node]
    rules: EndRules
    read_code: Callable[[Node, Process, int], int] = lambda node, process, code: code
    on_turn: Callable[[], None] = lambda: None
    children: list[Child] = dataclasses.field(default_factory=list)
    interrupted: threading.Event = dataclasses.field(default_factory=threading.Event)
    impatient: threading.Event = dataclasses.field(default_factory=threading.Event)
    root_cause: int | None = None
    culprit: Child | None = None
    at_fault: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        window, mendable = FLAGS.restart_window_seconds, self.rules.mendable
        self.restarts = {
            "PS": Restarts(FLAGS.restart_ps, window, mendable=()),
            "Worker": Restarts(FLAGS.restart_workers, window, mendable=mendable),
        }

    def run(self) -> int:
        """Start every node, wait for the run's end, reap the processes; return the exit code."""
        with handle_signals(self._interrupt, _END_SIGNALS, self._insist):
            try:
                for node in self.nodes:
                    self._spawn(node)
                if not self.interrupted.is_set():
                    self.launcher.settle()
                self._wait()
            finally:
                self._reap()
        return self._code()

    def _spawn(self, node: Node) -> None:
        if self.interrupted.is_set():
            return
        logging.debug("starting %s: %s", node.name, " ".join(node.flags))
        child = Child(node, self.launcher.start(node), self.read_code)
        self.children.append(child)
        # The signal handler may have run after the first check of `interrupted` and before
        # `append`. Then the handler has not sent the signal to this node, which would keep running.
        if self.interrupted.is_set():
            child.process.send_signal(signal.SIGINT)

    def _wait(self) -> None:
        """Wait until every node has ended; after a failure that no restart repairs, end all nodes.

        After a failure that ends the run, workers get SIGTERM first. After a worker's failure, PS
        and Supervisor get SIGTERM when `patient` becomes False, unless they have ended.
        """
        ending_since, patient = None, False
        # time.monotonic() at the end of the last worker; None before
        alone_since: float | None = None
        while any(child.poll() is None for child in self.children):
            time.sleep(_TURN_SECONDS)
            self.launcher.tend()
            self.on_turn()
            self._restart_nodes()
            now = time.monotonic()
            if self.root_cause is None:
                self.root_cause = self._failure()
                if self.root_cause is not None:
                    self._signal(signal.SIGTERM, self._of("Worker"))
                    patient = True
            shards = self._of("PS")  # no PS if another Slurm task starts the PS
            ps_gone = bool(shards) and all(child.is_gone for child in shards)
            if ps_gone or self.root_cause is not None or self.interrupted.is_set():
                ending_since = now if ending_since is None else ending_since
            lasting = 0.0 if ending_since is None else now - ending_since
            if patient and all(child.poll() is not None for child in self._of("Worker")):
                alone_since = now if alone_since is None else alone_since
            alone = alone_since is not None and now - alone_since >= _ALONE_SECONDS
            if patient and (ps_gone or alone or lasting >= self.rules.workers_first_seconds):
                patient = False
                self._signal(signal.SIGTERM, self._of("PS") + self._of("Supervisor"))
            too_long = ending_since is not None and lasting >= self.rules.kill_after_seconds
            if self.impatient.is_set() or too_long:
                return

    def _restart_nodes(self) -> None:
        """Restart PS and workers that have died, unless the run has ended or is ending."""
        over = self.interrupted.is_set() or self.root_cause is not None
        over = over or any(child.poll() == EXIT_DONE for child in self._of("PS"))
        for role in self.restarts:
            for child in self._of(role):
                self._restart(child, over)
            over = over or any(child.is_gone for child in self._of("PS"))

    def _restart(self, child: Child, over: bool) -> None:
        """Restart a node whose restart delay is over; decide whether to restart an ended node."""
        code = child.poll()
        if child.again_at is not None and over:
            child.again_at = None
        elif child.again_at is not None and time.monotonic() >= child.again_at:
            self._start_again(child)
        if code is None or child.restart_decided:
            return
        child.restart_decided = True
        if over:
            return
        node, flag = child.node, "--restart_ps" if child.node.role == "PS" else "--restart_workers"
        pause = self.restarts[node.role].pause(node.number, code)
        if pause is not None:
            child.again_at = time.monotonic() + pause
            logging.warning(launch.AGAIN, node.name, code, pause)
        elif code != EXIT_DONE and FLAGS[flag.removeprefix("--")].value:
            logging.error(launch.NOT_AGAIN, node.name, code, flag)

    def _start_again(self, child: Child) -> None:
        child.again_at, child.restart_decided = None, False
        count = self.restarts[child.node.role].started(child.node.number)
        base_flags = tuple(flag for flag in child.node.flags if not flag.startswith(_OF_RESTARTS))
        again = "--resume_only" if child.node.role == "PS" else f"--num_restarts={count}"
        child.node = dataclasses.replace(child.node, flags=(*base_flags, again), num_restarts=count)
        try:
            child.process, child.code = self.launcher.start(child.node), None
        # A restart that fails counts as another death of the node, with the exit code of the
        # previous death.
        except Unreachable as error:
            logging.warning("node %s cannot be started: %s", child.node.name, error)

    def _failure(self) -> int | None:
        """Return the exit code of a node whose failure ends the run, or None; set `culprit`.

        The failure of a PS always ends the run. If `EndRules.one_failure_is_all` is True, the first
        failure of a worker ends the run. If `one_failure_is_all` is False, only the failure of all
        workers ends the run.
        """
        for child in self._of("PS"):
            code = child.poll() if child.is_gone else None
            if code not in (None, EXIT_DONE):
                self.culprit = child
                return EXIT_UNREACHABLE if code < 0 else code
        codes = [child.poll() for child in self._of("Worker")]
        # A killed worker has a negative code
        own_fault = [code for code in codes if code and code > 0]
        if self.rules.one_failure_is_all:
            for child, code in zip(self._of("Worker"), codes, strict=True):
                if code and code > 0 and not self._is_lost(child):
                    self.culprit = child
                    return code
        # If this launcher starts only some workers of the run, workers of other Slurm tasks may
        # still train.
        has_all = len(codes) == self.run_settings.nb_workers
        if has_all and all(code not in (None, EXIT_DONE) for code in codes):
            code = next(iter(own_fault), EXIT_UNREACHABLE)
            self.culprit = self._of("Worker")[codes.index(code) if own_fault else 0]
            return code
        return None

    def _interrupt(self, number: int, frame: Any) -> None:
        logging.info("received %s: ending all nodes of the cluster", signal.Signals(number).name)
        self.interrupted.set()
        self._signal(signal.SIGINT, self.children)

    def _insist(self, number: int, frame: Any) -> None:
        logging.info("received %s again: killing all cluster nodes", signal.Signals(number).name)
        self.impatient.set()

    def _signal(self, number: int, children: Sequence[Child]) -> None:
        for child in children:
            if child.poll() is None:
                child.process.send_signal(number)

    def _reap(self) -> None:
        stubborn = [child for child in self.children if child.poll() is None]
        for child in stubborn:
            logging.warning("node %s does not end; killing its process", child.node.name)
            child.process.kill()
        for child in stubborn:
            child.code = child.process.wait()

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.node.role == role]

    def _code(self) -> int:
        """Return the exit code of the run, and log the exit codes of the run's nodes.

        A killed or lost worker does not change the exit code of a run that reached its end.
        """
        codes = {child.node.name: child.poll() or 0 for child in self.children}
        logging.info("exit codes: %s", codes)
        for what, role in (("PS", "PS"), ("workers", "Worker")):
            if restarts := self.restarts[role].counts:
                logging.info(
                    "restarts of the %s (node number: its restarts): %s", what, dict(restarts)
                )
        if self.interrupted.is_set():
            return EXIT_INTERRUPTED
        lost = {child.node.name for child in self._of("Worker") if self._is_lost(child)}
        worst = self.root_cause or max(
            0, *(code for name, code in codes.items() if name not in lost)
        )
        if self.culprit is None and worst:
            self.culprit = next(child for child in self.children if child.poll() == worst)
        absent = [child.node.name for child in self._of("Worker") if codes[child.node.name]]
        if worst == EXIT_DONE and absent:
            names = ", ".join(f"{name} (exit code {codes[name]})" for name in absent)
            logging.warning("these nodes died and the run continued without them: %s", names)
        return worst

    def describe_end(self) -> str:
        """Return a line that states which node ended the run, and why; empty if no node failed."""
        child = self.culprit
        if child is None:
            return ""
        name, code, log = child.node.name, child.poll() or 0, self.run_settings.run_dir / "logs"
        resumes = "the same command resumes the run"
        all_killed = all((worker.poll() or 0) < 0 for worker in self._of("Worker"))
        if child.node.role == "Worker" and all_killed:
            return f"every worker was killed ({_signal_name(code)}); {resumes}"
        if code < 0:
            return f"{name} was killed by {_signal_name(code)}; {resumes}"
        reason = getattr(child.node.output, "last_error", "")
        if reason:
            return f"{name}: {reason}"
        return f"{name} failed with exit code {code}; its log is {log / name}.log"

    def _is_lost(self, worker: Child) -> bool:
        """Return whether a worker ended only because it lost contact with the PS."""
        may_be_lost = self.rules.one_failure_is_all and worker.node.number not in self.at_fault
        return may_be_lost and worker.poll() == EXIT_UNREACHABLE

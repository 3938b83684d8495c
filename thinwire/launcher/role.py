"""The Cluster role: every node of a run as a process of its own, here or on other hosts.

Starts PS shards, workers and a Supervisor as plain command lines, passes signals on, reaps every
child, and exits with the worst of their codes. A launcher (`LAUNCHERS`) knows where a node runs and
how it is reached; `Restarts` decides whether, and when, a dead worker or PS is started again.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, Protocol

from absl import flags, logging

from thinwire.flags import environment as flags_in_environment
from thinwire.flags import launch, observability, security
from thinwire.launcher.output import Screen, shown_log
from thinwire.launcher.run_locks import start_in_claimed_directory
from thinwire.proto.grpc import Unreachable
from thinwire.runtime.persistence.places import CHECKPOINTS, REPORTS, check_place
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
#: --launcher value -> module with `prepare(run) -> Launcher`.
LAUNCHERS = {
    "local": "thinwire.launcher.local",
    "ssh": "thinwire.launcher.ssh",
    "ray": "thinwire.launcher.ray",
    "slurm": "thinwire.launcher.slurm",
}
#: Those whose PS may be on hosts with disks of their own.
ELSEWHERE = ("ssh", "ray")
#: Flags that each child gets a value of its own for, or none.
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
#: Variables that give this process flags, which its children have on their command lines.
NOT_INHERITED = ("TF_CONFIG", flags_in_environment.VARIABLE)
_TURN_SECONDS = 0.1
#: How long a stream that other hosts get a copy of may bring nothing: many programs are started
#: with a pipe that nobody writes to, and these must not wait long.
_INPUT_SECONDS = 2.0
#: How long PS and Supervisor may take to end by themselves where no worker is left to wait for.
_ALONE_SECONDS = 2.0
#: Children have a session of their own: what ends us must be passed on, a closed terminal too.
_END_SIGNALS = (*END_SIGNALS, signal.SIGHUP)
#: Exit codes of a worker that another start may mend: a crash (an uncaught error is code 1; the
#: flags themselves were good once), and a PS that was away. Signals are negative.
_MENDABLE = (EXIT_BAD_FLAG, EXIT_UNREACHABLE)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
#: What a node that is started again is given.
_OF_RESTARTS = ("--num_restarts=", "--resume")  # and --resume_only


class Restarts:
    """Counts the deaths of the nodes of a role, and decides on their restarts.

    Args:
        most: Starts of one node beyond the first, within the window; 0: none.
        window_seconds: After so long without one, counting begins anew.
        clock: For tests.
        mendable: Exit codes that another start may mend, beside deaths by a signal.
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
        self._num: collections.Counter[int] = collections.Counter()

    @property
    def counts(self) -> dict[int, int]:
        """Number of a node -> how often it has been started again."""
        return dict(self._num)

    def pause(self, number: int, code: int) -> float | None:
        """Return how many seconds to wait before a dead node is started again; None: never.

        Args:
            number: Which.
            code: What it ended with; -n: signal n.
        """
        recent, now = self._recent.setdefault(number, collections.deque()), self._clock()
        while recent and now - recent[0] >= self._window_seconds:
            recent.popleft()
        # Where a host was cut off, the earlier incarnation may still hold the node's id, or the
        # lock of its directory, for a while.
        held = code in (EXIT_REFUSED, EXIT_CONFIGURATION) and bool(recent)
        if not (code < 0 or code in self._mendable or held) or len(recent) >= self._most:
            return None
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** len(recent))

    def started(self, number: int) -> int:
        """Count another start; return how many that are."""
        self._recent.setdefault(number, collections.deque()).append(self._clock())
        self._num[number] += 1
        return self._num[number]


class LineSink(Protocol):
    """Takes what a node writes."""

    def on_line(self, line: str, is_error: bool) -> None:
        """Take one line, without its end, of stdout or stderr."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One node to start."""

    name: str
    role: str
    number: int  # its id
    flags: tuple[str, ...]  # of its command line
    num_restarts: int = 0  # how often it has been started before
    script: tuple[str, ...] = ()  # a worker's script and its arguments; none: it plays its role
    output: LineSink | None = None  # None: it writes to the launcher's terminal itself
    input: StandardInput | None = None  # None: it reads /dev/null

    def words(
        self, node: Sequence[str], script: Sequence[str], own_flags: Sequence[str]
    ) -> list[str]:
        """Return what follows Python on its command line.

        Args:
            node: What runs a node there, such as `program.NODE`.
            script: What runs a script there, such as `program.SCRIPT`.
            own_flags: What the place adds.
        """
        if self.script:
            return [*script, *self.flags, *own_flags, "--", *self.script]
        return [*node, *self.flags, *own_flags]


@dataclasses.dataclass(frozen=True)
class EndRules:
    """What the end of a node means to the others.

    Attributes:
        one_failure_is_all: The first worker that fails ends the run, and not only the last one.
        mendable: Exit codes of a worker that another start may mend.
        workers_first_seconds: Once a worker has failed, PS and Supervisor may end by themselves
            for so long.
        kill_after_seconds: After a failure, an interruption, or the end of all PS.
    """

    one_failure_is_all: bool = False
    mendable: tuple[int, ...] = _MENDABLE
    workers_first_seconds: float = 0.0
    kill_after_seconds: float = 20.0


#: Of nodes that play roles.
RULES = EndRules()


class Process(Protocol):
    """A node that a launcher has started.

    Attributes:
        is_followed: Whether the node's `output` gets every line that it writes.
    """

    is_followed: bool

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n killed it, None while it runs."""

    def send_signal(self, number: int) -> None:
        """Pass a signal on."""

    def kill(self) -> None:
        """End it immediately."""

    def wait(self) -> int:
        """Wait for the end; return what `poll` returns."""


class Launcher(Protocol):
    """Where nodes run, and how they are reached."""

    addresses: tuple[str, ...]  # host:port of every shard, as workers dial it

    def start(self, node: Node) -> Process:
        """Start a node."""

    def settle(self) -> None:
        """Return when every started node runs; raises Unreachable if one does not."""

    def tend(self) -> None:
        """Send heartbeats and the like; called every fraction of a second."""

    def close(self) -> None:
        """Release the launcher's resources; every process has ended."""


def _as_it_is(node: Node, process: Process, code: int) -> int:
    """Return the exit code of a node that has ended as that of the run's part; see `Cluster`."""
    return code


@dataclasses.dataclass
class Child:
    """One node that was started."""

    node: Node
    process: Process
    read_code: Callable[[Node, Process, int], int] = _as_it_is
    code: int | None = None
    again_at: float | None = None  # when it is started again, by time.monotonic()
    restart_decided: bool = False  # whether `again_at` has been decided

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and stays so."""
        return self.restart_decided and self.poll() is not None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs or is to be started again."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code = self.read_code(self.node, self.process, code)
        return self.code if self.again_at is None else None


def main(run: Run) -> int:
    """Run the whole cluster; return the worst exit code of its nodes.

    Raises:
        ConfigurationError: Flags that do not fit the launcher.
        Unreachable: A host that cannot be used; nothing is left running.
    """
    devices(run.nb_workers)  # refuses what cannot be emulated before anything starts
    name = launch.check()
    if run.on_metrics is not None:
        metrics_hook.check(run.on_metrics)
    check_nodes_here(run, name)
    start = start_in_claimed_directory(run, is_elsewhere=name in ELSEWHERE)
    if start.finished is not None:
        return EXIT_DONE
    run = start.run
    launcher: Launcher = importlib.import_module(LAUNCHERS[name]).prepare(run)
    try:
        cluster = Cluster(run, launcher, nodes_of(run, launcher.addresses), RULES)
        with shown_log(Screen()):
            code = cluster.run()
    finally:
        launcher.close()
    if code not in (EXIT_DONE, EXIT_INTERRUPTED):  # in the last line, where people look first
        logging.error("%s", cluster.describe_end())
    return code


#: A run of more shards has its model built here first: each would otherwise do so to refuse it.
_MOST_UNCHECKED_SHARDS = 4


def check_nodes_here(run: Run, launcher: str) -> None:
    """Refuse what every node would refuse, before one is started.

    Args:
        run: The run's settings.
        launcher: Its name; files that flags name may lie elsewhere where it is not local.

    Raises:
        ConfigurationError: Files of no use, or more shards than the model has tensors.
    """
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
    """Return the nodes that start here, in this order: a whole cluster's, or those of a part."""
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
    return [each for each in nodes if part is None or part.starts(each.role, each.number)]


def _node(run: Run, addresses: Sequence[str], role: str, number: int, own: list[str]) -> Node:
    given = [f"--type_node={role}", *given_flags((*_OWN_FLAGS, *launch.NAMES))]
    given.append(f"--run_dir={run.run_dir}")
    if role != "Supervisor":  # it alone writes to the terminal; the others' logs are in files
        given += [f"--batch_size={FLAGS.batch_size}", "--quiet"]
    given.append(f"--ps_hosts={','.join(addresses)}")
    if base := FLAGS.metrics_port:
        port = observability.port_of(base, role, number, run.nb_ps, run.nb_workers)
        given.append(f"--metrics_port={port}")
    return Node(f"{role.lower()}-{number}", role, number, (*given, *own))


def threads_of(num_cpus: int, num_workers: int) -> int:
    """Return how many threads each of a host's workers may use."""
    return FLAGS.worker_threads or max(1, num_cpus // max(1, num_workers))


def given_flags(left_out: Collection[str]) -> list[str]:
    """Return every flag that was given here, for a process that is started, but those named."""
    given = (
        FLAGS[name].serialize() for name in FLAGS if FLAGS[name].present and name not in left_out
    )
    return [part for text in given for part in text.split("\n") if part]


def environment() -> dict[str, str]:
    """Return the environment of a child; its place in the run, and all else, are its flags."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def _signal_name(code: int) -> str:
    """Return the name of the signal that an exit code -n stands for."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def whole_input(given: StandardInput) -> IO[bytes] | None:
    """Return all of the input, for workers on other hosts, which get a copy before they start.

    Returns:
        A file; None: there is no input, or a stream that does not end. A warning names the latter.
    """
    found = given.whole(_INPUT_SECONDS)
    if found is None and given.kind is InputKind.STREAM:
        logging.warning(
            "stdin has brought nothing for %g s and has not ended: the workers on other hosts get "
            "an empty one. Give the input as a file, or < /dev/null where there is none.",
            _INPUT_SECONDS,
        )
    return found


class Cluster:
    """The children of one run.

    Args:
        run: The run's settings.
        launcher: Where they run.
        nodes: What is started, in this order.
        rules: What their ends mean.
        read_code: Returns what the exit code of a node that has ended counts as.
        on_turn: Called every fraction of a second while nodes run.
    """

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        nodes: Sequence[Node],
        rules: EndRules,
        read_code: Callable[[Node, Process, int], int] = _as_it_is,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_turn = on_turn
        self.run_settings, self.rules, self._read_code = run, rules, read_code
        self.launcher, self.nodes = launcher, nodes
        self.children: list[Child] = []
        self.interrupted = threading.Event()
        self.impatient = threading.Event()  # a second signal: no more patience
        window = FLAGS.restart_window_seconds
        self.restarts = {
            "PS": Restarts(FLAGS.restart_ps, window, mendable=()),
            "Worker": Restarts(FLAGS.restart_workers, window, mendable=rules.mendable),
        }
        self.root_cause: int | None = None  # exit code of the failure that ended the run
        self.culprit: Child | None = None  # the node with that failure
        self.at_fault: set[int] = set()  # workers that failed by themselves, whatever their code

    def run(self) -> int:
        """Start every node, wait for the end, reap every process."""
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
        child = Child(node, self.launcher.start(node), self._read_code)
        self.children.append(child)
        if self.interrupted.is_set():  # between the look above and now
            child.process.send_signal(signal.SIGINT)

    def _wait(self) -> None:
        """Wait until every node has ended; once one has failed for good, end the others."""
        ending_since, patient = None, False  # patient: PS and Supervisor may end by themselves
        alone_since: float | None = None  # without any worker
        while any(child.poll() is None for child in self.children):
            time.sleep(_TURN_SECONDS)
            self.launcher.tend()
            self._on_turn()
            self._restart_nodes()
            now = time.monotonic()
            if self.root_cause is None:
                self.root_cause = self._failure()
                if self.root_cause is not None:
                    self._signal(signal.SIGTERM, self._of("Worker"))
                    patient = True
            shards = self._of("PS")  # none where another part of the run has them
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
        """Start PS and workers again that died, unless the run is over."""
        over = self.interrupted.is_set() or self.root_cause is not None
        over = over or any(child.poll() == EXIT_DONE for child in self._of("PS"))
        for role in self.restarts:
            for child in self._of(role):
                self._restart(child, over)
            over = over or any(child.is_gone for child in self._of("PS"))

    def _restart(self, child: Child, over: bool) -> None:
        """Start a node again if it is time, or decide whether to, if it has ended."""
        if child.again_at is not None and over:
            child.again_at = None
        elif child.again_at is not None and time.monotonic() >= child.again_at:
            self._start_again(child)
        elif not child.restart_decided and (code := child.poll()) is not None:
            child.restart_decided = True
            if not over:
                self._decide_restart(child, code)

    def _decide_restart(self, child: Child, code: int) -> None:
        """Decide whether a node that has ended is started again."""
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
        own = tuple(flag for flag in child.node.flags if not flag.startswith(_OF_RESTARTS))
        again = "--resume_only" if child.node.role == "PS" else f"--num_restarts={count}"
        child.node = dataclasses.replace(child.node, flags=(*own, again), num_restarts=count)
        try:
            child.process, child.code = self.launcher.start(child.node), None
        except Unreachable as error:  # it counts as another death, with the code of the last one
            logging.warning("%s cannot be started: %s", child.node.name, error)

    def _failure(self) -> int | None:
        """Return the exit code that dooms the run: a PS's, or that of the first worker.

        Of one worker, or of all: `EndRules.one_failure_is_all`.
        """
        for child in self._of("PS"):
            code = child.poll() if child.is_gone else None
            if code not in (None, EXIT_DONE):
                self.culprit = child
                return EXIT_UNREACHABLE if code < 0 else code
        codes = [child.poll() for child in self._of("Worker")]
        own_fault = [code for code in codes if code and code > 0]  # the others were killed
        if self.rules.one_failure_is_all:
            for child, code in zip(self._of("Worker"), codes, strict=True):
                if code and code > 0 and not self._is_lost(child):
                    self.culprit = child
                    return code
        has_all = len(codes) == self.run_settings.nb_workers  # else others may train on
        if has_all and all(code not in (None, EXIT_DONE) for code in codes):
            code = next(iter(own_fault), EXIT_UNREACHABLE)
            self.culprit = self._of("Worker")[codes.index(code) if own_fault else 0]
            return code
        return None

    def _interrupt(self, number: int, frame: Any) -> None:
        logging.info("%s: ending the cluster", signal.Signals(number).name)
        self.interrupted.set()
        self._signal(signal.SIGINT, self.children)

    def _insist(self, number: int, frame: Any) -> None:
        logging.info("%s again: killing the cluster", signal.Signals(number).name)
        self.impatient.set()

    def _signal(self, number: int, children: Sequence[Child]) -> None:
        for child in children:
            if child.poll() is None:
                child.process.send_signal(number)

    def _reap(self) -> None:
        stubborn = [child for child in self.children if child.poll() is None]
        for child in stubborn:
            logging.warning("%s does not end; killing it", child.node.name)
            child.process.kill()
        for child in stubborn:
            child.code = child.process.wait()

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.node.role == role]

    def _code(self) -> int:
        """Return what went wrong; a killed worker does not spoil a run that reached its end."""
        codes = {child.node.name: child.poll() or 0 for child in self.children}
        logging.info("exit codes: %s", codes)
        for what, role in (("PS", "PS"), ("workers", "Worker")):
            if restarts := self.restarts[role].counts:
                logging.info("%s that were started again: %s", what, restarts)
        if self.interrupted.is_set():
            return EXIT_INTERRUPTED
        lost = {child.node.name for child in self._of("Worker") if self._is_lost(child)}
        found = self.root_cause or max(
            0, *(code for name, code in codes.items() if name not in lost)
        )
        if self.culprit is None and found:
            self.culprit = next(each for each in self.children if each.poll() == found)
        absent = [child.node.name for child in self._of("Worker") if codes[child.node.name]]
        if found == EXIT_DONE and absent:
            names = ", ".join(f"{name} (exit code {codes[name]})" for name in absent)
            logging.warning("the run has gone on without %s", names)
        return found

    def describe_end(self) -> str:
        """Return which node ended the run and how, in one line; empty: none did."""
        child = self.culprit
        if child is None:
            return ""
        name, code, log = child.node.name, child.poll() or 0, self.run_settings.run_dir / "logs"
        resumes = "the same command resumes the run"
        if child.node.role == "Worker" and len(self._killed_workers()) == len(self._of("Worker")):
            return f"every worker was killed ({_signal_name(code)}); {resumes}"
        if code < 0:
            return f"{name} was killed by {_signal_name(code)}; {resumes}"
        reason = getattr(child.node.output, "last_error", "")
        if reason:
            return f"{name}: {reason}"
        return f"{name} failed with exit code {code}; its log is {log / name}.log"

    def _killed_workers(self) -> list[Child]:
        return [child for child in self._of("Worker") if (child.poll() or 0) < 0]

    def _is_lost(self, worker: Child) -> bool:
        """Return whether a script could not reach the PS, or go on with the others."""
        may_be_lost = self.rules.one_failure_is_all and worker.node.number not in self.at_fault
        return may_be_lost and worker.poll() == EXIT_UNREACHABLE

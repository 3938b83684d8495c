"""``thinwire run``: runs a user's script as every worker, with PS shards and a Supervisor.

The PS start without a model, and the first worker sends the script's model to the PS. The launchers
of `role.Cluster` start the nodes of `thinwire run`. A run of `thinwire run` differs from a run of
--type_node=Cluster in these points: workers run the user's script (module `script`), the launcher
shows the workers' output with their names and a failure only once, and the first worker that fails
ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import pkgutil
import re
import sys
import threading
import time
from collections.abc import Sequence

from absl import flags, logging

from thinwire.flags import launch
from thinwire.flags import script as script_flags
from thinwire.launcher import dry_run, launch_document
from thinwire.launcher.failures import Cause, Failure
from thinwire.launcher.hosts import place, read_hosts
from thinwire.launcher.line_merger import MergedLines
from thinwire.launcher.output import (
    NodeOutput,
    Screen,
    SupervisorOutput,
    WorkerOutput,
    shown_log,
)
from thinwire.launcher.role import (
    ELSEWHERE,
    LAUNCHERS,
    Cluster,
    EndRules,
    Launcher,
    Node,
    Process,
    check_nodes_here,
    nodes_of,
)
from thinwire.launcher.run_start import start_in_claimed_directory
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run.directory import forget_failure, launched_with, note_failure, summary_of
from thinwire.runtime.run.script_settings import RUN_BEGAN, remove_settings
from thinwire.runtime.run.script_target import ScriptTarget
from thinwire.runtime.run.settings import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_SCRIPT,
    EXIT_UNREACHABLE,
    Run,
)
from thinwire.runtime.standard_input import InputKind, StandardInput
from thinwire.worker.client.control import Control
from thinwire.worker.flags import devices

FLAGS = flags.FLAGS
#: Rules for ending the run of a user's script. A restarted script would raise its error again, so
#: only workers that were killed, or that lost contact with the PS, are restarted.
RULES = EndRules(
    one_failure_is_all=True,
    mendable=(EXIT_UNREACHABLE,),
    workers_first_seconds=5.0,
    kill_after_seconds=12.0,
)
_INPUT_TAKEN = (
    "every worker receives the whole stdin of this command, so the command consumes the stdin of "
    "a shell loop around it; in a loop, give < /dev/null"
)
_READS_INPUT = re.compile(rb"\bstdin\b|\binput\(|\bfileinput\b|\bopen\(0\b")
#: Prefixes of flags that the Cluster role gives to workers and `thinwire run` does not.
_OF_ROLES = ("--quiet", "--batch_size=")
#: Time limit for reaching PS shard 0 to end the run for a Slurm step's other tasks, in seconds.
_END_SECONDS = 10.0
#: Offset of exit codes for signals: an exit code of 128 or more is 128 + the number of a signal.
_EXIT_OF_SIGNALS = 128


def complete_flags(script: Sequence[str]) -> list[str]:
    """Set the flags of `thinwire run` that depend on the script, before the flags are read.

    Args:
        script: Words of the command line: a script's file, or -m and a module, then the script's
            arguments. The list may be empty with --like, which then repeats the earlier run's
            script.

    Returns:
        The script and its arguments, as words of a command line.

    Raises:
        ConfigurationError: No script is given, or a given flag has no effect in a run of a script.
    """
    if FLAGS.like:
        before = launch_document.recorded(FLAGS.like)
        for text in before.warnings():
            logging.warning("--like=%s: %s", FLAGS.like, text)
        script = script or before.words()
    if not script:
        raise ConfigurationError(
            "`thinwire run` was given no script; expected thinwire run [--flag=value ...] "
            "SCRIPT.py [arguments of the script], or -m MODULE instead of SCRIPT.py."
        )
    target = ScriptTarget.of(script)
    if FLAGS.model_from != "worker":
        raise ConfigurationError(
            f"--model_from={FLAGS.model_from}: the script provides the model; leave the flag out."
        )
    if misplaced := script_flags.misplaced(target, [*FLAGS]):
        logging.warning("%s", misplaced)
    script_flags.refuse(name for name in FLAGS if FLAGS[name].present)
    if not (FLAGS["port"].present or FLAGS.hosts_file or FLAGS.launcher == "ssh"):
        FLAGS["port"].value = 0  # port 0 stands for any free port
    if FLAGS.run_dir is None:
        FLAGS["run_dir"].value = _default_run_dir(target.label)
    return list(script)


def _default_run_dir(label: str) -> str:
    """Return a run directory named after the script; with --like, the directory is a new one."""
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    folders = (pathlib.Path("runs") / f"{label}{suffix}" for suffix in names)
    return str(next(folder for folder in folders if not (FLAGS.like and folder.exists())))


def main(run: Run, script: Sequence[str]) -> int:
    """Run a user's script on every worker of a run; return the run's exit code.

    Args:
        run: Settings of the run, from the flags.
        script: The user's script (path, or -m and module) and its arguments.

    Raises:
        ConfigurationError: Flags contradict the launcher, or another run uses the run directory.
        Unreachable: A host cannot be used. `main` has ended the nodes that had started.
    """
    name, target = _check(run), ScriptTarget.of(script)
    check_nodes_here(run, name, [target.folder])
    start = start_in_claimed_directory(run, script, name in ELSEWHERE)
    if start.finished is not None:
        return EXIT_DONE
    run, part, began = start.run, launch.part_here(), time.time()
    forget_failure(run.run_dir)
    if part is None or part.is_first:
        launch_document.write(run, script, began)
    else:
        began = float(launched_with(run.run_dir).get("began", began))
    launcher: Launcher = pkgutil.resolve_name(LAUNCHERS[name])(run, target.folder)
    nodes = nodes_of(run, launcher.addresses)
    try:
        script_run = _ScriptRun(run, launcher, nodes, script, began, start.updates)
        code = script_run.run()
    finally:
        launcher.close()
        # A worker removes its settings file at its end, which a killed worker cannot do.
        remove_settings(run.run_dir, [node.name for node in nodes])
    # The reason for a failure must be the last line of output, which a terminal shows and tools
    # quote.
    script_run.report_end(code)
    return code


def show(run: Run, script: Sequence[str]) -> int:
    """Describe the nodes that `main` would start, as text on stdout; return the exit code.

    The function `show`, for --dry_run, starts no node and writes no file.

    Args:
        run: Settings of the run, from the flags.
        script: The user's script (path, or -m and module) and its arguments.

    Raises:
        ConfigurationError: Flags contradict the chosen launcher (--launcher).
    """
    _check(run)
    nodes = [of_script(node, run, script) for node in nodes_of(run, run.addresses)]
    hosts = place_of(run) if FLAGS.hosts_file else []
    for line in dry_run.describe_run(run, nodes, hosts):
        sys.stdout.write(f"{line}\n")
    return EXIT_DONE


def _check(run: Run) -> str:
    """Reject contradicting flags of a script's run before a node starts; return the launcher."""
    devices(run.nb_workers)
    launch.keras_backends(run.nb_workers)
    script_flags.refuse_optimizer((name for name in FLAGS if FLAGS[name].present), run.method)
    return launch.check(runs_script=True)


def place_of(run: Run) -> list[str]:
    """Return the host of every node from --hosts_file, in the order in which nodes start."""
    assignment = place(read_hosts(FLAGS.hosts_file), run.nb_ps, run.nb_workers)
    return [*map(str, assignment.shards + assignment.workers), "this host"]


def of_script(node: Node, run: Run, script: Sequence[str]) -> Node:
    """Return a copy of a node with the flags for a script's run, and for a worker the script.

    Args:
        node: PS shard, worker or Supervisor, as `nodes_of` returns it.
        run: Settings of the run, from the flags.
        script: The user's script (path, or -m and module) and its arguments.
    """
    if node.role == "Supervisor":
        more_flags = ("--quiet", "--status_interval_seconds=1")
        return dataclasses.replace(node, flags=(*node.flags, *more_flags))
    if node.role == "PS":
        preload = ("--preload_keras",) if _may_need_keras(run, ScriptTarget.of(script).path) else ()
        return dataclasses.replace(node, flags=(*node.flags, *preload))
    words = tuple(flag for flag in node.flags if not flag.startswith(_OF_ROLES))
    return dataclasses.replace(node, flags=(*words, f"--seed={run.seed}"), script=tuple(script))


def _may_need_keras(run: Run, script: pathlib.Path) -> bool:
    """Return whether the PS will probably need Keras, because the script's optimizer is not SGD.

    The PS can apply SGD updates without importing Keras. A script whose text does not contain "SGD"
    uses another optimizer, or takes its optimizer from another file. If the guess about Keras is
    wrong, the PS wastes memory on Keras, or imports Keras only when the run begins, which takes
    seconds.
    """
    if run.method.kind is not Kind.GRADIENT:
        return False
    return b"sgd" not in script.read_bytes().lower()


class _ScriptRun:
    """One run of a script: supervises nodes, shows the nodes' output and reports failures.

    Args:
        run: Settings of the run, from the flags.
        launcher: Launcher that starts the nodes on their hosts.
        nodes: PS shards, workers and Supervisor that this launcher starts.
        script: The user's script (path, or -m and module) and its arguments.
        began: Start time of the run, in seconds since 1970 (the epoch).
        begun_at: Number of updates that the run had made when this launcher started.
    """

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        nodes: Sequence[Node],
        script: Sequence[str],
        began: float,
        begun_at: int = 0,
    ) -> None:
        self._run, self._script = run, tuple(script)
        self._began, self._begun_at = began, begun_at
        self._has_report = any(node.role == "Supervisor" for node in nodes)
        self._screen = Screen()
        self._input = StandardInput(run.run_dir, on_first_bytes=lambda: logging.info(_INPUT_TAKEN))
        self._failures: dict[int, Failure] = {}  # worker id -> failure, in the order of arrival
        # Worker id -> exit code of a script that exited without a failure report
        self._exited: dict[int, int] = {}
        self._lock = threading.Lock()
        self._workers: dict[int, WorkerOutput] = {}
        self._merged = MergedLines(
            [node.number for node in nodes if node.role == "Worker"],
            lambda line: self._workers[line.worker].write(line.text, line.is_error),
        )
        followed = [self._node(node) for node in nodes]
        self._cluster = Cluster(run, launcher, followed, RULES, self._read_code, self._merged.look)

    def run(self) -> int:
        """Run all nodes of the script's run to their end; return the run's exit code."""
        with shown_log(self._screen, lambda: [output.file for output in self._workers.values()]):
            self._warn_of_terminal()
            try:
                code = self._cluster.run()
            finally:
                for worker in self._workers:
                    self._merged.release(worker)
            self._end_others()
            self._screen.end_progress()
            if code not in (EXIT_DONE, EXIT_INTERRUPTED):
                first = None if self._is_of_node else self._first
                # The exit code of the first failed worker replaces the worst exit code.
                code = code if first is None else first[1].code
            self._report(code)
        return code

    def report_end(self, code: int) -> None:
        """Log why a run ended early, and a remedy; log nothing for a completed run."""
        if code == EXIT_DONE:
            return
        if code == EXIT_INTERRUPTED and self._first is None:
            logging.info("the run is interrupted; the same command resumes the run")
        else:
            logging.error("%s", self._reason())

    @property
    def _first(self) -> tuple[int, Failure] | None:
        """The worker whose script failed first, and the failure; None if no worker failed.

        A failure that follows from another worker's failure is returned only if no worker reported
        a failure of its own.
        """
        return next(iter([*self._own_failures().items(), *self._failures.items()]), None)

    def _own_failures(self) -> dict[int, Failure]:
        """Return worker id -> failure, for failures that do not follow from another worker's."""
        failures = list(self._failures.items())
        return {worker: each for worker, each in failures if each.cause is not Cause.ELSEWHERE}

    @property
    def _is_of_node(self) -> bool:
        """True if a PS or the Supervisor ended the run, and no worker's script failed before."""
        culprit, first = self._cluster.culprit, self._first
        is_of_node = culprit is not None and culprit.node.role != "Worker"
        return is_of_node and (first is None or first[1].cause in (Cause.LOST, Cause.ELSEWHERE))

    def _reason(self) -> str:
        if self._first is not None and not self._is_of_node:
            worker, failure = self._first
            return failure.last_line(worker, str(self._path(worker)))
        if self._exited and not self._is_of_node:
            worker, code = next(iter(self._exited.items()))
            text = f"the script left with exit code {code} and reported nothing, as os._exit does"
            return Failure(code, text).last_line(worker, str(self._path(worker)))
        return self._cluster.describe_end()

    def _warn_of_terminal(self) -> None:
        """Warn that workers cannot read the terminal, if the user's script seems to read stdin."""
        if self._input.kind is not InputKind.TERMINAL:
            return
        with contextlib.suppress(OSError):
            if _READS_INPUT.search(ScriptTarget.of(self._script).path.read_bytes()):
                logging.warning(
                    "stdin is a terminal, which the workers cannot share: a script that reads "
                    "stdin gets an empty input. Give the input by a file or a pipe."
                )

    def _path(self, worker: int) -> pathlib.Path:
        """Return the path of the file to which a worker's output is written."""
        return self._run.run_dir / "logs" / f"worker-{worker}.out"

    def _node(self, node: Node) -> Node:
        """Return a copy of a node with flags, output sink and standard input for a script's run."""
        node = of_script(node, self._run, self._script)
        if node.role != "Worker":
            kind = SupervisorOutput if node.role == "Supervisor" else NodeOutput
            shown = kind(node.name, self._screen, lambda: bool(self._failures))
            # The Supervisor passes its standard input to the evaluator, a process that also runs
            # the script.
            given_input = self._input if node.role == "Supervisor" else None
            return dataclasses.replace(node, output=shown, input=given_input)
        node = dataclasses.replace(node, flags=(*node.flags, f"{RUN_BEGAN}{self._began}"))
        path = self._path(node.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        output = WorkerOutput(node.number, self._screen, path, self._on_failure, self._merged)
        self._workers[node.number] = output
        return dataclasses.replace(node, output=output, input=self._input)

    def _read_code(self, node: Node, process: Process, code: int) -> int:
        """Return the exit code that the launcher uses for a node's end (`read_code` of `Cluster`).

        A worker whose script calls os._exit(0) before the script's end counts as failed.
        """
        output = self._workers.get(node.number) if node.role == "Worker" else None
        if output is not None:
            self._merged.ended(node.number)
        if output is None or code < EXIT_DONE:
            return code
        # Wait until the last lines of output are read, which may hold the failure or `COMPLETED`.
        process.wait()
        if code != EXIT_DONE:
            self._note_exit(node.number, code)
            return code
        if output.is_complete:
            return code
        name = ScriptTarget.of(self._script).shown
        text = (
            f"{name} left with exit code 0 before its end, as os._exit(0) does, and the other "
            "workers would continue without it; expected it to return. To end fit early set "
            "self.model.stop_training = True."
        )
        self._on_failure(node.number, Failure(EXIT_SCRIPT, text, Cause.THINWIRE))
        note_failure(self._run.run_dir, text, self._begun_at)
        return EXIT_SCRIPT

    def _note_exit(self, worker: int, code: int) -> None:
        """Record that a worker's script exited without a failure report, as by os._exit(3)."""
        over = self._cluster.interrupted.is_set() or self._cluster.root_cause is not None
        if not self._failures and code < _EXIT_OF_SIGNALS and not over:
            self._exited[worker] = code
            text = f"worker {worker} left with exit code {code}"
            note_failure(self._run.run_dir, text, self._begun_at)

    def _on_failure(self, worker: int, failure: Failure) -> None:
        """Show the first failure of a worker; later failures are only in the workers' output files.

        A failure whose text is one line becomes the launcher's last line of output. A script's
        failure with a traceback is shown immediately.
        """
        if self._cluster.interrupted.is_set():  # such a script's error is not the run's failure
            return
        is_own = failure.cause is not Cause.ELSEWHERE
        with self._lock:
            earlier = self._own_failures()
            self._failures[worker] = failure
        if is_own and failure.cause is not Cause.LOST:
            self._cluster.at_fault.add(worker)
        if not is_own or earlier or failure.cause is Cause.OTHER_RUN:
            return
        # The run continues without a lost worker, so no last line would show its reason
        if failure.has_page or failure.cause is Cause.LOST:
            self._workers[worker].show(failure.text)
        else:
            self._workers[worker].show("failed; the reason follows when the run has ended")

    def _end_others(self) -> None:
        """If a worker failed, make PS shard 0 end the run for the Slurm step's other tasks.

        Other tasks of the Slurm step do not notice a script that failed before its first training
        step. PS shard 0 answers only when it has a model, so `_end_others` waits up to
        --start_timeout_seconds.
        """
        part = launch.part_here()
        failed = [
            worker
            for worker, failure in self._own_failures().items()
            if failure.cause not in (Cause.LOST, Cause.OTHER_RUN)
        ]
        if part is None or part.is_first or not failed or self._cluster.interrupted.is_set():
            return
        worker = min(failed)
        run = dataclasses.replace(self._run, reconnect_timeout_seconds=_END_SECONDS)
        control = Control(run, worker)
        control.finish(True, self._failures[worker].headline, FLAGS.start_timeout_seconds)

    def _report(self, code: int) -> None:
        """Log which further workers failed, the run's result, and the path of the run's report.

        Args:
            code: Exit code of the whole run.
        """
        first = self._first
        failed = [
            worker
            for worker, failure in self._own_failures().items()
            if first is None or failure != first[1]
        ]
        if failed:
            names = ", ".join(map(str, failed))
            logging.error("further failed workers: %s; logs: %s", names, self._run.run_dir / "logs")
        summary = summary_of(self._run.run_dir)
        if code == EXIT_DONE and summary and self._has_report:
            logging.info(
                "the run has finished (%s): %d updates in %.1f s",
                summary["stop_reason"],
                summary["updates"],
                summary["seconds"],
            )
        page = self._run.run_dir / "report" / "index.html"
        if self._has_report and page.exists() and code in (EXIT_DONE, EXIT_INTERRUPTED):
            logging.info("report: %s", page)

"""Starts nodes as processes of this machine; defines the handle of a node's process.

A `SupervisedProcess` is a command that runs under a watchdog process
(`thinwire.launcher.watchdog`). The watchdog process ends the command when the pipe or ssh
connection from the launcher closes. `LocalLauncher` starts every node as a `SupervisedProcess`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from absl import flags

from thinwire.flags import launch, security
from thinwire.launcher import watchdog
from thinwire.launcher.gpus import GpuShares, gpus_here
from thinwire.launcher.output import READ_BYTES, follow
from thinwire.launcher.program import HERE
from thinwire.launcher.role import Launcher, LineSink, Node, environment, threads_of
from thinwire.proto.grpc import check_bind
from thinwire.runtime.run.devices import ON_SHARED_CORES, unless_set
from thinwire.runtime.run.settings import EXIT_INTERRUPTED, Run

FLAGS = flags.FLAGS
#: Seconds without a heartbeat after which a watchdog considers a launcher on another host dead. On
#: the launcher's host, a watchdog needs no heartbeats: the system closes a dead launcher's pipe. A
#: stopped launcher (SIGSTOP) must not count as dead.
_SILENCE_SECONDS = 60.0
_BEAT_SECONDS = 5.0  # seconds between two heartbeats of the launcher to a watchdog
_BYTE_OF = {number: byte for byte, number in watchdog.SIGNALS.items()}
_SSH_FAILED = 255  # exit code of the ssh client if the connection failed or was cut
_LAST_LINES = 5  # number of lines of a command's output that `last_output` returns
_PATIENCE_SECONDS = 5.0  # time limit of a wait for a killed watchdog or a reader thread


def watchdog_command(
    python: str,
    entry: Sequence[str],
    command: Sequence[str],
    over_ssh: bool = False,
    grace_seconds: float = watchdog.GRACE_SECONDS,
    given_input: str = "",
) -> list[str]:
    """Return the command line that runs a node's command under a watchdog process.

    Args:
        python: Path of the Python interpreter on the watchdog's host.
        entry: Python's arguments that run the watchdog on its host, for example `program.WATCHDOG`.
        command: Program and arguments that the watchdog starts and supervises.
        over_ssh: True if the launcher reaches the watchdog by ssh. Then the watchdog writes the
            line `watchdog.STARTED` when the command was started, and needs heartbeats.
        grace_seconds: Time between SIGTERM and SIGKILL when the watchdog ends the command, in
            seconds; 0 for SIGKILL only.
        given_input: Standard input of the watchdog's command, ``fd:NUMBER`` or ``file:PATH``; empty
            for /dev/null.
    """
    silence_seconds, manner = (_SILENCE_SECONDS, "announce") if over_ssh else (math.inf, "quiet")
    words = [f"{watchdog.INPUT}{given_input}"] if given_input else []
    return [python, *entry, str(silence_seconds), str(grace_seconds), manner, *words, *command]


def exit_code(code: int) -> int:
    """Return a node's exit code in the notation of `subprocess` (-n for signal n).

    Args:
        code: Exit code of the node's watchdog, or of the ssh client that runs the watchdog. A code
            of 128 + n stands for signal n, except 130, with which an interrupted node exits. The
            code 255 means a cut ssh connection and counts as SIGHUP.
    """
    if code == _SSH_FAILED:
        return -signal.SIGHUP
    return code if code <= 128 or code == EXIT_INTERRUPTED else 128 - code


def start_here(
    node: Node, *more_flags: str, variables: Mapping[str, str] | None = None
) -> SupervisedProcess:
    """Start a node of the run (PS shard, worker or Supervisor) on the launching host.

    Args:
        node: PS shard, worker or Supervisor to start. A node without `output` writes to the
            terminal directly.
        more_flags: Flags to add to the node's command line.
        variables: Environment variables that the started process gets, in addition to the node's
            and this process's variables.
    """
    command = [sys.executable, *node.words(HERE, more_flags)]
    opened = None if node.input is None else node.input.open()
    given_input, passed = ("", ()) if opened is None else (f"fd:{opened}", (opened,))
    supervised = watchdog_command(sys.executable, HERE.watchdog, command, given_input=given_input)
    try:
        return SupervisedProcess(
            supervised,
            node.output,
            variables={**node.variables, **(variables or {})},
            passed=passed,
        )
    finally:
        for descriptor in passed:
            os.close(descriptor)


class SupervisedProcess:
    """A command under a watchdog process, with which this process communicates by a pipe or ssh."""

    def __init__(
        self,
        command: Sequence[str],
        output: LineSink | None,
        announced: bool = False,
        variables: Mapping[str, str] | None = None,
        passed: Sequence[int] = (),
    ) -> None:
        """Start the watchdog process, which starts the node's command.

        Args:
            command: Command line of the watchdog process, or of the ssh client that runs it.
            output: `LineSink` that receives each line that the command writes. None if the command
                inherits this process's stdout and stderr.
            announced: Whether the watchdog process reports the command's start by the line
                `watchdog.STARTED`.
            variables: Environment variables that the started process gets, in addition to this
                process's variables.
            passed: File descriptors of this process that the watchdog inherits.
        """
        self._output = output
        self._was_started = threading.Event()
        self._last_beat = time.monotonic()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        pipe = None if output is None else subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=pipe,
            stderr=pipe,
            # The terminal's Ctrl-C must not reach the watchdog: `Cluster` forwards it
            start_new_session=True,
            env=environment() | dict(variables or {}),
            pass_fds=passed,
        )
        # A write to a host that does not read must not block the launcher's main thread.
        os.set_blocking(self._pipe(), False)
        if not announced or output is None:
            self._was_started.set()
        self._readers = [
            threading.Thread(target=self._follow, args=args, name="node-output", daemon=True)
            for args in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_output(self) -> str:
        """The last `_LAST_LINES` output lines of the supervised command, joined into one line."""
        return " / ".join(self._lines)

    def wait_until_started(self, seconds: float) -> bool:
        """Wait until the command has started or its watchdog has ended.

        Returns:
            True if the watchdog has reported the command's start, or if it never reports starts.

        Args:
            seconds: Time limit of the wait, in seconds.
        """
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._was_started.wait(0.05):
                break
        if self._process.poll() is not None:
            self._join_readers()
        return self._was_started.is_set()

    def poll(self) -> int | None:
        """Return the exit code of the node's command (-n for signal n); None while it runs."""
        code = self._process.poll()
        return None if code is None else exit_code(code)

    def send_signal(self, number: int) -> None:
        """Make the watchdog process send the signal `number` to the node's command."""
        self._write(_BYTE_OF[signal.Signals(number)])

    def beat(self) -> None:
        """Send a heartbeat to the watchdog if the last heartbeat is `_BEAT_SECONDS` seconds old."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._write(watchdog.BEAT)

    def kill(self) -> None:
        """Make the watchdog kill the node's command; kill a watchdog or ssh that does not respond.

        When the ssh client on this host is killed, a watchdog on another host reads the end of its
        input and ends the node's command.
        """
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()

    def wait(self) -> int:
        """Wait for the end of the node's command and of its output; return the exit code."""
        self._process.wait()
        self._join_readers()
        code = self.poll()
        return 0 if code is None else code

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(_PATIENCE_SECONDS)

    def _pipe(self) -> int:
        if self._process.stdin is None:  # never None, because `Popen` was called with stdin=PIPE
            raise OSError("no pipe to the watchdog")
        return self._process.stdin.fileno()

    def _write(self, message: bytes) -> None:
        # A failed write means that the watchdog has ended or does not read its pipe. `poll` will
        # report the watchdog's end.
        with contextlib.suppress(OSError):
            os.write(self._pipe(), message)

    def _follow(self, stream: IO[bytes] | None, is_error: bool) -> None:
        """Pass each line of the command's stdout or stderr to the object `output`."""
        if stream is None or self._output is None:
            return
        take = self._output.on_line

        def on_line(line: str) -> None:
            if line == watchdog.STARTED:
                self._was_started.set()
                return
            self._lines.append(line)
            take(line, is_error)

        follow(functools.partial(os.read, stream.fileno(), READ_BYTES), on_line)


class LocalLauncher(Launcher):
    """Starts every node of a run as a process of this machine."""

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Choose the addresses of the PS, and deal this machine's GPUs to the workers.

        Raises:
            ConfigurationError: --gpus_per_worker contradicts --device or this machine's GPUs.
        """
        self.addresses = _choose_addresses(run.addresses)
        self._threads = threads_of(os.cpu_count() or 1, run.nb_workers)
        machines = dict.fromkeys(range(1, run.nb_workers + 1), "this machine")
        self._gpus = GpuShares(machines, lambda _: gpus_here(), run.device, FLAGS.gpus_per_worker)

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node on this machine; a watchdog ends it when the launcher ends or dies."""
        variables = unless_set(ON_SHARED_CORES) | self._gpus.variables(node.role, node.number)
        return start_here(node, f"--worker_threads={self._threads}", variables=variables)


class SlurmLauncher(Launcher):
    """Starts the nodes of this task of a Slurm step, on this host; other tasks start the others.

    Slurm sends signals to all processes that a task has started, and kills these processes at the
    end of the job. Slurm also chooses the GPUs of a task, and so of the task's worker.
    """

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Choose the address on which PS of this task listen.

        Raises:
            ConfigurationError: The Slurm step has several hosts, and no TLS certificates, no token
                and no --insecure are given.
        """
        step = launch.step_here()
        self.addresses = run.addresses
        is_alone = len(step.hosts) == 1 and not (FLAGS.ps_hosts and FLAGS["ps_hosts"].present)
        self._bind = "127.0.0.1" if is_alone else "0.0.0.0"
        check_bind(self._bind, FLAGS.insecure, security.protection(FLAGS))
        self._threads = FLAGS.worker_threads or step.cpus_of_task
        self._overwrite = ("--overwrite",) if run.overwrite else ()

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node under a watchdog, which ends the node when this Slurm task ends or dies."""
        bind = (f"--ip_PS={self._bind}",) if node.role == "PS" else ()
        # A restarted node resumes its run, so it must not delete its checkpoints because of
        # --overwrite.
        overwrite = self._overwrite if not node.num_restarts else ()
        return start_here(node, f"--worker_threads={self._threads}", *bind, *overwrite)


def _choose_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of the PS shards; for --port=0, loopback addresses with free ports."""
    if FLAGS.port != 0 or FLAGS.ps_hosts:
        return addresses
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return tuple(f"127.0.0.1:{port}" for port in ports)

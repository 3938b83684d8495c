"""Nodes as processes of this machine, and the supervised process that every launcher starts.

A `SupervisedProcess` is a command under a watchdog (`thinwire.launcher.watchdog`), which ends the
command when this end of a pipe, or of an ssh, is gone. `LocalLauncher` starts all nodes that way.
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

from thinwire.launcher import watchdog
from thinwire.launcher.output import READ_BYTES, follow
from thinwire.launcher.program import NODE, SCRIPT, WATCHDOG
from thinwire.launcher.role import LineSink, Node, environment, threads_of
from thinwire.runtime.run.settings import EXIT_INTERRUPTED, Run

FLAGS = flags.FLAGS
#: A launcher on another host is considered dead after this silence ...
SILENCE_SECONDS = 60.0
#: ... and on the same one never, not even while it is stopped: the system closes a dead one's pipe.
NO_SILENCE_SECONDS = math.inf
_BEAT_SECONDS = 5.0
_BYTE_OF = {number: byte for byte, number in watchdog.SIGNALS.items()}
_SSH_FAILED = 255
_LAST_LINES = 5
_PATIENCE_SECONDS = 5.0


def watchdog_command(
    python: str,
    entry: Sequence[str],
    command: Sequence[str],
    announce: bool = True,
    silence_seconds: float = SILENCE_SECONDS,
    grace_seconds: float = watchdog.GRACE_SECONDS,
    given_input: str = "",
) -> list[str]:
    """Return the command line that runs another one under a watchdog.

    Args:
        python: Which Python, there.
        entry: The arguments that run the watchdog there, such as `program.WATCHDOG`.
        command: The command to run.
        announce: Whether the watchdog reports that it was started; needed to follow its output.
        silence_seconds: The watchdog ends the command after this long without a heartbeat.
        grace_seconds: How long it gives the command to end by itself; 0: it kills it.
        given_input: The command's standard input, as the watchdog takes it; none: /dev/null.
    """
    words = ["announce" if announce else "quiet"]
    words += [f"{watchdog.INPUT}{given_input}"] if given_input else []
    return [python, *entry, str(silence_seconds), str(grace_seconds), *words, *command]


def exit_code(code: int) -> int:
    """Return a node's exit code as `subprocess` has it, from that of its watchdog or ssh.

    A cut ssh counts as a killed node; 130 is a node's own code for interrupted.
    """
    if code == _SSH_FAILED:
        return -signal.SIGHUP
    return code if code <= 128 or code == EXIT_INTERRUPTED else 128 - code


def start_here(
    node: Node, *more_flags: str, variables: Mapping[str, str] | None = None
) -> SupervisedProcess:
    """Start a node on the launching host; without an `output` it writes to this terminal itself.

    Args:
        node: Which.
        more_flags: Of its command line.
        variables: Of its environment, beside this process's.
    """
    command = [sys.executable, *node.words(NODE, SCRIPT, more_flags)]
    opened = None if node.input is None else node.input.open()
    supervised = watchdog_command(
        sys.executable,
        WATCHDOG,
        command,
        announce=False,
        silence_seconds=NO_SILENCE_SECONDS,
        given_input="" if opened is None else f"fd:{opened}",
    )
    passed = () if opened is None else (opened,)
    try:
        return SupervisedProcess(
            supervised, node.output, announced=False, variables=variables, passed=passed
        )
    finally:
        for descriptor in passed:
            os.close(descriptor)


class SupervisedProcess:
    """A command under a watchdog, reached through a pipe or ssh; see `launcher.role.Process`."""

    def __init__(
        self,
        command: Sequence[str],
        output: LineSink | None,
        announced: bool = True,
        variables: Mapping[str, str] | None = None,
        passed: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            command: The watchdog's command line, or that of the ssh that runs it.
            output: Takes each line that the command writes; None lets it write by itself.
            announced: Whether the watchdog reports the start.
            variables: Of its environment, beside this process's.
            passed: Descriptors that it inherits.
        """
        self._output, self.is_followed = output, output is not None
        self._was_started = threading.Event()
        self._last_beat = time.monotonic()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        pipe = None if output is None else subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # a terminal's Ctrl-C reaches it through the cluster alone
            env=environment() | dict(variables or {}),
            pass_fds=passed,
        )
        os.set_blocking(self._pipe(), False)  # nobody waits for a host that does not read
        if not announced or output is None:
            self._was_started.set()
        self._readers = [
            threading.Thread(target=self._follow, args=args, name="node-output", daemon=True)
            for args in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def started(self) -> bool:
        """Whether the command itself is known to have been started."""
        return self._was_started.is_set()

    @property
    def last_output(self) -> str:
        """The last lines of the command, in one line."""
        return " / ".join(self._lines)

    def wait_until_started(self, seconds: float) -> bool:
        """Wait until the command has been started or all has ended; return `started`."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._was_started.wait(0.05):
                break
        if self._process.poll() is not None:
            self._join_readers()
        return self.started

    def poll(self) -> int | None:
        """Return the exit code, -n if signal n killed the command or -SIGHUP if ssh was cut."""
        code = self._process.poll()
        return None if code is None else exit_code(code)

    def send_signal(self, number: int) -> None:
        """Let the watchdog send a signal to the command."""
        self._write(_BYTE_OF[signal.Signals(number)])

    def beat(self) -> None:
        """Show the watchdog from time to time that the launcher is alive."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._write(watchdog.BEAT)

    def kill(self) -> None:
        """End the command immediately; where its watchdog cannot be reached any more, end the ssh.

        The watchdog then sees its input end.
        """
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()

    def wait(self) -> int:
        """Wait for the end; return what `poll` returns."""
        self._process.wait()
        self._join_readers()
        code = self.poll()
        return 0 if code is None else code

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(_PATIENCE_SECONDS)

    def _pipe(self) -> int:
        if self._process.stdin is None:  # not so with the arguments above
            raise OSError("no pipe to the watchdog")
        return self._process.stdin.fileno()

    def _write(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or does not read: `poll` will show it
            os.write(self._pipe(), message)

    def _follow(self, stream: IO[bytes] | None, is_error: bool) -> None:
        """Pass on what the command writes, line by line."""
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


class LocalLauncher:
    """Starts every node here."""

    def __init__(self, run: Run) -> None:
        self.addresses = _choose_addresses(run.addresses)
        self._threads = threads_of(os.cpu_count() or 1, run.nb_workers)

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node; it ends with the cluster, whichever way that ends."""
        return start_here(node, f"--worker_threads={self._threads}")

    def settle(self) -> None:
        """Return immediately: processes of this machine are started when `start` returns."""

    def tend(self) -> None:
        """Do nothing: the system closes the pipes of a launcher that has died."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def prepare(run: Run, script_folder: pathlib.Path | None = None) -> LocalLauncher:
    """Return the launcher of a run; a script needs nothing more on this machine."""
    return LocalLauncher(run)


def _choose_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of the shards; port 0 stands for any free ones."""
    if FLAGS.port != 0 or FLAGS.ps_hosts:
        return addresses
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return tuple(f"127.0.0.1:{port}" for port in ports)

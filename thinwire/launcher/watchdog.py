"""Runs one node of a run on a host, and ends it when the launcher is gone.

``python -I watchdog.py SILENCE_SECONDS GRACE_SECONDS announce|quiet [--input=INPUT] COMMAND...``

The launcher holds the other end of the standard input, through ssh or a pipe. However the launcher
ends, this input ends too; where a network swallows that, the missing heartbeats show it. So nothing
is left running: on Linux not even a process that the command has started in a session of its own.
Where its parents have ended, the system makes it a child of the watchdog, which ends all its
children.

The command has another input: /dev/null, an inherited descriptor (``--input=fd:NUMBER``), or a file
(``--input=file:PATH``).

This file runs by itself on a host whose packages are not known yet: it imports the standard library
only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

#: One byte that the launcher writes -> the signal that the command gets.
SIGNALS = {b"I": signal.SIGINT, b"T": signal.SIGTERM, b"K": signal.SIGKILL}
#: The byte that only shows that the launcher is alive.
BEAT = b"."
#: The line that is written to the standard output once the command was started.
STARTED = "thinwire: the command has been started"
#: Begins the argument that names the command's input.
INPUT = "--input="
#: What nodes are usually given to end by themselves.
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_READ_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: How long killed processes are awaited: the system may still write for one.
_END_SECONDS = 5.0


class Watchdog:
    """Supervises one command on behalf of the launcher."""

    def __init__(
        self,
        command: list[str],
        silence_seconds: float,
        grace_seconds: float,
        given_input: int = subprocess.DEVNULL,
    ) -> None:
        """Start the command.

        Args:
            command: Program and arguments.
            silence_seconds: The launcher is considered dead after it has written nothing this long.
            grace_seconds: From the gentle signal to the other one, where the launcher is gone; 0:
                without the gentle one.
            given_input: The command's standard input, a descriptor; it is closed here then.
        """
        self.silence_seconds, self.grace_seconds = silence_seconds, grace_seconds
        self.last_read_at = time.monotonic()
        self.orphaned = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        _adopt_orphans()
        # A node admits them when it can handle them: an interpreter that is starting cannot.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.child = subprocess.Popen(
            command, stdin=given_input, start_new_session=True, preexec_fn=_die_with_parent()
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if given_input >= 0:  # else a launcher would not see that the command reads no more
            os.close(given_input)

    def run(self) -> int:
        """Wait for the end; return the exit code, 128 + n for a command killed by signal n."""
        while self.child.poll() is None and not self.orphaned:
            self._read_launcher()
            self._reap_orphans()
        if self.child.poll() is None and self.grace_seconds:
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.grace_seconds)
        self._signal(signal.SIGKILL)  # to the command and the processes that it has started
        code = self.child.wait()
        _end_children()
        return code if code >= 0 else 128 - code

    def _read_launcher(self) -> None:
        """Wait a moment for the launcher's bytes, and pass the signals among them on."""
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        now = time.monotonic()
        if readable:
            received = os.read(0, _READ_BYTES)
            self.orphaned = self.orphaned or not received
            self.last_read_at = now
            for number in received:
                if bytes([number]) in SIGNALS:
                    self._signal(SIGNALS[bytes([number])])
        elif now - self.last_read_at > self.silence_seconds:
            self.orphaned = True

    def _reap_orphans(self) -> None:
        """Take the exit codes of adopted processes; that of the command is left to `subprocess`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, flags)) and ended.si_pid != self.child.pid:
                os.waitpid(ended.si_pid, 0)

    def _signal(self, number: int) -> None:
        """Send a signal to the command; the one that cannot be caught, to all its processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.child.pid, number)
            else:
                self.child.send_signal(number)

    def _on_signal(self, number: int, frame: object) -> None:
        self.orphaned = True


def _adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parents have ended (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_children() -> None:
    """Kill all children, and theirs, which become children of this process as their parents end."""
    deadline = time.monotonic() + _END_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the children of this process; without /proc none is known."""
    found, own = [], str(os.getpid())
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(") ")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a new process calls so that it does not outlive a killed watchdog (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    system = ctypes.CDLL(None)  # loaded here: a new process should do as little as it can
    return lambda: system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_input(place: str) -> int:
    """Return the descriptor of ``fd:NUMBER`` or of ``file:PATH``."""
    kind, _, name = place.partition(":")
    return int(name) if kind == "fd" else os.open(name, os.O_RDONLY | os.O_CLOEXEC)


def main(arguments: list[str]) -> int:
    """Supervise the command that the arguments name; return its exit code."""
    silence_seconds, grace_seconds, manner, *command = arguments
    given_input = subprocess.DEVNULL
    if command[0].startswith(INPUT):
        given_input = _open_input(command.pop(0).removeprefix(INPUT))
    watchdog = Watchdog(command, float(silence_seconds), float(grace_seconds), given_input)
    if manner == "announce":
        sys.stdout.write(f"{STARTED}\n")
        sys.stdout.flush()
    return watchdog.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs one node of a run on a host, and ends the node when the launcher has ended or died.

``python -I watchdog.py SILENCE_SECONDS GRACE_SECONDS announce|quiet [--input=INPUT] COMMAND...``

The launcher writes to the watchdog's standard input, through ssh or a pipe. When the launcher ends
or dies, the watchdog's standard input ends. If a broken network hides the launcher's end, the
watchdog notices that heartbeats are missing. When the watchdog ends, no process of its command
remains running. On Linux the watchdog also ends processes that the command has started in other
sessions. When a process of the command ends, Linux makes its children the watchdog's children, and
the watchdog finally kills all its children.

The standard input of the watchdog's command is /dev/null, an inherited descriptor
(``--input=fd:NUMBER``), or a file (``--input=file:PATH``).

The file `watchdog.py` imports only the standard library, because it may run on hosts with unknown
packages.
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

#: Byte that the launcher writes to the watchdog -> signal that the watchdog sends to its command.
SIGNALS = {b"I": signal.SIGINT, b"T": signal.SIGTERM, b"K": signal.SIGKILL}
#: Byte that the launcher writes to a watchdog as a heartbeat.
BEAT = b"."
#: Line that the watchdog, with the argument "announce", writes to stdout when the command was
#: started.
STARTED = "thinwire: the command has been started"
#: Prefix of the watchdog's argument that names the command's standard input.
INPUT = "--input="
#: Default time between SIGTERM and SIGKILL when the watchdog ends its command, in seconds.
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_READ_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Longest wait for the end of killed processes, in seconds. A killed process may still be in
#: uninterruptible disk I/O.
_END_SECONDS = 5.0


class Watchdog:
    """Supervises the command of one node on behalf of the launcher."""

    def __init__(
        self,
        command: list[str],
        silence_seconds: float,
        grace_seconds: float,
        given_input: int = subprocess.DEVNULL,
    ) -> None:
        """Start the command in a new session and install the watchdog's signal handlers.

        Args:
            command: Program and arguments to supervise.
            silence_seconds: The launcher counts as dead after this time without a byte from the
                launcher.
            grace_seconds: Time between SIGTERM and SIGKILL after the launcher's death, in seconds;
                0 to send only SIGKILL.
            given_input: File descriptor of the command's standard input. The watchdog closes its
                copy after the command's start.
        """
        self.silence_seconds, self.grace_seconds = silence_seconds, grace_seconds
        self.last_read_at = time.monotonic()
        self.orphaned = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        _adopt_orphans()
        # The command starts with SIGINT and SIGTERM blocked, and unblocks them when it has
        # installed its handlers (`admit_signals`). An unblocked signal during the interpreter's
        # start would kill the node.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.child = subprocess.Popen(
            command, stdin=given_input, start_new_session=True, preexec_fn=_die_with_parent()
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # If the watchdog kept its copy of the command's standard input open, the writer of a pipe
        # would not notice that the command has closed the pipe.
        if given_input >= 0:
            os.close(given_input)

    def run(self) -> int:
        """Wait for the end of the command or the launcher, then kill the command's processes.

        Returns:
            Exit code of the command; 128 + n if signal n killed the command.
        """
        while self.child.poll() is None and not self.orphaned:
            self._read_launcher()
            self._reap_orphans()
        if self.child.poll() is None and self.grace_seconds:
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.grace_seconds)
        self._signal(signal.SIGKILL)  # kills the command and the processes of its group
        code = self.child.wait()
        _end_children()
        return code if code >= 0 else 128 - code

    def _read_launcher(self) -> None:
        """Wait up to `_POLL_SECONDS` for bytes from the launcher; send the signals they name."""
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
        """Reap ended orphan processes that the watchdog has adopted, but not its command."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, flags)) and ended.si_pid != self.child.pid:
                os.waitpid(ended.si_pid, 0)

    def _signal(self, number: int) -> None:
        """Send a signal to the command; send SIGKILL to the command's whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.child.pid, number)
            else:
                self.child.send_signal(number)

    def _on_signal(self, number: int, frame: object) -> None:
        self.orphaned = True


def _adopt_orphans() -> None:
    """Become the parent of each descendant process that loses its parent (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_children() -> None:
    """Kill all child processes, then the orphaned children of the killed processes."""
    deadline = time.monotonic() + _END_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the process ids of this process's children; an empty list without /proc."""
    children, parent = [], str(os.getpid())
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                # The file holds "PID (NAME) STATE PPID ...", and NAME may hold spaces and brackets.
                if file.read().rpartition(") ")[2].split()[1] == parent:
                    children.append(int(name))
    return children


def _die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel kill the command when the watchdog is killed.

    On systems other than Linux, the result is None, because the kernel lacks this function.
    """
    if not sys.platform.startswith("linux"):
        return None
    # The C library is loaded before the fork, because a forked process should do as little as
    # possible.
    system = ctypes.CDLL(None)
    return lambda: system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_input(place: str) -> int:
    """Return the file descriptor of a standard input, given as ``fd:NUMBER`` or ``file:PATH``."""
    kind, _, name = place.partition(":")
    return int(name) if kind == "fd" else os.open(name, os.O_RDONLY | os.O_CLOEXEC)


def main(arguments: list[str]) -> int:
    """Run as a watchdog of the command that the arguments name; return the command's exit code."""
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

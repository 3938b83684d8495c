"""Starts of ``main.py`` that import nothing anew: forks of a process that has TensorFlow.

Importing takes 3 s of a core for every node, more than most tests train. The forking process runs
no TensorFlow operation and no thread of ours, so a fork of it is what ``python main.py`` is after
its imports. Command lines that must be seen whole (``/proc/*/cmdline``), or whose start is the
matter, are started afresh instead: :attr:`tests.nodes.Nodes.fresh`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import threading
from typing import IO

MAIN = pathlib.Path(__file__).resolve().parent.parent / "main.py"
#: What nodes import: the roles bring everything else.
LOADED = (
    "tensorflow",
    "keras",
    "thinwire.ps.role",
    "thinwire.worker.role",
    "thinwire.supervisor.role",
    "thinwire.standalone",
)
_LARGEST = 1 << 16
#: Importing takes that long where many others want the cores, or the machine stands still.
_PATIENCE_SECONDS = 600.0


class Forked:
    """A child of the forking process, used as :class:`subprocess.Popen` is."""

    def __init__(self, args: list[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, minus the number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def end(self, code: int) -> None:
        """Note how it ended."""
        self.returncode = code
        self._ended.set()


class Forker:
    """The pytest process's side: asks for forks, hears of their ends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._children: dict[int, Forked] = {}
        self._early: dict[int, int] = {}
        self._started = threading.Condition()
        self._pids: list[int] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                cwd=MAIN.parent,
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self._listen, name="forked", daemon=True).start()

    def start(self, args: list[str], output: IO[bytes], environment: dict[str, str]) -> Forked:
        """Fork ``python args`` with this output and environment, here, in its own session.

        Raises:
            RuntimeError: The forking process has died.
        """
        request = {"args": args, "env": environment, "cwd": os.getcwd()}
        with self._started:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output.fileno()])
            if not self._started.wait_for(lambda: self._pids, _PATIENCE_SECONDS):
                self._process.kill()  # else it forks when nobody is left to reap what it starts
                raise RuntimeError(f"no fork; the forking process: {self._process.poll()}")
            child = Forked(args, self._pids.pop())
            self._children[child.pid] = child
            if child.pid in self._early:
                child.end(self._early.pop(child.pid))
        return child

    def _listen(self) -> None:
        while told := self._socket.recv(_LARGEST):
            message = json.loads(told)
            with self._started:
                if "code" not in message:
                    self._pids.append(message["pid"])
                    self._started.notify_all()
                elif message["pid"] in self._children:
                    self._children.pop(message["pid"]).end(message["code"])
                else:
                    self._early[message["pid"]] = message["code"]


@functools.cache
def forker() -> Forker:
    """Return the one of this process, started at first use."""
    return Forker()


def _tell(channel: socket.socket, **message: int) -> None:
    with contextlib.suppress(OSError):  # nobody is left to hear it
        channel.send(json.dumps(message).encode())


def _reap(channel: socket.socket) -> None:
    """Tell of every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(channel, pid=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _serve(channel: socket.socket, asker: int) -> list[str] | None:
    """Fork at every request; return its arguments in the child, None when all is over."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap(channel))
    while True:
        request, outputs, _, _ = socket.recv_fds(channel, _LARGEST, 1)
        if not request or os.getppid() != asker:  # nobody would reap what it asked for before
            return None
        # A child that ends before its number is told is reaped after it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            return _become(json.loads(request), outputs[0], channel)
        os.close(outputs[0])
        _tell(channel, pid=pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become(request: dict, output: int, channel: socket.socket) -> list[str]:
    """Make the child what a fresh process would be."""
    os.setsid()
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return list(request["args"])


def main() -> None:
    """Load, fork at every request, and in a fork run the script that was asked for."""
    channel, asker = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    for name in LOADED:
        importlib.import_module(name)
    arguments = _serve(channel, asker)
    if arguments is not None:
        sys.argv = arguments
        sys.path.insert(0, str(pathlib.Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

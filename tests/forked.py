"""Starts Thinwire's programs as forks of a process that has already imported TensorFlow.

Importing TensorFlow and Keras takes 3 s of a core for each process, more than most tests train. The
forking process runs no TensorFlow operation and has no thread of Thinwire, so its fork is equal to
``python main.py`` or ``python -P script.py`` after the imports.

Programs start other programs by `sys.executable`. In a fork that is `Forker.python`, a small
program (tests/warm_python.py) that requests a fork with the same arguments, lives as long as this
fork, and forwards signals. So a launcher's workers and evaluator are forks too. The small program
runs a normal Python for commands that cannot be forked (a watchdog, another hash seed).

The workers of xdist are forks of this process too, and share it with xdist's controller.

Tests that need the real command line (``/proc/*/cmdline``) or a real start of Python use a new
process instead: :attr:`tests.nodes.Nodes.fresh`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAIN = ROOT / "main.py"
#: Modules that nodes import: the roles and the session of a script import all other modules.
LOADED = (
    "tensorflow",
    "keras",
    "thinwire.ps.role",
    "thinwire.worker.role",
    "thinwire.supervisor.role",
    "thinwire.supervisor.report.__main__",
    "thinwire.launcher.standalone",
    "thinwire.cli.commands",
    "thinwire.cli.node",
    "thinwire.launcher.run",
    "tensorboard.compat.proto.event_pb2",
    "thinwire.launcher.script",
    "thinwire.launcher.local",
    "thinwire.script.keras.distribute",
)
#: Modules of `LOADED` that import a Keras backend.
_OF_BACKENDS = {
    "tensorflow",
    "keras",
    "thinwire.worker.role",
    "thinwire.launcher.standalone",
    "thinwire.script.keras.distribute",
}
#: Modules that nodes import where a script's backend is not TensorFlow. JAX and torch have threads
#: once they are imported, and a fork of such a process may wait for ever.
LOADED_WITHOUT_TENSORFLOW = ("numpy", *(name for name in LOADED if name not in _OF_BACKENDS))
#: Environment variable of xdist's workers: the folder of the Forker that they share.
_FOLDER = "THINWIRE_TESTS_FORKER"
#: Runs a worker of xdist: what execnet starts Python with.
_FROM_STANDARD_INPUT = ["-u", "-c"]
#: The forks' seed of hashes: a script's launcher takes --seed for it, which is 1 unless given.
HASH_SEED = "1"
_LARGEST = 1 << 17
#: Importing takes that long where many others want the cores, or the machine stands still.
_PATIENCE_SECONDS = 600.0


class Forked:
    """A child of the forking process, used as :class:`subprocess.Popen` is.

    It is killed when this object's process has ended.
    """

    def __init__(self, args: list[str], pid: int, connection: socket.socket, life: int) -> None:
        self.args, self.pid, self._connection, self._life = args, pid, connection, life
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="forked", daemon=True).start()

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

    def _listen(self) -> None:
        received = self._connection.recv(_LARGEST)
        self.returncode = json.loads(received)["code"] if received else -signal.SIGKILL
        self._connection.close()
        os.close(self._life)
        self._ended.set()


class Forker:
    """The pytest process' side: requests forks.

    Attributes:
        python: A program that starts what Python starts, by a fork where that can be.
    """

    def __init__(self, folder: str) -> None:
        self._address, self.python = f"{folder}/socket", f"{folder}/python"

    @classmethod
    def begin(cls) -> Forker:
        """Start the forking process; it ends when this process has ended."""
        folder = tempfile.mkdtemp(prefix="forker")
        made = cls(folder)
        text = (ROOT / "tests" / "warm_python.py").read_text()
        for name, value in (
            ("PYTHON", sys.executable),
            ("SOCKET", made._address),
            ("HASHES", HASH_SEED),
        ):
            text = text.replace(f'"{name}"', repr(value))
        pathlib.Path(made.python).write_text(f"#!{sys.executable} -IS\n{text}")
        os.chmod(made.python, 0o755)
        life, made._life = os.pipe()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(made._address)
        listener.listen(64)  # requests wait until everything is imported
        numbers = [listener.fileno(), life]
        made._process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "tests" / "forked.py"), *map(str, numbers)],
            cwd=folder,
            env=os.environ
            | {
                "PYTHONHASHSEED": HASH_SEED,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "GRPC_VERBOSITY": "ERROR",
                "CUDA_VISIBLE_DEVICES": "-1",
            },
            stdin=subprocess.DEVNULL,
            pass_fds=numbers,
            start_new_session=True,
        )
        os.close(life)
        listener.close()
        return made

    def start(
        self,
        args: list[str],
        output: IO[bytes] | int,
        environment: dict[str, str],
        errors: IO[bytes] | int | None = None,
        cwd: str | os.PathLike[str] | None = None,
        given: IO[bytes] | int | None = None,
    ) -> Forked:
        """Fork ``python args`` in its own session.

        Args:
            args: A path, -P and a path, or -m and a module; and arguments.
            output: Its stdout.
            environment: All of it.
            errors: Its stderr; None: its stdout.
            cwd: Its folder; None: the present one.
            given: Its stdin; None: /dev/null.

        Raises:
            RuntimeError: The forking process has died.
        """
        life, alive = os.pipe()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._address)
        request = {"args": args, "env": environment, "cwd": str(cwd or os.getcwd())}
        with open(os.devnull) as nothing, open(life):
            streams = [nothing if given is None else given, output, errors or output, life]
            socket.send_fds(connection, [json.dumps(request).encode()], map(_descriptor, streams))
        connection.settimeout(_PATIENCE_SECONDS)
        answer = connection.recv(_LARGEST)
        if not answer:
            raise RuntimeError("no fork; the forking process has ended")
        connection.settimeout(None)
        return Forked(args, json.loads(answer)["pid"], connection, alive)


def _descriptor(stream: IO[Any] | int) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


@functools.cache
def forker() -> Forker:
    """Return the one of this process, or of the process that controls it; started at first use."""
    folder = os.environ.get(_FOLDER)
    return Forker(folder) if folder else Forker.begin()


def share_forker() -> str:
    """Let the workers of xdist be forks and share the forking process; return their Python."""
    shared = forker()
    os.environ[_FOLDER] = str(pathlib.Path(shared.python).parent)
    return shared.python


def collect_rarely() -> None:
    """Leave out of garbage collections what exists, and collect less often than Python does.

    TensorFlow makes hundreds of thousands of objects while it traces a function, which live as long
    as the function. Python would scan all these objects repeatedly: a tenth of a test's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 20)


# -- the forking process --------------------------------------------------------------------------


class _Server:
    """Forks at every request."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._python = str(pathlib.Path(listener.getsockname()).parent / "python")
        self._children: dict[int, socket.socket] = {}
        self._module_path = list(sys.path)

    def serve(self) -> list[str]:
        """Serve fork requests for ever; return, in each fork, the arguments of its program."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            connection, _ = self._listener.accept()
            try:
                request, streams, _, _ = socket.recv_fds(connection, _LARGEST, 4)
            except OSError:
                request = b""
            if not request:  # the client has ended
                connection.close()
                continue
            # A child that ends before its number is sent is reaped after it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if pid == 0:
                connection.close()
                return self._become(json.loads(request), streams)
            for descriptor in streams:
                os.close(descriptor)
            self._children[pid] = connection
            _send(connection, pid=pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _reap(self) -> None:
        """Report every child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._children.pop(ended[0])
                _send(connection, code=os.waitstatus_to_exitcode(ended[1]))
                connection.close()

    def _become(self, request: dict[str, Any], streams: list[int]) -> list[str]:
        """Make the child equal to a new process; return the arguments of its program."""
        os.setsid()
        *standard, life = streams
        _die_with(life)
        self._listener.close()
        for connection in self._children.values():
            connection.close()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = [signal.Signals(number) for number in request.get("blocked", ())]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        random.seed()
        tempfile.tempdir = None
        sys.modules["numpy"].random.seed()
        words = list(request["args"])
        if words[:2] == _FROM_STANDARD_INPUT:
            sys.path.insert(0, "")
            return words
        sys.executable, sys.orig_argv = self._python, [self._python, *words]
        sys.path = list(self._module_path)
        sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
        if words[0] == "-P":
            del words[0]
        else:
            is_module = words[0] == "-m"
            sys.path.insert(0, "" if is_module else os.path.dirname(os.path.abspath(words[0])))
        return words


def _send(connection: socket.socket, **message: int) -> None:
    with contextlib.suppress(OSError):  # no process reads the reply
        connection.send(json.dumps(message).encode())


def _die_with(life: int) -> None:
    """Let the kernel kill this process when the other end of a pipe is closed."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_blocking(life, False)
    with contextlib.suppress(BlockingIOError):
        if not os.read(life, 1):  # it was closed before
            os.kill(os.getpid(), signal.SIGKILL)


def _has_tensorflow() -> bool:
    is_chosen = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    return is_chosen and importlib.util.find_spec("tensorflow") is not None


def main() -> None:
    """Load, fork at every request, and in a fork run the program that was requested."""
    _die_with(int(sys.argv[2]))
    sys.path.insert(0, str(ROOT))
    importlib.import_module("thinwire")
    sys.path.remove(str(ROOT))
    for name in LOADED if _has_tensorflow() else LOADED_WITHOUT_TENSORFLOW:
        importlib.import_module(name)
    collect_rarely()
    words = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if words[:2] == _FROM_STANDARD_INPUT:
        sys.argv = ["-c"]
        exec(words[2], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()

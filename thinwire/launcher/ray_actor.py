"""The Ray actor that runs one PS or worker of a run as a child process.

Ray unpacks the package thinwire from the run's runtime environment into the actor's current folder.
The module `ray_actor` imports only the package thinwire, `ray` and the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from thinwire.proto.moved import MOVED_VARIABLE
from thinwire.runtime.run.devices import ON_CPU

_MOVED_FILE = "ps_moved"


@dataclasses.dataclass(frozen=True)
class ActorLocation:
    """Location of a Ray actor that runs a PS or worker: its Ray node, address and interpreter."""

    ray_node: str  # Ray's id of the Ray node
    address: str  # IP address of the Ray node
    free_port: int  # TCP port of the Ray node that was free when the actor was located
    has_token: bool  # True if the Ray actor's environment variables have the run's token
    python: str = "python3"  # path of the Python interpreter that runs the Ray actor


def _code_folder() -> pathlib.Path:
    """Return the folder of the package thinwire: the current folder, if it exists.

    Ray's nodes on one machine share the folder of the package, and another Ray node may have
    deleted and created the folder again. If the process's current folder no longer exists,
    `_code_folder` finds the new folder by the package's path.
    """
    try:
        return pathlib.Path.cwd()
    except FileNotFoundError:
        return pathlib.Path(__file__).resolve().parents[2]


class NodeActor:
    """Ray actor that runs one PS or worker of the run under a watchdog."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._input: pathlib.Path | None = None

    def find(self, token_variable: str) -> ActorLocation:
        """Return the Ray node, address and Python interpreter of this actor.

        Args:
            token_variable: Name of the environment variable that may hold the run's token.
        """
        ray = importlib.import_module("ray")
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        has_token = bool(os.environ.get(token_variable))
        return ActorLocation(node, address, port, has_token, sys.executable)

    def start(self, command: Sequence[str], moved: str, variables: Mapping[str, str]) -> None:
        """Start the PS or worker of this Ray actor as a child process.

        Args:
            command: Command line of the node's watchdog.
            moved: Text with new addresses of PS shards, which `note_moved` writes to a file.
            variables: Environment variables of the node, in addition to those of its Ray node.
        """
        self.note_moved(moved)
        moved_file = str(_code_folder() / _MOVED_FILE)
        environment = {**os.environ, **variables, MOVED_VARIABLE: moved_file}
        # The node's command line has all flags, and these variables of the Ray node's environment
        # would add flags.
        for name in ("TF_CONFIG", "THINWIRE_FLAGS"):
            environment.pop(name, None)
        if not importlib.import_module("ray").get_gpu_ids():  # Ray gave the actor no GPU
            environment |= ON_CPU
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=_code_folder()
        )

    def take_input(self, content: bytes) -> str:
        """Write the worker's standard input to a file that only this user can read.

        Args:
            content: All bytes of the worker's standard input.

        Returns:
            Path of the file, for the watchdog. `wait` deletes the file when the node has ended.
        """
        self._input = _code_folder() / f"stdin-{os.getpid()}"
        self._input.unlink(missing_ok=True)
        descriptor = os.open(self._input, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        return str(self._input)

    def note_moved(self, moved: str) -> None:
        """Write the file from which this host's nodes read new addresses of restarted PS shards.

        Args:
            moved: Content of the file with new addresses, in the format of `thinwire.proto.moved`.
        """
        draft = _code_folder() / f"{_MOVED_FILE}.{os.getpid()}"
        draft.write_text(moved)
        draft.replace(draft.with_name(_MOVED_FILE))

    def read(self, is_error: bool, most: int) -> bytes:
        """Wait for the node's next bytes of output and return them; empty if the output has ended.

        Args:
            is_error: True to read the node's stderr, False to read its stdout.
            most: Maximum number of bytes of output to read.
        """
        process = self._process
        stream = None if process is None else process.stderr if is_error else process.stdout
        return b"" if stream is None else os.read(stream.fileno(), most)

    def write(self, message: bytes) -> None:
        """Send bytes (`watchdog.SIGNALS` or a heartbeat) to the node's watchdog."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # fails if the watchdog has ended
                os.write(self._process.stdin.fileno(), message)

    def wait(self) -> int:
        """Wait for the end of the node's watchdog; return the watchdog's exit code."""
        if self._process is None:
            raise RuntimeError("this Ray actor has not started a node yet")
        try:
            return self._process.wait()
        finally:
            if self._input is not None:
                self._input.unlink(missing_ok=True)

"""What runs in Ray's processes: an actor that runs a node of the run in a process of its own.

Ray's nodes have this package from the run's runtime environment, in the current folder. Besides,
this module needs the standard library only.
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
from collections.abc import Sequence

from thinwire.proto.moved import MOVED_VARIABLE

_MOVED_FILE = "ps_moved"


@dataclasses.dataclass(frozen=True)
class ActorLocation:
    """Where Ray has placed an actor."""

    ray_node: str
    address: str
    free_port: int
    has_token: bool  # in its environment
    python: str = "python3"  # that Ray runs there


def _code_folder() -> pathlib.Path:
    """Return where the code lies, the current folder.

    Ray's nodes that share a machine share that folder: one may have made it anew since.
    """
    try:
        return pathlib.Path.cwd()
    except FileNotFoundError:
        return pathlib.Path(__file__).resolve().parents[2]


class NodeActor:
    """A place for one node of the run, on a node of Ray."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._input: pathlib.Path | None = None

    def find(self, token_variable: str) -> ActorLocation:
        """Return where this is.

        Args:
            token_variable: Of the environment, that may hold a token.
        """
        ray = importlib.import_module("ray")
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        has_token = bool(os.environ.get(token_variable))
        return ActorLocation(node, address, port, has_token, sys.executable)

    def start(self, command: Sequence[str], moved: str) -> None:
        """Start a node.

        Args:
            command: The watchdog's command line.
            moved: As for `note_moved`.
        """
        self.note_moved(moved)
        environment = dict(os.environ) | {MOVED_VARIABLE: str(_code_folder() / _MOVED_FILE)}
        for name in ("TF_CONFIG", "THINWIRE_FLAGS"):  # the command line has what they give
            environment.pop(name, None)
        if not importlib.import_module("ray").get_gpu_ids():  # none was requested
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=_code_folder()
        )

    def take_input(self, content: bytes) -> str:
        """Keep the node's standard input in a file that only this user can read.

        Args:
            content: All of it.

        Returns:
            The file's path, for the watchdog. The file goes when the node has ended.
        """
        self._input = _code_folder() / f"stdin-{os.getpid()}"
        self._input.unlink(missing_ok=True)
        descriptor = os.open(self._input, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        return str(self._input)

    def note_moved(self, moved: str) -> None:
        """Let the nodes here know where shards are now.

        Args:
            moved: The content of the file that `thinwire.proto.moved` describes.
        """
        draft = _code_folder() / f"{_MOVED_FILE}.{os.getpid()}"
        draft.write_text(moved)
        draft.replace(draft.with_name(_MOVED_FILE))

    def read(self, is_error: bool, most: int) -> bytes:
        """Return the next bytes that the node writes; none: its end."""
        process = self._process
        stream = None if process is None else process.stderr if is_error else process.stdout
        return b"" if stream is None else os.read(stream.fileno(), most)

    def write(self, message: bytes) -> None:
        """Send the node's watchdog a message."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), message)

    def wait(self) -> int:
        """Return the watchdog's exit code, once it has ended."""
        if self._process is None:
            raise RuntimeError("no node was started here")
        try:
            return self._process.wait()
        finally:
            if self._input is not None:
                self._input.unlink(missing_ok=True)

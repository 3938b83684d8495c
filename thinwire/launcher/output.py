"""What nodes write, line by line: named, coloured, in files, and beside one line of progress."""

from __future__ import annotations

import io
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from thinwire.launcher.failures import COMPLETED, Failure

#: Bytes that are read of a node's output together.
READ_BYTES = 65_536
_LONGEST_LINE = 1 << 20
_PLAIN_LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
_COLOURS = (36, 33, 35, 32, 34, 31)  # of workers 1, 2, ...: cyan, yellow, magenta, green ...
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def each_line(read: Callable[[], bytes]) -> Iterator[str]:
    """Yield a node's lines as a terminal would leave them: of a progress bar, its last state.

    Args:
        read: Returns the next bytes, once there are some; none: the end.
    """
    pending = b""
    while data := read():
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _last_state(line)
        if len(pending) > READ_BYTES:  # a bar that is never ended, or no text at all
            pending = pending[pending.rfind(b"\r", 0, -1) + 1 :]
        if len(pending) > _LONGEST_LINE:
            yield _last_state(pending)
            pending = b""
    if pending:
        yield _last_state(pending)


def _last_state(line: bytes) -> str:
    text = line.decode(errors="replace").replace("\b", "")
    return next((each for each in reversed(text.split("\r")) if each), "")


class NamedLines:
    """Repeats a node's lines on stderr with its name before them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line."""
        del is_error
        sys.stderr.write(f"[{self._name}] {line}\n")
        sys.stderr.flush()


class Screen:
    """The launcher's stdout and stderr, shared by all nodes, with one line of progress below.

    Args:
        out: Replaces stdout, for tests.
        error: Replaces stderr, for tests.
    """

    def __init__(self, out: TextIO | None = None, error: TextIO | None = None) -> None:
        self._out, self._error = out or sys.stdout, error or sys.stderr
        self._lock = threading.Lock()
        self.is_terminal = self._out.isatty()
        self._progress = ""

    def write(self, line: str, is_error: bool = False) -> None:
        """Write a line above the progress."""
        stream = self._error if is_error else self._out
        if not stream.isatty():
            line = _ESCAPES.sub("", line)
        with self._lock:
            self._erase()
            stream.write(f"{line}\n")
            stream.flush()
            self._draw()

    def show(self, progress: str) -> None:
        """Replace the line of progress; on what is no terminal, write it."""
        if not self.is_terminal:
            self.write(progress)
            return
        with self._lock:
            self._erase()
            self._progress = progress
            self._draw()

    def error_stream(self) -> TextIO:
        """Return a stream of whole lines that writes them like `write`, to stderr."""
        return _ScreenStream(self)

    def close(self) -> None:
        """Leave the line of progress standing."""
        with self._lock:
            if self._progress:
                self._out.write("\n")
                self._out.flush()
            self._progress = ""

    def _erase(self) -> None:
        if self._progress:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _draw(self) -> None:
        if self._progress:
            width = max(20, os.get_terminal_size(self._out.fileno()).columns - 1)
            self._out.write(self._progress[:width])
            self._out.flush()


class _ScreenStream(io.StringIO):
    """Writes whole lines to a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        """Write text that ends a line."""
        for line in text.splitlines():
            self._screen.write(line, is_error=True)
        return len(text)


class NodeOutput:
    """Repeats a node's lines on the screen, with its name.

    Args:
        name: Of the node.
        screen: Of the launcher.
        is_over: Whether a script has failed: what follows from that is in the nodes' logs.
    """

    def __init__(
        self, name: str, screen: Screen, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._name, self._screen, self._is_over = name, screen, is_over

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line."""
        if not self._is_over():
            self._screen.write(f"[{self._name}] {line}", is_error)


class SupervisorOutput(NodeOutput):
    """Makes the Supervisor's lines on stdout, each a status, the screen's progress."""

    def __init__(
        self,
        name: str,
        screen: Screen,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, screen, is_over)
        self._clock, self._shown_at = clock, -math.inf

    def on_line(self, line: str, is_error: bool) -> None:
        """Show a status, where there is no terminal from time to time; repeat another line."""
        if is_error:
            super().on_line(line, is_error)
        elif self._screen.is_terminal or self._clock() - self._shown_at >= _PLAIN_LINE_SECONDS:
            self._shown_at = self._clock()
            self._screen.show(line)


class WorkerOutput:
    """Repeats a worker's lines on the screen, with its name, and in a file of the run.

    Attributes:
        is_complete: Whether the worker's script has come to its end.

    Args:
        worker: Its id.
        screen: Of the launcher.
        path: The file; what it held is replaced.
        on_failure: Called with the worker and its failure, in place of a line.
    """

    def __init__(
        self,
        worker: int,
        screen: Screen,
        path: pathlib.Path,
        on_failure: Callable[[int, Failure], None],
    ) -> None:
        self._worker, self._screen, self._on_failure = worker, screen, on_failure
        self.is_complete = False
        self._name = f"[worker {worker}]"
        if screen.is_terminal:
            self._name = f"\x1b[{_COLOURS[(worker - 1) % len(_COLOURS)]}m{self._name}\x1b[0m"
        self._path = path
        # Unbuffered, so that closing it writes nothing, which a full disk would refuse again.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - until `close`
        self._lock = threading.Lock()

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line, or pass a failure on."""
        if is_error and line == COMPLETED:
            self.is_complete = True
            return
        line, failure = Failure.read(line) if is_error else (line, None)
        if line or failure is None:
            self._keep(_ESCAPES.sub("", line))
            self._screen.write(f"{self._name} {line}", is_error)
        if failure is not None:
            self._keep(failure.text)
            self._on_failure(self._worker, failure)

    def show(self, text: str) -> None:
        """Show some lines that are not the worker's own."""
        for line in text.splitlines():
            self._screen.write(f"{self._name} {line}", is_error=True)

    def close(self) -> None:
        """Finish the file; later lines are not kept."""
        with self._lock:
            self._file.close()

    def _keep(self, text: str) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(f"{text}\n".encode(errors="replace"))
            except OSError as error:  # the worker goes on, and stands still if nobody reads it
                self._file.close()
                self._screen.write(
                    f"cannot write {self._path}: {error.strerror or error}. Further lines of this "
                    "worker are missing there.",
                    is_error=True,
                )

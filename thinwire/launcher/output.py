"""Shows output lines of nodes, with node names and colors, above a line of progress.

No function of the module `output` raises an error or blocks forever when a terminal, a pipe or a
disk accepts no output. If a function that shows output failed or blocked, the threads that read the
nodes' pipes would stop, and the nodes would block. The module `thinwire.runtime.output_copy` writes
all output and counts lost lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TextIO

from absl import logging

from thinwire.launcher.failures import COMPLETED, ESCAPES, Failure
from thinwire.launcher.line_merger import MergedLines
from thinwire.runtime.output_copy import OutputCopy, OutputFile, same_place, sink_of

#: Maximum size of one read of a node's output, in bytes.
READ_BYTES = 65_536
_LONGEST_LINE = 1 << 20  # maximum length of a node's line, in bytes; a longer line is split
_USUAL_COLUMNS = 80  # assumed number of columns of a terminal that reports no width
_PLAIN_LINE_SECONDS = 10.0  # seconds between two progress lines if stdout is not a terminal
_COLOURS = (36, 33, 35, 32, 34, 31)  # terminal color codes of workers 1, 2, ...: cyan, yellow, ...
#: Matches the prefix of a line of a node's log: date, time, name and level. `thinwire.cli.node`
#: defines this log format.
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ \S+ (?P<level>[DIWEF]) ")


def each_line(read: Callable[[], bytes]) -> Iterator[str]:
    """Yield the lines of a node's output, with only the last state of a progress bar.

    Args:
        read: Function that waits for the next bytes of the node's output and returns them; returns
            no bytes at the output's end.
    """
    pending = b""
    while data := read():
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _last_state(line)
        # A progress bar without line ends would grow the buffer, so the buffer keeps only the bar's
        # last state.
        if len(pending) > READ_BYTES:
            pending = pending[pending.rfind(b"\r", 0, -1) + 1 :]
        if len(pending) > _LONGEST_LINE:
            yield _last_state(pending)
            pending = b""
    if pending:
        yield _last_state(pending)


def _last_state(line: bytes) -> str:
    text = line.decode(errors="replace").replace("\b", "")
    return next((state for state in reversed(text.split("\r")) if state), "")


def follow(read: Callable[[], bytes], on_line: Callable[[str], None]) -> None:
    """Read a node's output to its end, even if `on_line` raises for some of its lines.

    Reading must not stop, because a node whose output pipe is not read blocks in `print` forever,
    while its heartbeats continue.

    Args:
        read: Function that waits for the next bytes of the node's output and returns them; returns
            no bytes at the output's end.
        on_line: Function that is called with each line of the node's output.
    """
    num_failures = 0
    for line in each_line(read):
        try:
            on_line(line)
        except Exception:  # noqa: BLE001 - no error may stop the reading, or the node would block
            num_failures += 1
            if num_failures == 1:
                logging.exception("a line of a node's output was lost; reading continues")
    if num_failures:
        logging.error("%d lines of a node's output were lost because of errors", num_failures)


class Screen:
    """The launcher's stdout and stderr, which show all nodes' lines above a line of progress.

    If stdout and stderr are the same file or terminal, both share one `OutputCopy`, which keeps the
    order of the lines.

    Attributes:
        is_terminal: True if the launcher's stdout is a terminal.

    Args:
        out: Stream that replaces the process's stdout in tests; None for stdout.
        error: Stream that replaces the process's stderr in tests; None for stderr.
        on_first_loss: Function that is called with a warning for the user when the first line of
            stdout or stderr is lost.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        error: TextIO | None = None,
        on_first_loss: Callable[[str], None] = logging.warning,
    ) -> None:
        out, error = out or sys.stdout, error or sys.stderr
        is_shared = same_place(out, error)
        name = "stdout and stderr" if is_shared else "stdout"
        self._out = OutputCopy(name, sink_of(out), on_first_loss=on_first_loss)
        self._error = self._out
        if not is_shared:
            self._error = OutputCopy("stderr", sink_of(error), on_first_loss=on_first_loss)
        self._out_stream = out
        # The lock is reentrant: a signal handler may log a line while the main thread is in
        # `write`.
        self._lock = threading.RLock()
        self.is_terminal, self._is_error_terminal = _is_terminal(out), _is_terminal(error)
        self._progress = ""

    @property
    def copies(self) -> tuple[OutputCopy, ...]:
        """The `OutputCopy` objects by which the launcher writes to stdout and stderr."""
        return (self._out,) if self._error is self._out else (self._out, self._error)

    @property
    def is_error_stalled(self) -> bool:
        """True if a write to the launcher's stderr would block, perhaps forever."""
        return self._error.is_stalled

    def write(self, line: str, is_error: bool = False, source: str = "thinwire") -> None:
        """Write a line of output to the terminal, above the line of progress.

        Args:
            line: Text of the output line without its line end.
            is_error: True to write the output line to stderr, False to write it to stdout.
            source: Name of the process that wrote the output line, for the count of lost lines.
        """
        if not (self._is_error_terminal if is_error else self.is_terminal):
            line = ESCAPES.sub("", line)
        copy = self._error if is_error else self._out
        with self._lock:
            if copy is self._out:
                copy.put(f"{self._erasure()}{line}\n{self._drawing()}", source)
            else:
                copy.put(f"{line}\n", source)

    def show(self, progress: str, source: str = "thinwire") -> None:
        """Replace the line of progress; if stdout is not a terminal, append a line to stdout.

        Args:
            progress: Text of the new line of progress.
            source: Name of the process that wrote the output line, for the count of lost lines.
        """
        if not self.is_terminal:
            self.write(progress, source=source)
            return
        with self._lock:
            erasure, self._progress = self._erasure(), progress
            self._out.put(erasure + self._drawing(), "")

    def close(self) -> None:
        """End the line of progress, and close the outputs to stdout and stderr, stderr last."""
        self.close_out()
        self._error.close()

    def close_out(self) -> None:
        """End the line of progress; close stdout's `OutputCopy` unless stderr shares it."""
        self.end_progress()
        if self._out is not self._error:
            self._out.close()

    def end_progress(self) -> None:
        """End the line of progress with a line end, so that it stays above later output lines."""
        with self._lock:
            if self._progress:
                self._out.put("\n", "")
            self._progress = ""

    def _erasure(self) -> str:
        return "\r\x1b[K" if self._progress else ""

    def _drawing(self) -> str:
        if not self._progress:
            return ""
        try:
            columns = os.get_terminal_size(self._out_stream.fileno()).columns
        except (OSError, ValueError):  # fails after the terminal of stdout was closed
            columns = _USUAL_COLUMNS
        return self._progress[: max(20, columns - 1)]


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False for None and for a closed stream."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


class _ScreenStream(io.StringIO):
    """Text stream that writes whole lines to stderr by a `Screen`."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        """Write a text of whole lines to the launcher's stderr; return its number of characters."""
        for line in text.splitlines():
            self._screen.write(line, is_error=True)
        return len(text)


@contextlib.contextmanager
def shown_log(
    screen: Screen, files: Callable[[], Sequence[OutputCopy]] = lambda: ()
) -> Iterator[None]:
    """Write this process's log to a `Screen`; at exit, close all outputs and log the lost lines.

    At exit, stderr and the log in the run directory get a report of lost output lines, if they
    accept output.

    Args:
        screen: `Screen` by which the launcher writes to stdout and stderr.
        files: Function that returns the `OutputCopy` objects that write to files; called at exit.
    """
    handler = logging.get_absl_handler().python_handler
    before = handler.stream
    handler.setStream(_ScreenStream(screen))
    try:
        yield
    finally:
        file_copies = list(files())
        for copy in file_copies:
            copy.close()
        screen.close_out()
        logged = report_losses([*file_copies, *screen.copies])
        screen.close()
        # If stderr is stalled, the log keeps the closed screen as its stream, because a log handler
        # that writes to stderr directly would block forever.
        if not screen.is_error_stalled:
            handler.setStream(before)
        # Closing stdout and stderr may have lost more lines
        report_losses(screen.copies, logged)


def report_losses(copies: Sequence[OutputCopy], logged: Collection[str] = ()) -> list[str]:
    """Log and return a report for every `OutputCopy` that has lost output lines.

    Args:
        copies: `OutputCopy` objects of stdout, stderr and files to report on.
        logged: Reports that an earlier call logged, and that this call does not log again.
    """
    reports = [report for copy in copies if (report := copy.report()) and report not in logged]
    for report in reports:
        logging.warning("lost output: %s", report)
    return reports


@dataclasses.dataclass
class NodeOutput:
    """Repeats a node's output lines on stdout and stderr, prefixed with the node's name.

    Attributes:
        name: Name of the node, for example "worker-1".
        screen: `Screen` by which the launcher writes to stdout and stderr.
        is_over: Function that returns True after a script's failure. Then the node's lines, which
            are consequences of the failure, are only written to the node's log.
        only_stderr: True to repeat the lines of the node's stdout on stderr, too.
        last_error: Last line of the node's stderr that is an error or has no log level, without the
            log prefix; empty if the node wrote no error.
    """

    name: str
    screen: Screen
    is_over: Callable[[], bool] = lambda: False
    only_stderr: bool = False
    last_error: str = dataclasses.field(default="", init=False)

    def on_line(self, line: str, is_error: bool) -> None:
        """Show one output line of the node, prefixed with the node's name."""
        logged = LOG_PREFIX.match(line)
        if is_error and line.strip() and (logged is None or logged["level"] in "EF"):
            self.last_error = line if logged is None else line[logged.end() :]
        if not self.is_over():
            self.screen.write(f"[{self.name}] {line}", is_error or self.only_stderr, self.name)


@dataclasses.dataclass
class SupervisorOutput(NodeOutput):
    """Shows the status lines on the Supervisor's stdout as the launcher's line of progress."""

    clock: Callable[[], float] = time.monotonic
    _shown_at: float = dataclasses.field(default=-math.inf, init=False)

    def on_line(self, line: str, is_error: bool) -> None:
        """Show the Supervisor's status line on stdout as progress, or repeat its line on stderr.

        If the launcher's stdout is not a terminal, it shows one status line per
        `_PLAIN_LINE_SECONDS`.
        """
        if is_error:
            super().on_line(line, is_error)
        elif self.screen.is_terminal or self.clock() - self._shown_at >= _PLAIN_LINE_SECONDS:
            self._shown_at = self.clock()
            self.screen.show(line, self.name)


class WorkerOutput:
    """Writes a worker's output lines to the terminal, with the worker's name, and to a file.

    Attributes:
        is_complete: True if the worker's script has run to its end.
        file: `OutputFile` that receives the worker's output lines.

    Args:
        worker: Id of the worker whose output is written.
        screen: `Screen` by which the launcher writes to stdout and stderr.
        path: Path of the file for the worker's output; an existing file is overwritten.
        on_failure: Function that is called with the worker's id and its failure when the worker
            reports a failure.
        merged: `MergedLines` that receives each output line of the worker and decides when to show
            the line.
    """

    def __init__(
        self,
        worker: int,
        screen: Screen,
        path: pathlib.Path,
        on_failure: Callable[[int, Failure], None],
        merged: MergedLines,
    ) -> None:
        self._merged = merged
        self._worker, self._screen, self._on_failure = worker, screen, on_failure
        self.is_complete = False
        self._source = f"worker {worker}"
        self._name = f"[worker {worker}]"
        if screen.is_terminal:
            self._name = f"\x1b[{_COLOURS[(worker - 1) % len(_COLOURS)]}m{self._name}\x1b[0m"
        self.file = OutputFile(path)

    def on_line(self, line: str, is_error: bool) -> None:
        """Write one output line of the worker, or pass its report of a failure to `on_failure`."""
        if is_error and line == COMPLETED:
            self.is_complete = True
            return
        line, failure = Failure.read(line) if is_error else (line, None)
        if line or failure is None:
            self._keep(ESCAPES.sub("", line))
            self._merged.line(self._worker, line, is_error)
        if failure is not None:
            self._keep(failure.text)
            self._on_failure(self._worker, failure)

    def show(self, text: str) -> None:
        """Show a text of the launcher, with the worker's name, after the worker's waiting lines."""
        self._merged.release(self._worker)
        for line in text.splitlines():
            self.write(line, is_error=True)

    def write(self, line: str, is_error: bool) -> None:
        """Show one output line of the worker, prefixed with the worker's name."""
        self._screen.write(f"{self._name} {line}", is_error, self._source)

    def _keep(self, text: str) -> None:
        self.file.put(f"{text}\n", self._source)

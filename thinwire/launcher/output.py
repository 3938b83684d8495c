"""Nodes' output, line by line: with names and colours, in files, and above a line of progress.

Nothing here raises an error or waits for ever because a terminal, a pipe or a disk takes no output:
the threads that read the nodes' pipes would stop, and the nodes with them. All output leaves
through `thinwire.runtime.output_copy`, which counts what is lost.
"""

from __future__ import annotations

import contextlib
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

from thinwire.launcher.failures import COMPLETED, Failure
from thinwire.launcher.line_merger import MergedLines
from thinwire.runtime.output_copy import OutputCopy, OutputFile, same_place, sink_of

#: Bytes that are read of a node's output together.
READ_BYTES = 65_536
_LONGEST_LINE = 1 << 20
_USUAL_COLUMNS = 80  # of a terminal that reports no width
_PLAIN_LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
_COLOURS = (36, 33, 35, 32, 34, 31)  # of workers 1, 2, ...: cyan, yellow, magenta, green ...
#: Begins a line of a node's log, as `thinwire.cli.node` has them: date, time, name and level.
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ \S+ (?P<level>[DIWEF]) ")
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


def follow(read: Callable[[], bytes], on_line: Callable[[str], None]) -> None:
    """Pass a node's lines on until its output ends, even if some of them cannot be passed on.

    A node whose pipe nobody reads waits in `print` for ever, while its heartbeat continues.

    Args:
        read: As for `each_line`.
        on_line: Called with each line.
    """
    num_failures = 0
    for line in each_line(read):
        try:
            on_line(line)
        except Exception:  # noqa: BLE001 - whatever it is, the node must not wait
            num_failures += 1
            if num_failures == 1:
                logging.exception("a line of a node's output was lost; reading continues")
    if num_failures:
        logging.error("%d lines of a node's output were lost because of errors", num_failures)


class Screen:
    """The launcher's stdout and stderr, shared by all nodes, with one line of progress below.

    Streams that lead to the same place share a copy, so their lines keep their order.

    Args:
        out: Replaces stdout, for tests.
        error: Replaces stderr, for tests.
        on_first_loss: Called with a sentence as soon as one of them is known to lack lines.
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
        # Reentrant: a handler of signals logs a line while the main thread is in `write`.
        self._lock = threading.RLock()
        self.is_terminal, self._is_error_terminal = _is_terminal(out), _is_terminal(error)
        self._progress = ""

    @property
    def copies(self) -> tuple[OutputCopy, ...]:
        """The copies of stdout and stderr."""
        return (self._out,) if self._error is self._out else (self._out, self._error)

    @property
    def is_error_stalled(self) -> bool:
        """Whether a write to stderr would wait, perhaps for ever."""
        return self._error.is_stalled

    def write(self, line: str, is_error: bool = False, source: str = "thinwire") -> None:
        """Write a line above the progress.

        Args:
            line: Without its end.
            is_error: Whether it goes to stderr.
            source: Whose line it is, for the count of lost lines.
        """
        if not (self._is_error_terminal if is_error else self.is_terminal):
            line = _ESCAPES.sub("", line)
        copy = self._error if is_error else self._out
        with self._lock:
            if copy is self._out:
                copy.put(f"{self._erasure()}{line}\n{self._drawing()}", source)
            else:
                copy.put(f"{line}\n", source)

    def show(self, progress: str, source: str = "thinwire") -> None:
        """Replace the line of progress; on what is no terminal, write it."""
        if not self.is_terminal:
            self.write(progress, source=source)
            return
        with self._lock:
            erasure, self._progress = self._erasure(), progress
            self._out.put(erasure + self._drawing(), "")

    def error_stream(self) -> TextIO:
        """Return a stream of whole lines that writes them like `write`, to stderr."""
        return _ScreenStream(self)

    def close(self) -> None:
        """Leave the line of progress standing, and end the copies, stderr last."""
        self.close_out()
        self._error.close()

    def close_out(self) -> None:
        """Leave the line of progress standing, and end the copy of stdout unless it is stderr's."""
        self.end_progress()
        if self._out is not self._error:
            self._out.close()

    def end_progress(self) -> None:
        """Leave the line of progress standing above the lines that follow."""
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
        except (OSError, ValueError):  # the terminal is gone
            columns = _USUAL_COLUMNS
        return self._progress[: max(20, columns - 1)]


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; None and closed ones are none."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


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


@contextlib.contextmanager
def shown_log(
    screen: Screen, files: Callable[[], Sequence[OutputCopy]] = lambda: ()
) -> Iterator[None]:
    """Write this process's log to a screen; at the end, close all copies and log what they lack.

    The last lines go to stderr, and to the log in the run directory, whichever can be written.

    Args:
        screen: Of the launcher.
        files: Returns the copies in files, at the end.
    """
    handler = logging.get_absl_handler().python_handler
    before = handler.stream
    handler.setStream(screen.error_stream())
    try:
        yield
    finally:
        others = list(files())
        for copy in others:
            copy.close()
        screen.close_out()
        logged = report_losses([*others, *screen.copies])
        screen.close()
        # A stderr that is not read is left out from here on: its log handler would wait for ever.
        if not screen.is_error_stalled:
            handler.setStream(before)
        report_losses(screen.copies, logged)  # what was lost while they were closed


def report_losses(copies: Sequence[OutputCopy], logged: Collection[str] = ()) -> list[str]:
    """Log what copies lack, without reports that were logged before; return the new ones."""
    reports = [report for copy in copies if (report := copy.report()) and report not in logged]
    for report in reports:
        logging.warning("lost output: %s", report)
    return reports


class NamedLines:
    """Repeats a node's lines on stderr with its name before them.

    Args:
        name: Of the node.
        screen: Of the launcher.
    """

    def __init__(self, name: str, screen: Screen) -> None:
        self._name, self._screen = name, screen

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line."""
        self._screen.write(f"[{self._name}] {line}", is_error=True, source=self._name)


class NodeOutput:
    """Repeats a node's lines on the screen, with its name.

    Attributes:
        last_error: The last line that the node has written to stderr as an error; empty: none.

    Args:
        name: Of the node.
        screen: Of the launcher.
        is_over: Whether a script has failed: what follows from that is in the nodes' logs.
    """

    def __init__(
        self, name: str, screen: Screen, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._name, self._screen, self._is_over = name, screen, is_over
        self.last_error = ""

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line."""
        logged = LOG_PREFIX.match(line)
        if is_error and line.strip() and (logged is None or logged["level"] in "EF"):
            self.last_error = line if logged is None else line[logged.end() :]
        if not self._is_over():
            self._screen.write(f"[{self._name}] {line}", is_error, self._name)


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
            self._screen.show(line, self._name)


class WorkerOutput:
    """Repeats a worker's lines on the screen, with its name, and in a file of the run.

    Attributes:
        is_complete: Whether the worker's script has come to its end.
        file: The copy in the file.

    Args:
        worker: Its id.
        screen: Of the launcher.
        path: The file; what it held is replaced.
        on_failure: Called with the worker and its failure, in place of a line.
        merged: Takes each line that is to be shown, and decides when; None: nobody decides.
    """

    def __init__(
        self,
        worker: int,
        screen: Screen,
        path: pathlib.Path,
        on_failure: Callable[[int, Failure], None],
        merged: MergedLines | None = None,
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
        """Repeat one line, or pass a failure on."""
        if is_error and line == COMPLETED:
            self.is_complete = True
            return
        line, failure = Failure.read(line) if is_error else (line, None)
        if line or failure is None:
            self._keep(_ESCAPES.sub("", line))
            if self._merged is None:
                self.write(line, is_error)
            else:
                self._merged.line(self._worker, line, is_error)
        if failure is not None:
            self._keep(failure.text)
            self._on_failure(self._worker, failure)

    def show(self, text: str) -> None:
        """Show some lines that are not the worker's own, after those that it has written."""
        if self._merged is not None:
            self._merged.release(self._worker)
        for line in text.splitlines():
            self.write(line, is_error=True)

    def write(self, line: str, is_error: bool) -> None:
        """Show one line with the worker's name."""
        self._screen.write(f"{self._name} {line}", is_error, self._source)

    def _keep(self, text: str) -> None:
        self.file.put(f"{text}\n", self._source)

"""Copies of a process's output to a terminal, a pipe or a file, which never stop their writer.

A thread reads what a process prints and copies it. If a copy could raise an error or block, nobody
would read the process's pipe any more, and the process would wait in `print` for ever. So a copy
takes lines into a bounded backlog (`LineBacklog`, without threads or files), and a thread of its
own writes them (`OutputCopy`). Lines that cannot be written are counted and reported.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import dataclasses
import enum
import io
import os
import pathlib
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from absl import logging

#: Memory that the lines of one copy may take while they wait to be written.
MOST_BACKLOG_BYTES = 1 << 20
#: A line waits so long for space in a full backlog.
PATIENCE_SECONDS = 10.0
#: Bytes that are written together. A slow reader shows after so few that it reads.
_CHUNK_BYTES = 4096
#: Memory that an entry of a backlog takes beside its bytes.
_ENTRY_BYTES = 128
#: A terminal that another program has made non-blocking is looked at so often.
_LOOK_MILLISECONDS = 500


@dataclasses.dataclass
class Loss:
    """Lines that were not written."""

    lines: int = 0
    num_bytes: int = 0

    def add(self, other: Loss) -> None:
        """Count the lines of another loss too."""
        self.lines += other.lines
        self.num_bytes += other.num_bytes

    def __str__(self) -> str:
        noun = "line" if self.lines == 1 else "lines"
        return f"{self.lines:,} {noun} ({self.num_bytes:,} bytes)"


class BacklogState(enum.Enum):
    """What a backlog knows of the place that its lines are written to."""

    WRITING = "the last write succeeded, or there was none yet"
    FAILING = "the last write raised an error"
    STALLED = "a line has waited for space in vain; lines are lost until half of it is free"
    CLOSING = "no more lines are taken; those in the backlog are still written"
    CLOSED = "nothing is written any more"


class Offered(enum.Enum):
    """What a backlog did with a line that it was offered."""

    TAKEN = "it waits to be written"
    FULL = "there is no space; offer it again after each write, or when the patience is over"
    LOST = "it was dropped and counted"


@dataclasses.dataclass
class _WaitingLines:
    data: bytes
    source: str  # empty: of no line, such as a drawn line of progress, whose loss is not counted
    gap: Loss | None = None  # of an entry that shows the reader how much is missing before it

    @property
    def cost(self) -> int:
        """Memory that it takes in the backlog."""
        return len(self.data) + _ENTRY_BYTES


class LineBacklog:
    """Lines that wait to be written, and a count of those that could not be.

    The object holds no lock, thread, clock or file. Its user takes bytes with `take`, writes them,
    and reports the end of the write with `wrote` or `failed`.

    A write that fails loses the whole backlog: a place that takes minutes to report each error
    could otherwise stop the writers of the backlog. The next lines are tried again, so a disk that
    has space again gets new lines, after a line with the number of those that are missing.

    Attributes:
        state: What is known of the place.
        reason: Why lines were lost last; empty if none were.
        losses: Source of lines -> how many of them were lost.

    Args:
        patience_seconds: How long a line waits for space.
        most_bytes: Memory of the lines that wait to be written.
    """

    def __init__(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        most_bytes: int = MOST_BACKLOG_BYTES,
    ) -> None:
        self.state = BacklogState.WRITING
        self.reason = ""
        self.losses: dict[str, Loss] = {}
        self._patience_seconds, self._most_bytes = patience_seconds, most_bytes
        self._entries: collections.deque[_WaitingLines] = collections.deque()
        self._cost = 0
        self._offset = 0  # bytes of the first entry that were written
        self._progress_at = 0.0  # when bytes were last written, or could first have been
        self._gap = Loss()  # lost after the last entry, and not shown to the reader yet
        self._ends_line = True  # whether the last byte that was written ended a line

    @property
    def is_empty(self) -> bool:
        """Whether everything was written or lost."""
        return not self._entries

    @property
    def patience_ends_at(self) -> float:
        """When a place that writes nothing until then is given up at the end."""
        return self._progress_at + self._patience_seconds

    def offer(self, data: bytes, source: str, since: float, now: float) -> Offered:
        """Take bytes that end a line, or drop them where nothing can be expected of the place.

        Args:
            data: The bytes.
            source: Whose line it is, for the count; empty: its loss is not counted.
            since: When they were first offered, in seconds of a clock that only goes forward.
            now: The time of that clock.
        """
        if self.state in (BacklogState.CLOSING, BacklogState.CLOSED):
            self.reason = self.reason or "it was closed before"
            self._lose(data, source)
            return Offered.LOST
        entry = _WaitingLines(data, source)
        if self._entries and self._cost + entry.cost > self._most_bytes:
            if self.state is BacklogState.WRITING:
                if now < since + self._patience_seconds:
                    return Offered.FULL
                self.state = BacklogState.STALLED
            if self.state is BacklogState.STALLED:
                self.reason = f"a line waited for its reader for {self._patience_seconds:g} s"
            self._lose(data, source)
            return Offered.LOST
        if not self._entries:
            self._progress_at = now
        if self._gap.lines:
            self._append(self._gap_entry())
            self._gap = Loss()
        self._append(entry)
        return Offered.TAKEN

    def take(self) -> bytes:
        """Return the next bytes to write, none if it is empty. They stay in the backlog."""
        found = bytearray()
        for entry in self._entries:
            found += entry.data if found else entry.data[self._offset :]
            if len(found) >= _CHUNK_BYTES:
                break
        end = found.rfind(b"\n", 0, _CHUNK_BYTES) + 1  # others may write there between two writes
        return bytes(found[: end or _CHUNK_BYTES])

    def wrote(self, count: int, now: float) -> None:
        """Remove bytes that were written; 0: the place took none, and raised no error."""
        if self.state is BacklogState.CLOSED or not count:
            return
        self._progress_at = now
        self._offset += count
        while self._entries and self._offset >= len(self._entries[0].data):
            entry = self._entries.popleft()
            self._offset -= len(entry.data)
            self._cost -= entry.cost
            self._ends_line = entry.data.endswith(b"\n")
        if self._offset:
            self._ends_line = False
        # A reader that reads a few bytes at a time must not let each line wait for the patience.
        has_space = self._cost <= self._most_bytes // 2
        if self.state is BacklogState.FAILING or (self.state is BacklogState.STALLED and has_space):
            self.state = BacklogState.WRITING

    def failed(self, reason: str) -> None:
        """Lose the backlog: the last write raised an error."""
        if self.state is BacklogState.CLOSED:
            return
        if self.state is not BacklogState.CLOSING:
            self.state = BacklogState.FAILING
        self._lose_all(reason)

    def close(self) -> None:
        """Take no more lines. The rest is still to be written, as long as that makes progress."""
        if self.state is not BacklogState.CLOSED:
            self.state = BacklogState.CLOSING

    def give_up(self) -> None:
        """Lose what was not written until now, even if a write of it has not returned."""
        if self._entries:
            self._lose_all(f"nothing was read for {self._patience_seconds:g} s at the end")
        self.state = BacklogState.CLOSED

    def _append(self, entry: _WaitingLines) -> None:
        cost = entry.cost
        self._entries.append(entry)
        self._cost += cost

    def _gap_entry(self) -> _WaitingLines:
        before = self._entries[-1].data.endswith(b"\n") if self._entries else self._ends_line
        verb = "is" if self._gap.lines == 1 else "are"
        text = f"[thinwire: {self._gap} {verb} missing here: {self.reason}]\n"
        return _WaitingLines((b"" if before else b"\n") + text.encode(), "", self._gap)

    def _lose_all(self, reason: str) -> None:
        self.reason = reason
        for entry in self._entries:
            if entry.gap is not None:  # counted before, and not shown to the reader
                self._gap.add(entry.gap)
            self._lose(entry.data[self._offset :], entry.source)
            self._offset = 0
        self._entries.clear()
        self._cost = 0

    def _lose(self, data: bytes, source: str) -> None:
        if source:
            loss = Loss(data.count(b"\n"), len(data))
            self._gap.add(loss)
            self.losses.setdefault(source, Loss()).add(loss)


class Sink(Protocol):
    """A place that bytes are written to."""

    encoding: str

    def write(self, data: bytes) -> int:
        """Write some of the bytes, now or after any time; return how many. Errors are raised."""


class DescriptorSink:
    """Writes to a file descriptor of this process.

    Python's own buffer is left out: a buffer that cannot be flushed keeps its bytes, and the
    interpreter would write them at its end, wait for their reader, or exit with code 120.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self.encoding = descriptor, encoding

    def write(self, data: bytes) -> int:
        """Write some of the bytes."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # a program that shares the terminal has made it non-blocking
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(_LOOK_MILLISECONDS)
            return 0


class StreamSink:
    """Writes to a text stream that is no file, such as a notebook's."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> int:
        """Write the bytes as text."""
        self._stream.write(self._decoder.decode(data))
        self._stream.flush()
        return len(data)


class ClosedSink:
    """Stands for a stream that the process was started without (``>&-`` in a shell)."""

    encoding = "utf-8"

    def write(self, data: bytes) -> int:
        """Raise an error."""
        raise OSError("the process was started without it")


def sink_of(stream: TextIO | None) -> Sink:
    """Return what writes to a stream, by its file descriptor where it has one.

    The `fileno` of a notebook's stream is its server's terminal, where no cell shows it. So only
    Python's own kind of text file is trusted to have a descriptor that leads to the same place.
    """
    if stream is None:
        return ClosedSink()
    if isinstance(stream, io.TextIOWrapper):
        try:
            sink = DescriptorSink(stream.fileno(), stream.encoding)
        except (OSError, ValueError):  # it is closed, or in memory
            return StreamSink(stream)
        with contextlib.suppress(OSError):
            stream.flush()  # what was printed before comes first
        return sink
    return StreamSink(stream)


class OutputCopy:
    """Copies lines to a sink. No call raises an error or waits for longer than a patience.

    A sink that is slower than the lines that come slows their writers down, as a pipe does. One
    that is so slow that a line waits for `PATIENCE_SECONDS` loses lines.

    Args:
        name: Of the sink, such as stdout or a path, for reports.
        sink: Where the lines go.
        patience_seconds: How long a line waits for space.
        most_bytes: Memory of the lines that wait.
        on_first_loss: Called once, with a sentence, in a thread that has a line copied.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        patience_seconds: float = PATIENCE_SECONDS,
        most_bytes: int = MOST_BACKLOG_BYTES,
        on_first_loss: Callable[[str], None] = logging.warning,
    ) -> None:
        self.name, self._sink, self._on_first_loss = name, sink, on_first_loss
        self._patience_seconds = patience_seconds
        self._backlog = LineBacklog(patience_seconds, most_bytes)
        # Reentrant: a handler of signals logs lines while the main thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._writer: threading.Thread | None = None
        self._was_noticed = False
        self._is_abandoned = False

    @property
    def is_stalled(self) -> bool:
        """Whether the sink takes nothing, so that any other write to it would wait, too."""
        return self._is_abandoned or self._backlog.state is BacklogState.STALLED

    def put(self, output: str | bytes, source: str) -> None:
        """Copy a line with its end, or several.

        Args:
            output: The text, or bytes in the sink's encoding.
            source: Whose lines they are, for the count; empty: their loss is not counted.
        """
        if isinstance(output, str):
            output = output.encode(self._sink.encoding, "backslashreplace")
        if not output:
            return
        with self._changed:
            self._offer(output, source)
            is_new = bool(self._backlog.losses) and not self._was_noticed
            notice = is_new and self._backlog.state not in (
                BacklogState.CLOSING,
                BacklogState.CLOSED,
            )
            self._was_noticed |= notice
        if notice:  # outside the lock, and once: the log may be copied here
            self._on_first_loss(
                f"{self.name} cannot be written: {self._backlog.reason}. The run continues; lines "
                "that are missing there are counted, and reported at the end."
            )

    def close(self) -> None:
        """Write what is in the backlog, as long as the sink takes bytes; later lines are lost."""
        with self._changed:
            self._backlog.close()
            self._changed.notify_all()
            while not self._backlog.is_empty:
                left = self._backlog.patience_ends_at - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._is_abandoned |= not self._backlog.is_empty
            self._backlog.give_up()
            self._changed.notify_all()

    def report(self) -> str:
        """Return how much was lost, of whom and why; empty if nothing was."""
        with self._changed:
            total = Loss()
            for loss in self._backlog.losses.values():
                total.add(loss)
            if not total.num_bytes:
                return ""
            losses = sorted(self._backlog.losses.items())
            parts = ", ".join(f"{loss} of {source}" for source, loss in losses)
            return f"{self.name}: {total} not written ({self._backlog.reason}): {parts}"

    def _offer(self, data: bytes, source: str) -> None:
        """Put bytes into the backlog; wait while it is full and the sink takes bytes."""
        since = now = time.monotonic()
        while (answer := self._backlog.offer(data, source, since, now)) is Offered.FULL:
            self._changed.wait(max(0.0, since + self._patience_seconds - now))
            now = time.monotonic()
        if answer is Offered.TAKEN and self._writer is None:
            self._writer = threading.Thread(target=self._write, name="output-copy", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Write what comes into the backlog, until it is closed."""
        while True:
            with self._changed:
                while self._backlog.is_empty and self._backlog.state is not BacklogState.CLOSED:
                    self._changed.wait()
                if self._backlog.state is BacklogState.CLOSED:
                    return
                data = self._backlog.take()
            count, reason = 0, ""
            try:
                count = self._sink.write(data)
            except Exception as error:  # noqa: BLE001 - a notebook's stream may raise anything
                reason = describe(error)
            with self._changed:
                if reason:
                    self._backlog.failed(reason)
                else:
                    self._backlog.wrote(count, time.monotonic())
                self._changed.notify_all()


class OutputFile(OutputCopy):
    """Copies lines to a file.

    Args:
        path: Of the file.
        append: Whether what it holds is kept.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: pathlib.Path, append: bool = False) -> None:
        manner = os.O_APPEND if append else os.O_TRUNC
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | manner, 0o666)
        super().__init__(str(path), DescriptorSink(self._descriptor))

    def close(self) -> None:
        """Write what is in the backlog, and close the file unless a write of it does not return."""
        super().close()
        if not self._is_abandoned and self._descriptor >= 0:  # no write is under way
            os.close(self._descriptor)
            self._descriptor = -1


def describe(error: Exception) -> str:
    """Return an error's cause in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def same_place(one: Any, other: Any) -> bool:
    """Return whether two streams lead to the same terminal, pipe or file."""
    if one is other:
        return True
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or in memory
        return False

"""Copies of a process's output to a terminal, a pipe or a file; a copy never stops its writer.

A thread reads the output of a process and copies it. If the copy raised an error or blocked, the
thread would stop reading the process's pipe, and the process would wait in `print` forever. So a
copy puts lines into a bounded backlog (`LineBacklog`, without threads or files), and a separate
thread writes the lines (`OutputCopy`). Lines that cannot be written are counted and reported.
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

#: Upper bound of the memory that the waiting lines of one copy take, in bytes.
MOST_BACKLOG_BYTES = 1 << 20
#: Time that a line waits for space in a full backlog before it is lost, in seconds.
PATIENCE_SECONDS = 10.0
#: Bytes of one write. With small writes even a slow reader shows progress.
_CHUNK_BYTES = 4096
#: Memory that an entry of a backlog takes in addition to its data, in bytes.
_ENTRY_BYTES = 128
#: Time limit of one wait for a terminal that another program has made non-blocking.
_LOOK_MILLISECONDS = 500


@dataclasses.dataclass
class Loss:
    """Lines that were not written."""

    lines: int = 0
    num_bytes: int = 0

    def add(self, other: Loss) -> None:
        """Add the lines and bytes of another loss to this loss."""
        self.lines += other.lines
        self.num_bytes += other.num_bytes

    def __str__(self) -> str:
        noun = "line" if self.lines == 1 else "lines"
        return f"{self.lines:,} {noun} ({self.num_bytes:,} bytes)"


class BacklogState(enum.Enum):
    """State of a backlog, which follows from the results of its writes."""

    WRITING = "the last write succeeded, or there was no write yet"
    FAILING = "the last write raised an error"
    STALLED = "a line has waited for space in vain; lines are lost until half the space is free"
    CLOSING = "the backlog takes no more lines; its waiting lines are still written"
    CLOSED = "nothing is written any more"


class Offered(enum.Enum):
    """Result of offering a line to a backlog."""

    TAKEN = "the line waits to be written"
    FULL = "there is no space; offer the line again after each write or when the patience is over"
    LOST = "the line was dropped and counted"


@dataclasses.dataclass
class _WaitingLines:
    data: bytes
    source: str  # empty: the loss is not counted (a redrawn progress line, for example)
    gap: Loss | None = None  # set if this entry shows the reader how much is missing before it

    @property
    def cost(self) -> int:
        """Memory that the entry takes in the backlog, in bytes."""
        return len(self.data) + _ENTRY_BYTES


class LineBacklog:
    """Lines that wait to be written, and a count of the lines that were lost.

    The object holds no lock, thread, clock or file. Its user takes bytes with `take`, writes them,
    and reports the end of the write with `wrote` or `failed`.

    A write that fails loses the whole backlog: a sink that takes minutes to report each error could
    otherwise stop the writers of the backlog. Later lines are written normally. So a disk that has
    space again gets new lines, after a line with the number of missing lines.

    Attributes:
        state: State of the backlog after the last write.
        reason: Reason of the last loss; empty if no line was lost.
        losses: Source of lines -> loss of that source.

    Args:
        patience_seconds: Time that a line waits for space, in seconds.
        most_bytes: Upper bound of the memory of the waiting lines, in bytes.
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
        self._progress_at = 0.0  # moment of the last write, or when the backlog stopped being empty
        self._gap = Loss()  # lines lost after the last entry and not yet shown to the reader
        self._ends_line = True  # True if the last written byte ended a line

    @property
    def is_empty(self) -> bool:
        """True if every line was written or lost."""
        return not self._entries

    @property
    def patience_ends_at(self) -> float:
        """Moment at which a closing copy gives up a sink that has written nothing."""
        return self._progress_at + self._patience_seconds

    def offer(self, data: bytes, source: str, since: float, now: float) -> Offered:
        """Take bytes that end a line, or drop them if the sink is stalled or closed.

        Args:
            data: Bytes of one or more lines.
            source: Source of the lines, under which a loss is counted. Empty: it is not counted.
            since: Moment at which the bytes were first offered, in seconds of a monotonic clock.
            now: Present time of the same clock, in seconds.
        """
        if self.state in (BacklogState.CLOSING, BacklogState.CLOSED):
            self.reason = self.reason or "the copy was closed before"
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
        """Return the next bytes to write, without removing them; empty if no line waits."""
        chunk = bytearray()
        for entry in self._entries:
            chunk += entry.data if chunk else entry.data[self._offset :]
            if len(chunk) >= _CHUNK_BYTES:
                break
        # End at a line's end: another process may write to the terminal between two writes.
        end = chunk.rfind(b"\n", 0, _CHUNK_BYTES) + 1
        return bytes(chunk[: end or _CHUNK_BYTES])

    def wrote(self, count: int, now: float) -> None:
        """Remove ``count`` written bytes; 0 means that the sink took no bytes without an error."""
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
        # Wait for half of the space, not for one byte: with a reader that reads a few bytes at a
        # time, every new line would otherwise wait for the whole patience again.
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
        """Take no more lines; the waiting lines are still written while the sink takes bytes."""
        if self.state is not BacklogState.CLOSED:
            self.state = BacklogState.CLOSING

    def give_up(self) -> None:
        """Drop the bytes not written so far, even if a write of some has not returned."""
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
            if entry.gap is not None:  # already counted, but never shown to the reader
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
    """Destination of bytes: a file descriptor or a text stream."""

    encoding: str

    def write(self, data: bytes) -> int:
        """Write some of the bytes and return their number; may block or raise an error."""


class DescriptorSink:
    """Sink that writes to a file descriptor of this process.

    The sink bypasses Python's own buffer: a buffer that cannot be flushed keeps its bytes, and the
    interpreter would write them at its end, wait for their reader, or exit with code 120.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self.encoding = descriptor, encoding

    def write(self, data: bytes) -> int:
        """Write some of the bytes."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program has made the shared terminal non-blocking
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(_LOOK_MILLISECONDS)
            return 0


class StreamSink:
    """Sink that writes to a text stream without a file, for example a notebook's output."""

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
    """Sink for a stream that the process was started without (``>&-`` in a shell)."""

    encoding = "utf-8"

    def write(self, data: bytes) -> int:
        """Raise an error."""
        raise OSError("the process was started without this stream")


def sink_of(stream: TextIO | None) -> Sink:
    """Return a sink for a stream, by the stream's file descriptor if the stream has one.

    The `fileno` of a notebook's stream leads to the terminal of the notebook's server, which no
    cell shows. So the descriptor is used only if the stream is Python's own kind of text file.
    """
    if stream is None:
        return ClosedSink()
    if isinstance(stream, io.TextIOWrapper):
        try:
            sink = DescriptorSink(stream.fileno(), stream.encoding)
        except (OSError, ValueError):  # the stream is closed, or in memory
            return StreamSink(stream)
        with contextlib.suppress(OSError):
            stream.flush()  # text printed earlier must come first
        return sink
    return StreamSink(stream)


class OutputCopy:
    """Copy of lines to a sink. No call raises an error or waits longer than the patience.

    A sink that is slower than its writers slows the writers down, as a pipe does. A sink that is so
    slow that a line waits for `PATIENCE_SECONDS` loses lines.

    Args:
        name: Name of the sink in reports, for example stdout or a path.
        sink: Destination of the lines.
        patience_seconds: Time that a line waits for space, in seconds.
        most_bytes: Upper bound of the memory of the waiting lines, in bytes.
        on_first_loss: Called once with a sentence for people, in a thread that calls `put`.
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
        # Reentrant: a signal handler may log a line while the main thread holds this lock.
        self._changed = threading.Condition(threading.RLock())
        self._writer: threading.Thread | None = None
        self._was_noticed = False
        self._is_abandoned = False

    @property
    def is_stalled(self) -> bool:
        """True if the sink takes no bytes, so that any other write to the sink would block, too."""
        return self._is_abandoned or self._backlog.state is BacklogState.STALLED

    def put(self, output: str | bytes, source: str) -> None:
        """Copy one or more lines with their line ends.

        Args:
            output: Text, or bytes in the sink's encoding.
            source: Source of the lines, under which a loss is counted. Empty: it is not counted.
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
        # Outside the lock and only once: the callback may log, and this copy may copy the log.
        if notice:
            self._on_first_loss(
                f"{self.name} cannot be written: {self._backlog.reason}. The run continues; lines "
                "that could not be written are counted, and reported at the end."
            )

    def close(self) -> None:
        """Write the waiting lines while the sink takes bytes; drop lines that come later."""
        with self._changed:
            self._backlog.close()
            self._changed.notify_all()
            while not self._backlog.is_empty:
                remaining_seconds = self._backlog.patience_ends_at - time.monotonic()
                if remaining_seconds <= 0:
                    break
                self._changed.wait(remaining_seconds)
            self._is_abandoned |= not self._backlog.is_empty
            self._backlog.give_up()
            self._changed.notify_all()

    def report(self) -> str:
        """Return a sentence with the losses by source and their reason; empty if none occurred."""
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
        """Put bytes into the backlog; wait while the backlog is full, at most the patience."""
        since = now = time.monotonic()
        while (answer := self._backlog.offer(data, source, since, now)) is Offered.FULL:
            self._changed.wait(max(0.0, since + self._patience_seconds - now))
            now = time.monotonic()
        if answer is Offered.TAKEN and self._writer is None:
            self._writer = threading.Thread(target=self._write, name="output-copy", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Write the lines of the backlog until the backlog is closed."""
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
    """Copy of lines to a file.

    Args:
        path: Path of the file.
        append: True to append to the file, False to empty it first.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: pathlib.Path, append: bool = False) -> None:
        manner = os.O_APPEND if append else os.O_TRUNC
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | manner, 0o666)
        super().__init__(str(path), DescriptorSink(self._descriptor))

    def close(self) -> None:
        """Write the waiting lines, and close the file unless a write to it is blocked."""
        super().close()
        # While a write is blocked, the descriptor's number must not be reused for another file.
        if not self._is_abandoned and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe(error: Exception) -> str:
    """Return an error's cause in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def same_place(one: Any, other: Any) -> bool:
    """Return True if two streams lead to the same terminal, pipe or file."""
    if one is other:
        return True
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (AttributeError, OSError, ValueError):  # a stream is None, closed, or in memory
        return False

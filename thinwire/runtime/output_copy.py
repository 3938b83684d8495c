"""Copies of a process's output to a terminal, a pipe or a file; a copy never stops its writer.

A thread reads the output of a process and copies it. If the copy raised an error or blocked, the
thread would stop reading the process's pipe, and the process would wait in `print` forever. So a
copy puts lines into a bounded backlog (`LineBacklog`, without threads or files), and a second
thread writes the backlog (`OutputCopy`). Lines that cannot be written are counted and reported.
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

#: Upper bound of the memory for one copy's lines that wait to be written, in bytes.
MOST_BACKLOG_BYTES = 1 << 20
#: Time that a line waits for space in a full backlog before it is lost, in seconds.
PATIENCE_SECONDS = 10.0
#: Largest number of bytes in one write. Small writes show that a slow reader still reads.
_CHUNK_BYTES = 4096
#: Memory that one entry of a backlog takes in addition to the text of its lines, in bytes.
_ENTRY_BYTES = 128
#: Time limit of one wait until a non-blocking terminal takes bytes, in milliseconds.
_LOOK_MILLISECONDS = 500


@dataclasses.dataclass
class Loss:
    """Count of the output lines that a copy dropped instead of writing them."""

    lines: int = 0
    num_bytes: int = 0

    def add(self, other: Loss) -> None:
        """Add the lost lines and bytes that `other` counts to this count."""
        self.lines += other.lines
        self.num_bytes += other.num_bytes

    def __str__(self) -> str:
        noun = "line" if self.lines == 1 else "lines"
        return f"{self.lines:,} {noun} ({self.num_bytes:,} bytes)"


class BacklogState(enum.Enum):
    """State of a backlog of output lines, which follows from the results of its writes."""

    WRITING = "the last write succeeded, or there was no write yet"
    FAILING = "the last write raised an error"
    STALLED = "a line has waited for space in vain; new lines are lost until half the space is free"
    CLOSING = "the backlog takes no more lines; its waiting lines are still written"
    CLOSED = "the backlog's lines are written or dropped, and nothing more is written"


class Offered(enum.Enum):
    """Result of offering a line of output to a backlog."""

    TAKEN = "the line waits to be written"
    FULL = "there is no space; offer the line again after each write or when the patience is over"
    LOST = "the line was dropped and counted"


@dataclasses.dataclass
class _WaitingLines:
    data: bytes
    source: str  # source of the lines for the count of losses; empty: losses do not count
    gap: Loss | None = None  # lines missing before this entry, which shows their number; or None

    @property
    def cost(self) -> int:
        """Memory that this entry of waiting lines takes in the backlog, in bytes."""
        return len(self.data) + _ENTRY_BYTES


class LineBacklog:
    """Backlog: output lines that wait to be written, and a count of the lines that were lost.

    A backlog holds no lock, thread, clock or file. Its user takes bytes with `take`, writes the
    bytes, and reports the end of the write with `wrote` or `failed`.

    A write that fails drops the whole backlog. Otherwise a sink that takes minutes to report each
    error could stop the threads that offer lines. Lines offered after the failure are written
    normally. So a disk that has space again gets a line with the number of missing lines, then the
    new lines.

    Attributes:
        state: State of the backlog after its last write.
        reason: Reason why lines were last lost; empty if no line was lost.
        losses: Source of lines (a node's name, for example) -> count of its lost lines.

    Args:
        patience_seconds: Time that a line waits for space in the backlog before it is lost, in
            seconds.
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
        self._offset = 0  # bytes of the first waiting entry that are already written
        self._progress_at = 0.0  # moment of the last write, or of the first line after emptiness
        self._gap = Loss()  # lines lost after the last entry and not yet reported to the reader
        self._ends_line = True  # True if the last byte written to the sink ended a line

    @property
    def is_empty(self) -> bool:
        """True if no line waits: every line offered to the backlog was written or lost."""
        return not self._entries

    @property
    def patience_ends_at(self) -> float:
        """Moment, in clock seconds, at which a closing copy gives up a sink that takes no bytes."""
        return self._progress_at + self._patience_seconds

    def offer(self, data: bytes, source: str, since: float, now: float) -> Offered:
        """Append bytes that end a line, or drop the bytes if the backlog is stalled or closed.

        Args:
            data: Bytes of one or more lines.
            source: Source of the lines, under which their loss is counted. Empty: do not count.
            since: Moment at which the bytes were first offered, in seconds of a monotonic clock.
            now: Present time of the monotonic clock, in seconds.
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
        """Return the next bytes to write, which stay in the backlog; empty if no line waits."""
        chunk = bytearray()
        for entry in self._entries:
            chunk += entry.data if chunk else entry.data[self._offset :]
            if len(chunk) >= _CHUNK_BYTES:
                break
        # Cut the bytes at the end of a line: another process may write to the terminal between two
        # writes.
        end = chunk.rfind(b"\n", 0, _CHUNK_BYTES) + 1
        return bytes(chunk[: end or _CHUNK_BYTES])

    def wrote(self, count: int, now: float) -> None:
        """Remove ``count`` written bytes; 0 means that the sink took none and raised no error."""
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
        # End the stall when half of the space is free, not when one byte is free: with a reader
        # that reads a few bytes at a time, every new line would wait for the whole patience.
        has_space = self._cost <= self._most_bytes // 2
        if self.state is BacklogState.FAILING or (self.state is BacklogState.STALLED and has_space):
            self.state = BacklogState.WRITING

    def failed(self, reason: str) -> None:
        """Drop all waiting lines, because the last write raised an error."""
        if self.state is BacklogState.CLOSED:
            return
        if self.state is not BacklogState.CLOSING:
            self.state = BacklogState.FAILING
        self._lose_all(reason)

    def close(self) -> None:
        """Reject new lines; the waiting lines are still written while the sink takes bytes."""
        if self.state is not BacklogState.CLOSED:
            self.state = BacklogState.CLOSING

    def give_up(self) -> None:
        """Drop all bytes not written so far, even while a write of some of these bytes blocks."""
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
            if entry.gap is not None:  # its losses are counted, but no line has reported them
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
    """Destination of a copy's bytes: a file descriptor or a text stream."""

    encoding: str

    def write(self, data: bytes) -> int:
        """Write some of the bytes; return how many were written. May block or raise an error."""


class DescriptorSink:
    """Sink (destination of copied output) that writes to a file descriptor of this process.

    The sink bypasses Python's own buffer. A buffer that cannot be flushed keeps its bytes. At its
    end the interpreter would write these bytes, and block or exit with code 120.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self.encoding = descriptor, encoding

    def write(self, data: bytes) -> int:
        """Write some of the bytes to the descriptor and return their number."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program has made the shared terminal non-blocking
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(_LOOK_MILLISECONDS)
            return 0


class StreamSink:
    """Sink for copied output in a text stream without a file, for example a notebook's output."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> int:
        """Write the bytes to the stream as text and return their number."""
        self._stream.write(self._decoder.decode(data))
        self._stream.flush()
        return len(data)


class ClosedSink:
    """Sink for copied output of a process that was started without this stream (``>&-``)."""

    encoding = "utf-8"

    def write(self, data: bytes) -> int:
        """Raise OSError, because the process has no such stream."""
        raise OSError("the process was started without this stream")


def sink_of(stream: TextIO | None) -> Sink:
    """Return a sink that writes to a text stream, through the stream's file descriptor if it can.

    The `fileno` of a notebook's stream leads to the terminal of the notebook's server, and no cell
    shows that terminal. So the sink uses the descriptor only of Python's own text files.
    """
    if stream is None:
        return ClosedSink()
    if isinstance(stream, io.TextIOWrapper):
        try:
            sink = DescriptorSink(stream.fileno(), stream.encoding)
        except (OSError, ValueError):  # the stream is closed, or in memory
            return StreamSink(stream)
        with contextlib.suppress(OSError):
            stream.flush()  # text printed before must precede the text of the sink
        return sink
    return StreamSink(stream)


class OutputCopy:
    """Copy of output lines to a sink. No method raises an error or waits longer than the patience.

    A sink that is slower than its writers slows the writers down, as a pipe does. If a line has
    waited for the patience, the copy drops lines.

    Args:
        name: Name of the sink in messages, for example stdout or a path.
        sink: Destination of the lines.
        patience_seconds: Time that a line waits for space in the backlog, in seconds.
        most_bytes: Upper bound of the memory of the waiting lines, in bytes.
        on_first_loss: Called once, in a thread that calls `put`, with a sentence that reports the
            first lost lines.
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
        """True if the sink takes no bytes now, so that any write to its stream would block."""
        return self._is_abandoned or self._backlog.state is BacklogState.STALLED

    def put(self, output: str | bytes, source: str) -> None:
        """Copy one or more lines, with their line ends, to the sink.

        Args:
            output: Lines to copy, as text or as bytes in the sink's encoding.
            source: Source of the lines, under which their loss is counted. Empty: do not count.
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
        # Call back without the lock and only once: the callback may log, and this copy may be the
        # copy of the log, so that the call would end in this method.
        if notice:
            self._on_first_loss(
                f"{self.name} cannot be written: {self._backlog.reason}. The run continues; lines "
                "that could not be written are counted, and reported at the end."
            )

    def close(self) -> None:
        """Write the waiting lines while the sink takes bytes; drop lines that are put later."""
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
        """Return a sentence with the lost lines by source and the reason; empty without losses."""
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
    """Copy of output lines to a file.

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
        """Write the waiting lines and close the file; while a write is blocked, leave it open."""
        super().close()
        # While a write is blocked, the descriptor stays open: another file could get its number,
        # and the blocked write would then go into that file.
        if not self._is_abandoned and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe(error: Exception) -> str:
    """Return an error's cause in a few words, for messages."""
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

"""Copies output lines to a terminal, a pipe or a file without blocking the writing process.

One thread reads the output lines of a process. If the copying raised an error or blocked, the
thread would stop reading the process's pipe, and the process would wait in `print` forever. The
thread that reads output lines only puts them into a bounded backlog (`LineBacklog`, without threads
or files), which a second thread writes (`OutputCopy`). Output lines that cannot be written are
counted and reported.
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

#: Upper bound of the memory for the output lines of one `OutputCopy` that wait to be written, in
#: bytes.
MOST_BACKLOG_BYTES = 1 << 20
#: Longest time that a new output line waits for space in a full backlog before it is lost, in
#: seconds.
PATIENCE_SECONDS = 10.0
#: Largest number of bytes in one write of output. Small writes show that a slow reader still reads.
_CHUNK_BYTES = 4096
#: Memory of one entry of a `LineBacklog` in addition to the text of its lines, in bytes.
_ENTRY_BYTES = 128
#: Time limit of one wait until a non-blocking terminal takes bytes, in milliseconds.
_LOOK_MILLISECONDS = 500


@dataclasses.dataclass
class Loss:
    """Number of output lines, and of their bytes, that an `OutputCopy` dropped."""

    lines: int = 0
    num_bytes: int = 0

    def add(self, other: Loss) -> None:
        """Add the numbers of lost lines and bytes of another `Loss` to this `Loss`."""
        self.lines += other.lines
        self.num_bytes += other.num_bytes

    def __str__(self) -> str:
        noun = "line" if self.lines == 1 else "lines"
        return f"{self.lines:,} {noun} ({self.num_bytes:,} bytes)"


class BacklogState(enum.Enum):
    """State of a `LineBacklog` (output lines that wait to be written) after the last write."""

    WRITING = "the last write succeeded, or there was no write yet"
    FAILING = "the last write raised an error"
    STALLED = "a line has waited for space in vain; new lines are lost until half the space is free"
    CLOSING = "the backlog takes no more lines; its waiting lines are still written"
    CLOSED = "the backlog's lines are written or dropped, and nothing more is written"


class Offered(enum.Enum):
    """Result of offering an output line to a `LineBacklog`."""

    TAKEN = "the line waits to be written"
    FULL = "there is no space; offer the line again after each write or when the patience is over"
    LOST = "the line was dropped and counted"


@dataclasses.dataclass
class _WaitingLines:
    data: bytes
    source: str  # source of the lines, to count lost lines; empty: do not count
    gap: Loss | None = None  # lost lines whose number this entry reports; None: none

    @property
    def cost(self) -> int:
        """Memory that an entry of waiting output lines takes in the backlog, in bytes."""
        return len(self.data) + _ENTRY_BYTES


class LineBacklog:
    """Backlog: output lines that wait to be written, and a count of the lines that were lost.

    A `LineBacklog` holds no lock, thread, clock or file. The user of a backlog takes bytes with
    `take`, writes the bytes, and reports the end of the write with `wrote` or `failed`.

    A write that fails drops the whole backlog of output lines. If a failed write kept the backlog,
    a sink that takes minutes to report each error could stop the threads that offer lines. Output
    lines that are offered after a failed write are written normally. For example, a disk that has
    space again gets a line with the number of lost lines, then the new lines.

    Attributes:
        state: State of the backlog of output lines after the last write.
        reason: Reason for the last loss of output lines; empty if no line was lost.
        losses: Source of lines (a node's name, for example) -> number of the source's lost lines.

    Args:
        patience_seconds: Longest time that a new line waits for space in a full backlog before it
            is lost, in seconds.
        most_bytes: Upper bound of the memory of the lines that wait to be written, in bytes.
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
        self._offset = 0  # number of bytes of the first waiting entry that are written
        # Clock time of the last write, or of the first line that was offered to an empty backlog.
        self._progress_at = 0.0
        self._gap = Loss()  # lines lost after the last entry and not yet reported to the reader
        self._ends_line = True  # True if the last byte written to the sink ended a line

    @property
    def is_empty(self) -> bool:
        """True if no output line waits in the backlog, because every line was written or lost."""
        return not self._entries

    @property
    def patience_ends_at(self) -> float:
        """Clock time in seconds at which a closing copy gives up a sink that accepts no bytes."""
        return self._progress_at + self._patience_seconds

    def offer(self, data: bytes, source: str, since: float, now: float) -> Offered:
        """Append whole output lines to the backlog, or drop them if it is stalled or closed.

        Args:
            data: Bytes of one or more output lines, with line ends.
            source: Name of the source of the output lines, under which lost lines are counted.
                Empty: do not count lost lines.
            since: Moment of the first offer of the bytes, in seconds of a monotonic clock.
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
        """Return the next output bytes to write, without removing them; empty if no line waits."""
        chunk = bytearray()
        for entry in self._entries:
            chunk += entry.data if chunk else entry.data[self._offset :]
            if len(chunk) >= _CHUNK_BYTES:
                break
        # Cut the bytes at the end of a line, because another process may write to the terminal
        # between two writes.
        end = chunk.rfind(b"\n", 0, _CHUNK_BYTES) + 1
        return bytes(chunk[: end or _CHUNK_BYTES])

    def wrote(self, count: int, now: float) -> None:
        """Remove ``count`` written bytes from the backlog; 0 if the sink accepted no byte."""
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
        # End the stall when half of the backlog's space is free. If it ended when one byte is free,
        # every new line would wait for the whole `patience_seconds` for a reader of a few bytes at
        # a time.
        has_space = self._cost <= self._most_bytes // 2
        if self.state is BacklogState.FAILING or (self.state is BacklogState.STALLED and has_space):
            self.state = BacklogState.WRITING

    def failed(self, reason: str) -> None:
        """Drop all output lines that wait, because the last write raised an error."""
        if self.state is BacklogState.CLOSED:
            return
        if self.state is not BacklogState.CLOSING:
            self.state = BacklogState.FAILING
        self._lose_all(reason)

    def close(self) -> None:
        """Reject new output lines; waiting lines are still written while the sink accepts bytes."""
        if self.state is not BacklogState.CLOSED:
            self.state = BacklogState.CLOSING

    def give_up(self) -> None:
        """Drop all output bytes that are not written, even while a write of some bytes blocks."""
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
            # The number of lost lines that this entry would have reported is not yet reported.
            if entry.gap is not None:
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
    """Destination of copied output: a file descriptor or a text stream."""

    encoding: str

    def write(self, data: bytes) -> int:
        """Write some of the output bytes, which may block or raise; return their number."""


class DescriptorSink:
    """Sink (destination of copied output) that writes to a file descriptor of this process.

    A `DescriptorSink` bypasses Python's own buffer. A Python buffer that cannot be flushed would
    keep its bytes, and the interpreter would try to write them at its end, and block or exit with
    code 120.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self.encoding = descriptor, encoding

    def write(self, data: bytes) -> int:
        """Write some of the bytes to the descriptor and return their number."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program made the shared terminal non-blocking
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll(_LOOK_MILLISECONDS)
            return 0


class StreamSink:
    """Sink for copied output in a text stream without a file, for example a notebook's output.

    Args:
        stream: Text stream; None if the process was started with a closed stream (``>&-``).
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> int:
        """Write the bytes to the stream as text and return their number."""
        if self._stream is None:
            raise OSError("the process was started without this stream")
        self._stream.write(self._decoder.decode(data))
        self._stream.flush()
        return len(data)


def sink_of(stream: TextIO | None) -> Sink:
    """Return a sink that writes to a text stream, through the stream's file descriptor if it can.

    The `fileno` of a notebook's stream leads to the terminal of the notebook's server, which no
    cell shows, so the sink uses only descriptors of Python's own text files.
    """
    if isinstance(stream, io.TextIOWrapper):
        try:
            sink = DescriptorSink(stream.fileno(), stream.encoding)
        except (OSError, ValueError):  # the stream is closed, or in memory
            return StreamSink(stream)
        with contextlib.suppress(OSError):
            stream.flush()  # text that was printed before must precede the sink's text
        return sink
    return StreamSink(stream)


class OutputCopy:
    """Copies output lines to a sink (terminal, pipe or file) by a thread.

    No method of `OutputCopy` raises an error or waits longer than `patience_seconds`.

    A sink that is slower than its writers slows the writers down, as a pipe does. If a new line has
    waited for `patience_seconds`, the `OutputCopy` drops lines.

    Args:
        name: Name of the sink for messages, for example stdout or a path.
        sink: Destination of the output lines: a terminal, a pipe or a file.
        patience_seconds: Longest time that a new line waits for space in a full backlog before it
            is lost, in seconds.
        most_bytes: Upper bound of the memory of the lines that wait to be written, in bytes.
        on_first_loss: Function that is called once, in a thread that calls `put`, with a sentence
            that reports the first lost lines.
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
        """True if the sink accepts no bytes now, so that a write to its stream would block."""
        return self._is_abandoned or self._backlog.state is BacklogState.STALLED

    def put(self, output: str | bytes, source: str) -> None:
        """Copy one or more output lines, with their line ends, to the sink.

        Args:
            output: Lines to copy, as text or as bytes in the sink's encoding.
            source: Name of the source of the output lines, under which lost lines are counted.
                Empty: do not count lost lines.
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
        # Call `on_first_loss` without the lock and only once. The callback may log, and this
        # `OutputCopy` may write the log, so that the call would end in this method.
        if notice:
            self._on_first_loss(
                f"{self.name} cannot be written: {self._backlog.reason}. The run continues; lines "
                "that could not be written are counted, and reported at the end."
            )

    def close(self) -> None:
        """Write the waiting output lines while the sink accepts bytes; reject later `put` calls."""
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
        """Return a sentence on lost output lines by source; empty if no line was lost."""
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
        """Put output bytes into the backlog; wait up to `patience_seconds` while it is full."""
        since = now = time.monotonic()
        while (answer := self._backlog.offer(data, source, since, now)) is Offered.FULL:
            self._changed.wait(max(0.0, since + self._patience_seconds - now))
            now = time.monotonic()
        if answer is Offered.TAKEN and self._writer is None:
            self._writer = threading.Thread(target=self._write, name="output-copy", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Write the backlog's output lines to the sink until the backlog is closed."""
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
    """Copies output lines to a file.

    Args:
        path: Path of the file that receives the output lines.
        append: True to append lines to the file, False to empty the file first.

    Raises:
        OSError: The file that receives the output lines cannot be opened.
    """

    def __init__(self, path: pathlib.Path, append: bool = False) -> None:
        manner = os.O_APPEND if append else os.O_TRUNC
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | manner, 0o666)
        super().__init__(str(path), DescriptorSink(self._descriptor))

    def close(self) -> None:
        """Write the waiting output lines and close the file, unless a write to it is blocked."""
        super().close()
        # While a write is blocked, the descriptor stays open. If it were closed, another file could
        # get its number, and the blocked write would write into that file.
        if not self._is_abandoned and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe(error: Exception) -> str:
    """Return the cause of an OSError or another error in a few words, for messages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def same_place(one: Any, other: Any) -> bool:
    """Return True if two output streams lead to the same terminal, pipe or file."""
    if one is other:
        return True
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (AttributeError, OSError, ValueError):  # a stream is None, closed, or in memory
        return False

"""The standard input of a launcher, from which each process that it starts reads all bytes.

A script reads its input alone as ``cat settings.json | python train.py`` has it. In a run several
workers, their restarts and the evaluator are to read the same bytes from the beginning, at any
time. There are four kinds of input:

- Nothing: /dev/null, or a closed stream. Processes get /dev/null.
- A terminal: it stays the launcher's. Processes get /dev/null, because several of them cannot
  share what a person types.
- A file (``< settings.json``): each process opens it by itself, from the position at which the
  launcher got it. The launcher's own position stays. So a shell loop (``while read line; do
  thinwire run ...; done < list``) still has all its lines.
- A stream (a pipe, a socket): one thread copies it to a file without a name, and a thread for each
  process feeds a pipe from that file. The copy is at most `READ_AHEAD_BYTES` and a pipe's
  capacity ahead of the process that has read most. So nobody waits for a stream that never ends,
  and one that nobody reads takes no space. These bytes are gone for a shell loop, as with ssh.

States of a stream: UNREAD until the first process opens it, READING, then ENDED at its end, or
FAILED where it cannot be read or its copy not be written. Only the reading thread leaves READING.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pathlib
import select
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO

from absl import logging

#: How far the copy of a stream is ahead of what the processes have been given.
READ_AHEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16


class InputKind(enum.Enum):
    """Kind of an input."""

    NOTHING = "nothing"
    TERMINAL = "terminal"
    FILE = "file"
    STREAM = "stream"


class _StreamState(enum.Enum):
    UNREAD = enum.auto()
    READING = enum.auto()
    ENDED = enum.auto()
    FAILED = enum.auto()


class StandardInput:
    """The input of this process, for those that it starts.

    Attributes:
        kind: Kind of the input.

    Args:
        folder: Where the copy of a stream is kept.
        descriptor: The input; 0 but for tests.
        on_first_bytes: Called once a stream has had bytes, in another thread.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        descriptor: int = 0,
        on_first_bytes: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind_of(descriptor)
        self._folder, self._descriptor = folder, descriptor
        self._on_first_bytes = on_first_bytes
        self._changed = threading.Condition()
        self._state = _StreamState.UNREAD
        self._copy: IO[bytes] | None = None
        self._size = 0  # bytes in the copy
        self._most_given = 0  # bytes that the process that has read most was given
        self._is_wanted_whole = False
        self._offset = os.lseek(descriptor, 0, os.SEEK_CUR) if self.kind is InputKind.FILE else 0

    def open(self) -> int | None:
        """Return a descriptor that a new process reads the input from; None: it has none.

        The caller closes it once the process has it.
        """
        if self.kind in (InputKind.NOTHING, InputKind.TERMINAL):
            return None
        if self.kind is InputKind.FILE:
            with contextlib.suppress(OSError):  # no /proc, or a file of another user
                # A duplicate would share the position with this process, and with its shell.
                path = f"/proc/self/fd/{self._descriptor}"
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(opened, self._offset, os.SEEK_SET)
                return opened
        self._begin()
        reader, writer = os.pipe()
        threading.Thread(target=self._feed, args=(writer,), name="input-feed", daemon=True).start()
        return reader

    def whole(self, patience_seconds: float) -> IO[bytes] | None:
        """Return a file with all of the input at its beginning, for a host that gets a copy.

        Args:
            patience_seconds: How long a stream may bring nothing and not end.

        Returns:
            The file, which the caller closes; None: there is no input, or it does not end.
        """
        if self.kind in (InputKind.NOTHING, InputKind.TERMINAL):
            return None
        self._begin()
        with self._changed:
            self._is_wanted_whole = True
            self._changed.notify_all()
            before, since = self._size, time.monotonic()
            while self._state is _StreamState.READING:
                if self._size != before:
                    before, since = self._size, time.monotonic()
                left = since + patience_seconds - time.monotonic()
                if left <= 0:
                    self._is_wanted_whole = False
                    return None
                self._changed.wait(left)
            if self._state is _StreamState.FAILED:
                return None
        found = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - the caller closes it
        position = 0
        while data := self._read_copy(position):
            found.write(data)
            position += len(data)
        found.seek(0)
        return found

    def _begin(self) -> None:
        """Begin to copy a stream. A file of which only this descriptor is known is its own copy."""
        with self._changed:
            if self._state is not _StreamState.UNREAD:
                return
            if self.kind is InputKind.FILE:
                self._size = max(0, os.fstat(self._descriptor).st_size - self._offset)
                self._state = _StreamState.ENDED
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            self._copy = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - while this is
            self._state = _StreamState.READING
        # The number may be another file's once the caller has closed it.
        source = os.dup(self._descriptor)
        threading.Thread(
            target=self._read, args=(source,), name="standard-input", daemon=True
        ).start()

    def _read(self, source: int) -> None:
        """Copy the stream, as far ahead of the processes as it may be, to its end."""
        ended = _StreamState.ENDED
        try:
            while data := self._next_bytes(source):
                self._write_copy(data)
                if self._size == 0:
                    self._on_first_bytes()
                with self._changed:
                    self._size += len(data)
                    self._changed.notify_all()
        except OSError as error:
            logging.error(
                "stdin: %s. The script's processes get no more of it; free space in %s, or give "
                "the input as a file.",
                error.strerror or error,
                self._folder,
            )
            ended = _StreamState.FAILED
        os.close(source)
        with self._changed:
            self._state = ended
            self._changed.notify_all()

    def _next_bytes(self, source: int) -> bytes:
        with self._changed:
            while not self._is_wanted_whole and self._size - self._most_given >= READ_AHEAD_BYTES:
                self._changed.wait()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.poll()  # a program that shares the stream may have made it non-blocking
        return os.read(source, _CHUNK_BYTES)

    def _write_copy(self, data: bytes) -> None:
        if self._copy is None:
            raise OSError("there is no copy of the stream")
        written = 0
        while written < len(data):
            at = self._size + written
            written += os.pwrite(self._copy.fileno(), data[written:], at)

    def _read_copy(self, position: int) -> bytes:
        """Return the next bytes from a position, none at the end; `pread` moves no position."""
        with self._changed:
            count = min(_CHUNK_BYTES, self._size - position)
        if self._copy is None:
            return os.pread(self._descriptor, count, self._offset + position)
        return os.pread(self._copy.fileno(), count, position)

    def _feed(self, writer: int) -> None:
        """Write the input into the pipe of one process, until its end or that of the process."""
        position = 0
        try:
            while data := self._await(position):
                count = os.write(writer, data)
                position += count
                with self._changed:
                    self._most_given = max(self._most_given, position)
                    self._changed.notify_all()
        except OSError:  # the process has ended, or has closed its input
            pass
        finally:
            os.close(writer)

    def _await(self, position: int) -> bytes:
        """Return the next bytes once there are some; none: the input has ended."""
        with self._changed:
            while position >= self._size and self._state is _StreamState.READING:
                self._changed.wait()
        return self._read_copy(position)


def kind_of(descriptor: int) -> InputKind:
    """Return what kind of input a descriptor is."""
    try:
        found = os.fstat(descriptor)
        if os.isatty(descriptor):
            return InputKind.TERMINAL
        null = os.stat(os.devnull)
    except OSError:  # it is closed
        return InputKind.NOTHING
    is_null = stat.S_ISCHR(found.st_mode) and found.st_rdev == null.st_rdev
    if is_null or stat.S_ISDIR(found.st_mode):
        return InputKind.NOTHING
    return InputKind.FILE if stat.S_ISREG(found.st_mode) else InputKind.STREAM

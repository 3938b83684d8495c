"""Standard input of a launcher, which every started process can read from its beginning.

A user's script without Thinwire may read its stdin as in ``cat settings.json | python train.py``.
In a run, several workers, restarted workers and the evaluator must be able to read the same stdin
from its beginning, at any time. A launcher's standard input is of one of four kinds:

- No input means /dev/null or a closed stream, and the started processes get /dev/null.
- A terminal is read only by the launcher. The started processes get /dev/null, because several
  processes cannot share the input that a person types.
- A file (``< settings.json``) is opened by every started process separately, at the position at
  which the launcher received the file. The started processes do not move the launcher's own
  position in an input file. So a shell loop (``while read line; do thinwire run ...; done < list``)
  reads all lines of its list.
- A stream (a pipe, a socket) is copied by one thread to an unnamed file, from which one thread per
  started process feeds a pipe. The copy of an input stream is at most `READ_AHEAD_BYTES` and a
  pipe's capacity ahead of the process that has read most. No process waits for the end of an input
  stream, and a stream without a reader takes no disk space. If its list comes from a pipe, a shell
  loop cannot read the lines that a launcher has copied, as with ssh.

The state of an input stream is UNREAD until the first process opens the stream, then READING. The
state of a stream is ENDED at its end, or FAILED if it cannot be read or its copy cannot be written.
Only the thread that reads an input stream ends the state READING.
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

#: Number of bytes by which the copy of an input stream may be ahead of the fastest reading process.
READ_AHEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16


class InputKind(enum.Enum):
    """Kind of a launcher's standard input: none, terminal, file or stream."""

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
    """Standard input of this process, which the processes that it starts can read.

    Attributes:
        kind: Kind of the standard input: none, terminal, file or stream.

    Args:
        folder: Folder for the unnamed file with the copy of an input stream.
        descriptor: File descriptor of the standard input, which is 0 except in tests.
        on_first_bytes: Function that is called, in another thread, when the first bytes of an input
            stream arrive.
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
        self._size = 0  # number of bytes in the copy of the input stream
        self._most_given = 0  # number of bytes that the fastest process has received
        self._is_wanted_whole = False
        self._offset = os.lseek(descriptor, 0, os.SEEK_CUR) if self.kind is InputKind.FILE else 0

    def open(self) -> int | None:
        """Return a descriptor from which a new process reads the input; None if there is no input.

        The caller must close the returned descriptor after it has started the process.
        """
        if self.kind in (InputKind.NOTHING, InputKind.TERMINAL):
            return None
        if self.kind is InputKind.FILE:
            with contextlib.suppress(OSError):  # /proc is missing, or the file is another user's
                # Open the input file again, because a duplicated descriptor would share its
                # position with this process and with the shell that started it.
                path = f"/proc/self/fd/{self._descriptor}"
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(opened, self._offset, os.SEEK_SET)
                return opened
        self._begin()
        reader, writer = os.pipe()
        threading.Thread(target=self._feed, args=(writer,), name="input-feed", daemon=True).start()
        return reader

    def whole(self, patience_seconds: float) -> IO[bytes] | None:
        """Return a file with the whole standard input, at position 0, for a copy to another host.

        Args:
            patience_seconds: Longest time in which an input stream may deliver neither bytes nor
                its end, in seconds.

        Returns:
            The file, which the caller must close. None if there is no input, or if the input does
            not end in time.
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
                remaining_seconds = since + patience_seconds - time.monotonic()
                if remaining_seconds <= 0:
                    self._is_wanted_whole = False
                    return None
                self._changed.wait(remaining_seconds)
            if self._state is _StreamState.FAILED:
                return None
        whole = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - the caller closes it
        position = 0
        while data := self._read_copy(position):
            whole.write(data)
            position += len(data)
        whole.seek(0)
        return whole

    def _begin(self) -> None:
        """Start copying an input stream; an input file needs no copy."""
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
        # Duplicate the input's descriptor, because the caller may close the original descriptor,
        # whose number may then belong to another file while the thread still reads.
        source = os.dup(self._descriptor)
        threading.Thread(
            target=self._read, args=(source,), name="standard-input", daemon=True
        ).start()

    def _read(self, source: int) -> None:
        """Copy the input stream, at most `READ_AHEAD_BYTES` ahead of the fastest reader."""
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
                "the launcher cannot forward stdin: %s. The script's processes receive no more "
                "input; free space in folder %s, or give the input as a file.",
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
        """Return the next bytes of the standard input's copy; empty at the end of the copy."""
        with self._changed:
            count = min(_CHUNK_BYTES, self._size - position)
        if self._copy is None:
            return os.pread(self._descriptor, count, self._offset + position)
        return os.pread(self._copy.fileno(), count, position)

    def _feed(self, writer: int) -> None:
        """Write the standard input into one process's pipe, until the input or process ends."""
        position = 0
        try:
            while data := self._await(position):
                count = os.write(writer, data)
                position += count
                with self._changed:
                    self._most_given = max(self._most_given, position)
                    self._changed.notify_all()
        except OSError:  # the process has ended, or has closed its standard input
            pass
        finally:
            os.close(writer)

    def _await(self, position: int) -> bytes:
        """Wait for the next bytes of the standard input; return no bytes at the input's end."""
        with self._changed:
            while position >= self._size and self._state is _StreamState.READING:
                self._changed.wait()
        return self._read_copy(position)


def kind_of(descriptor: int) -> InputKind:
    """Return the kind of input that a file descriptor delivers."""
    try:
        status = os.fstat(descriptor)
        if os.isatty(descriptor):
            return InputKind.TERMINAL
        null = os.stat(os.devnull)
    except OSError:  # the file descriptor is closed
        return InputKind.NOTHING
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == null.st_rdev
    if is_null or stat.S_ISDIR(status.st_mode):
        return InputKind.NOTHING
    return InputKind.FILE if stat.S_ISREG(status.st_mode) else InputKind.STREAM

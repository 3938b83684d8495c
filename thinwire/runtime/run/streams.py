"""The standard streams of a command: open from the start, and never the reason for a traceback.

A shell may start a command with a stream closed (``>&-``), the reader of a pipe may leave before
the command ends (``| head``), and the disk behind ``> file`` may be full. Python answers the first
with a stream that is None, and the others with an exception at the next write or at the end of the
interpreter. `standard_streams` deals with all of them once, for every command:

- A closed stream becomes /dev/null. A file that is opened later can then not take its number, at
  which native libraries write.
- Where the reader has left, further text is dropped, and the command does its work to the end:
  `thinwire stop RUN | head -1` still stops the run. Its exit code is that of its work.
- Where stdout cannot be written for another reason, stderr gets one line about it at the end.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_STDIN, _STDOUT, _STDERR = 0, 1, 2
#: Text was lost: to a user the same as a full disk (docs/reference/operations.md).
_EXIT_LOST = 2


class _Output(io.FileIO):
    """Standard output or error, whose writes always succeed.

    Attributes:
        failure: Why text was lost that somebody wanted; None where nothing was.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write bytes, or drop them."""
        try:
            return super().write(data)
        except BrokenPipeError:  # native code and children write there too: none may fail either
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Run the rest of a command, which ends with SystemExit, with streams that do not fail it."""
    _open_closed()
    sys.stdout = _lasting(sys.stdout, _STDOUT)
    sys.stderr = _lasting(sys.stderr, _STDERR)
    try:
        yield
    except SystemExit as end:
        failure = _failure_of(sys.stdout)
        if failure is None or end.code not in (None, 0):
            raise
        sys.stderr.write(f"stdout cannot be written ({failure.strerror}); its text is lost\n")
        raise SystemExit(_EXIT_LOST) from None


def _open_closed() -> None:
    """Open /dev/null at the number of each standard stream that is closed."""
    for descriptor in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(_STDIN, closefd=False)  # noqa: SIM115 - as long as the process


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream like this one whose writes succeed; one that a test has set stays."""
    if stream is None:
        return _stream(descriptor, "utf-8", is_buffered=True, line_buffering=False)
    raw = _raw(stream)
    if raw is None or isinstance(raw, _Output):
        return stream
    stream.flush()
    is_buffered = raw is not stream.buffer  # python -u and PYTHONUNBUFFERED buffer nothing
    by_line = getattr(stream, "line_buffering", False)
    return _stream(descriptor, stream.encoding, is_buffered, by_line)


def _stream(descriptor: int, encoding: str, is_buffered: bool, line_buffering: bool) -> TextIO:
    output = _Output(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(output) if is_buffered else output,
        encoding=encoding,
        errors="backslashreplace",  # the name of a file need not be text
        line_buffering=line_buffering,
        write_through=not is_buffered,
    )


def _raw(stream: TextIO) -> io.FileIO | None:
    """Return the file below a stream of the interpreter's own; None for any other."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, io.FileIO) else None


def _failure_of(stream: TextIO) -> OSError | None:
    stream.flush()
    raw = _raw(stream)
    return raw.failure if isinstance(raw, _Output) else None

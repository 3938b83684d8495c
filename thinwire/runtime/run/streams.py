"""Makes sure that a command's standard streams are open and their writes raise no errors.

A shell may start a command with a closed stream (``>&-``), the reader of a pipe may exit before the
command ends (``| head``), and the disk of ``> file`` may be full. For a closed stream, Python sets
sys.stdout or sys.stderr to None. For a lost reader or a full disk, Python raises an exception at
the next write or at the end of the interpreter. `standard_streams` handles closed streams, lost
readers and full disks for every command:

- A closed stream becomes /dev/null. If a standard stream stayed closed, a file opened later could
  get its descriptor number, to which native libraries write.
- If the reader of a pipe has exited, the output that follows is dropped, and the command completes
  its work: `thinwire stop RUN | head -1` still stops the run. A pipe's lost reader does not change
  the exit code of the command.
- If stdout cannot be written for another reason, for example a full disk, stderr gets one line
about the lost output at the end.
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
#: Exit code of a command whose output was lost, equal to the code for a full disk
#: (docs/reference/operations.md).
_EXIT_LOST = 2


class _Output(io.FileIO):
    """Standard output or standard error of a command, whose writes always succeed.

    Attributes:
        failure: Error by which output was lost while the stream had a reader; None without such an
            error.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write output bytes, or drop them if the write fails; return the number of bytes."""
        try:
            return super().write(data)
        except BrokenPipeError:
            # Redirect the file descriptor to /dev/null, because native code and child processes
            # also write to the descriptor, and their writes must not fail either.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command inside the with block, such that its writes succeed; exit at the end."""
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
    """Open /dev/null under the descriptor number of each standard stream that is closed."""
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
    """Return a stream like ``stream`` whose writes never raise; return a test's one unchanged."""
    if stream is None:
        return _stream(descriptor, "utf-8", is_buffered=True, line_buffering=False)
    raw = _raw(stream)
    if raw is None or isinstance(raw, _Output):
        return stream
    stream.flush()
    # The stream has no buffer if Python was started with -u or PYTHONUNBUFFERED.
    is_buffered = raw is not stream.buffer
    by_line = getattr(stream, "line_buffering", False)
    return _stream(descriptor, stream.encoding, is_buffered, by_line)


def _stream(descriptor: int, encoding: str, is_buffered: bool, line_buffering: bool) -> TextIO:
    output = _Output(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(output) if is_buffered else output,
        encoding=encoding,
        errors="backslashreplace",  # a printed file name may hold bytes that are no valid text
        line_buffering=line_buffering,
        write_through=not is_buffered,
    )


def _raw(stream: TextIO) -> io.FileIO | None:
    """Return the raw file of a stream that the interpreter has opened; None for other streams."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, io.FileIO) else None


def _failure_of(stream: TextIO) -> OSError | None:
    stream.flush()
    raw = _raw(stream)
    return raw.failure if isinstance(raw, _Output) else None

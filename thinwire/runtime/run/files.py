"""Reading with a size limit, atomic replacement, and file names in errors, for a run's files."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

#: Default size limit, in bytes: larger than any certificate, token, hosts file or groups file.
MOST_BYTES = 1 << 20


def read_bounded(path: str | pathlib.Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return a file's content.

    Args:
        path: Path of the file, or of a link to it.
        most_bytes: Size limit of the file, in bytes.

    Raises:
        OSError: The file cannot be read, is larger, or is not a regular file (a device or a pipe).
    """
    # O_NONBLOCK: without it, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add this file's name to OSErrors of the block: a failed write does not name its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def replace_file(path: str | os.PathLike[str], content: str | bytes, durable: bool = False) -> None:
    """Replace a file atomically: readers see the old file or the whole new file, never a part.

    Args:
        path: Path of the file.
        content: New content; text is encoded as UTF-8.
        durable: True to wait until the content is on the disk.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # the user knows this name, not the temporary name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise

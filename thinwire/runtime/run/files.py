"""Functions for a run's files: read with a size limit, replace atomically, name files in errors."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

from thinwire.ops.types import ConfigurationError

#: Default size limit of a file, in bytes, larger than any certificate, token, hosts file or groups
#: file.
MOST_BYTES = 1 << 20


def read_bounded(path: str | pathlib.Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file that is not larger than a limit.

    Args:
        path: Path of the file, or of a symbolic link to the file.
        most_bytes: Size limit of the file, in bytes.

    Raises:
        OSError: The file cannot be read, exceeds the limit, or is a device or a pipe.
    """
    # Without O_NONBLOCK, opening a named pipe would wait until a process writes to the pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content


def read_text(flag: str, path: str, expected: str = "") -> str:
    """Return the text of a file that a flag names; `expected` ends the message of an error.

    Raises:
        ConfigurationError: The file cannot be read, or its content is no UTF-8 text.
    """
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        text = f"--{flag}={path} cannot be read: {error}. {expected}"
        raise ConfigurationError(text.rstrip()) from error


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to OSErrors of the block, because errors of writes name no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def replace_file(path: str | os.PathLike[str], content: str | bytes, durable: bool = False) -> None:
    """Replace a file's content atomically: readers see the old or the whole new content.

    Args:
        path: Path of the file whose content is replaced.
        content: New content of the file; text is encoded as UTF-8.
        durable: True to wait until the content is on the disk.

    Raises:
        OSError: The new content cannot be written. The old file is unchanged.
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
            error.filename = str(path)  # the error must not show the temporary name
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise

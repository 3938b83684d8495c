"""Files of a run: read whole, replaced whole or not at all, and named in every error."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

#: More than any certificate, token, list of hosts or of groups has.
MOST_BYTES = 1 << 20


def read_bounded(path: str | pathlib.Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return a file's content.

    Args:
        path: Of the file, or of a link to it.
        most_bytes: That it may have.

    Raises:
        OSError: It cannot be read, is a device, a pipe or the like, or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe waits
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let each OSError inside name this file: a write to a full disk names none by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def replace_file(path: str | os.PathLike[str], content: str | bytes, durable: bool = False) -> None:
    """Write a file so that readers see the old one or the whole new one, never a part.

    Args:
        path: Of the file.
        content: Of it; a text becomes UTF-8.
        durable: Whether to wait until the disk has it.

    Raises:
        OSError: It cannot be written; the old one is as before, and nothing else is left.
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
            error.filename = str(path)  # the other name means nothing to anybody
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise

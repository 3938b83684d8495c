"""Files that flags name: read whole, and never one that has no end."""

from __future__ import annotations

import errno
import os
import pathlib
import stat

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

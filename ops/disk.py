"""What is asked of a disk: room, and that what was written stays."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import IO, Any


def check_room(folder: pathlib.Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk cannot take: others on it may still need the room.

    Raises:
        OSError: ENOSPC.
    """
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if needed_bytes > free_bytes:
        told = f"No space left on device: {needed_bytes} bytes are needed, {free_bytes} are free"
        raise OSError(errno.ENOSPC, told, str(folder))


def sync(file: IO[Any]) -> None:
    """Make what was written durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in ``path`` durable, not only the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

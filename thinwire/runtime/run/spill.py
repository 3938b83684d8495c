"""Stores large buffers (payloads, model copies) in unnamed files, to limit a process's memory."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.buffers import LEAST_BYTES, PIECE_BYTES, MappedFile, buffer, copied

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)


class Spill:
    """Allocator of large buffers: a few are in memory, all further ones are in unnamed files.

    A PS uses one `Spill` for incoming payloads and for copies of the model that clients still read.

    The pages of a buffer's file belong to the page cache, so the kernel writes the pages out when
    memory is short, and `put_away` removes the pages from this process. The file of a buffer has no
    name, and the kernel deletes it when the buffer's last array is deleted. If a buffer's file
    cannot be created, the buffer is in memory.

    Args:
        folder: Folder of the buffers' unnamed files.
        in_memory: Largest number of buffers that are in memory at the same time.
    """

    def __init__(self, folder: Path, in_memory: int = 2) -> None:
        self._folder = folder
        self._left = [None] * in_memory
        self._has_warned = False

    def buffer(self, num_bytes: int) -> NDArray[Any]:
        """Return a new, uninitialized buffer, an array [num_bytes] uint8 aligned to 64 bytes."""
        if num_bytes < LEAST_BYTES:
            return buffer(num_bytes)
        try:
            self._left.pop()
        except IndexError:
            return self._in_file(num_bytes)
        return np.asarray(_Counted(buffer(num_bytes), self._left))

    def copied(self, values: NDArray[Any]) -> NDArray[Any] | FileCopy:
        """Return a copy of an array [n], from which the caller only reads slices."""
        if values.nbytes < LEAST_BYTES:
            return copied(values)
        try:
            return FileCopy(values, self._folder)
        except OSError as error:
            self._warn(values.nbytes, error)
            return copied(values)

    def _in_file(self, num_bytes: int) -> NDArray[Any]:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Reserve the file's disk space now, because on a full disk a later write to the
                # mapped memory would end the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return np.asarray(MappedFile(mmap.mmap(file.fileno(), num_bytes)))
        except OSError as error:
            self._warn(num_bytes, error)
            return buffer(num_bytes)

    def _warn(self, num_bytes: int, error: OSError) -> None:
        if not self._has_warned:
            _log.warning(
                "cannot create a file of %d bytes in folder %s (%s): the buffer stays in memory",
                *(num_bytes, self._folder, error),
            )
        self._has_warned = True


class FileCopy:
    """Copy of an array [n] in an unnamed file, which takes no memory of this process.

    System calls write and read a `FileCopy`'s file, because the first write to memory-mapped pages
    of a file takes two to four times as long.

    Attributes:
        nbytes: Size of the array in the file, in bytes.
    """

    def __init__(self, values: NDArray[Any], folder: Path) -> None:
        """Copy an array [n] to a new unnamed file in ``folder``; raise OSError on failure."""
        self.nbytes, self._dtype = values.nbytes, values.dtype
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - as long as it
        weakref.finalize(self, self._file.close)
        remaining = values.view(np.uint8).data
        while len(remaining):
            remaining = remaining[self._file.write(remaining[:PIECE_BYTES]) :]

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return a copy of the slice ``start:stop`` of the array in the unnamed file."""
        values = np.empty(part.stop - part.start, self._dtype)
        remaining, at = values.view(np.uint8).data, part.start * values.itemsize
        while len(remaining):
            count = os.preadv(self._file.fileno(), [remaining], at)
            if not count:
                raise OSError(f"a file ends at byte {at}; expected {self.nbytes}")
            remaining, at = remaining[count:], at + count
        return values


class _Counted:
    """Memory buffer that a `Spill` counts until its last array or view is deleted."""

    def __init__(self, raw: NDArray[Any], left: list[None]) -> None:
        self._raw, self._left = raw, left
        self.__array_interface__ = raw.__array_interface__

    def __del__(self) -> None:
        self._left.append(None)

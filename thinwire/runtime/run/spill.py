"""Large buffers in files without a name, where memory is to hold only a few of them."""

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
    """Large buffers of which the first few are memory, and all beyond these are files.

    Payloads that arrive, and what is put aside for clients that still read, share it on a PS.

    What waits in a file is the page cache's: the kernel writes it out where memory is short, and
    `put_away` takes it out of this process. A file has no name, and is gone with its last array.
    Where none can be made, memory is taken.

    Args:
        folder: Of the files.
        in_memory: Buffers at a time that are memory.
    """

    def __init__(self, folder: Path, in_memory: int = 2) -> None:
        self._folder = folder
        self._left = [None] * in_memory
        self._has_warned = False

    def buffer(self, num_bytes: int) -> NDArray[Any]:
        """Return [num_bytes] uint8, not initialised, on a 64-byte border."""
        if num_bytes < LEAST_BYTES:
            return buffer(num_bytes)
        try:
            self._left.pop()
        except IndexError:
            return self._in_file(num_bytes)
        return np.asarray(_Counted(buffer(num_bytes), self._left))

    def copied(self, values: NDArray[Any]) -> NDArray[Any] | FileCopy:
        """Return a copy of an array [n], for one who reads it part by part and never writes."""
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
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # or writing to it could fail
                return np.asarray(MappedFile(mmap.mmap(file.fileno(), num_bytes)))
        except OSError as error:
            self._warn(num_bytes, error)
            return buffer(num_bytes)

    def _warn(self, num_bytes: int, error: OSError) -> None:
        if not self._has_warned:
            _log.warning(
                "no file of %d bytes in %s (%s): what was to wait there stays in memory",
                *(num_bytes, self._folder, error),
            )
        self._has_warned = True


class FileCopy:
    """[n] values in a file without a name, which no memory of this process holds.

    It is written and read by calls: pages of a file that are mapped take two to four times as long
    to be written for the first time.

    Attributes:
        nbytes: Of the values.
    """

    def __init__(self, values: NDArray[Any], folder: Path) -> None:
        """Copy an array [n]; raises OSError."""
        self.nbytes, self._dtype = values.nbytes, values.dtype
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - as long as it
        weakref.finalize(self, self._file.close)
        rest = values.view(np.uint8).data
        while len(rest):
            rest = rest[self._file.write(rest[:PIECE_BYTES]) :]

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return a copy of the values from `start` to `stop`."""
        found = np.empty(part.stop - part.start, self._dtype)
        rest, at = found.view(np.uint8).data, part.start * found.itemsize
        while len(rest):
            count = os.preadv(self._file.fileno(), [rest], at)
            if not count:
                raise OSError(f"a file ends at byte {at}; expected {self.nbytes}")
            rest, at = rest[count:], at + count
        return found


class _Counted:
    """Memory of a `Spill`; when no array and no view of it is left, the next buffer is memory."""

    def __init__(self, raw: NDArray[Any], left: list[None]) -> None:
        self._raw, self._left = raw, left
        self.__array_interface__ = raw.__array_interface__

    def __del__(self) -> None:
        self._left.append(None)

"""Large buffers that are used again: fresh pages cost several times what filling them does.

Payloads of messages, and copies of arrays that are about to change, share them, so that a process
holds as many as were ever in use at a time. All is done by single operations of lists, which no
other thread can interrupt.

They are mapped by themselves, not taken from numpy, which requests huge pages: to fill those for
the first time took two to four times as long on virtual machines.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Smaller ones are malloc's.
LEAST_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64
#: Sizes that differ by less than this part share buffers.
_STEPS = 16
#: More free ones of a size are given back to malloc.
_MOST_FREE = 8

#: Of an array in a file so much is in this process at a time.
PIECE_BYTES = 4 << 20

_log = logging.getLogger(__name__)
_free: dict[int, list[NDArray[Any]]] = {}


class _InUse:
    """Memory in use; when no array and no view of it is left, it is free."""

    def __init__(self, raw: NDArray[Any]) -> None:
        self._raw = raw
        self.__array_interface__ = raw.__array_interface__

    def __del__(self) -> None:
        free = _free.setdefault(len(self._raw), [])
        if len(free) < _MOST_FREE:
            free.append(self._raw)


def buffer(num_bytes: int) -> NDArray[Any]:
    """Return [num_bytes] uint8, not initialised, on a 64-byte border."""
    if num_bytes < LEAST_BYTES:
        return _aligned(num_bytes)
    step = (1 << num_bytes.bit_length()) // (2 * _STEPS)
    capacity = -(-num_bytes // step) * step
    try:
        raw = _free[capacity].pop()
    except (KeyError, IndexError):
        for size in [each for each in list(_free) if each != capacity]:  # of a model that is gone
            _free.pop(size, None)
        pages = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
    return np.asarray(_InUse(raw))[:num_bytes]


def copied(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array [n] in a buffer."""
    copy = buffer(values.nbytes).view(values.dtype)
    np.copyto(copy, values)
    return copy


def _aligned(num_bytes: int) -> NDArray[Any]:
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


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
                return np.asarray(_InFile(mmap.mmap(file.fileno(), num_bytes)))
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


class _InFile:
    """The pages of a file."""

    def __init__(self, pages: mmap.mmap) -> None:
        raw = np.frombuffer(pages, np.uint8)
        self._pages, self._start = pages, raw.ctypes.data
        self.__array_interface__ = raw.__array_interface__

    def put_away(self, part: NDArray[Any]) -> None:
        """Take pages out of this process; their contents stay."""
        first = (part.ctypes.data - self._start) // mmap.PAGESIZE * mmap.PAGESIZE
        stop = part.ctypes.data - self._start + part.nbytes
        if stop > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, stop - first)


def put_away(values: NDArray[Any] | memoryview) -> None:
    """Take an array, or a part of one, out of this process' memory if a file has it.

    Its contents stay, and are read from the file when they are used again.
    """
    if (owner := _file_of(values)) is not None:
        owner.put_away(np.asarray(values))


def is_in_file(values: NDArray[Any]) -> bool:
    """Return whether a file has the contents of an array."""
    return _file_of(values) is not None


def pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Return an array whole, or in pieces that are put away again after each one's use."""
    if not is_in_file(values):
        yield values
        return
    size = PIECE_BYTES // values.itemsize
    for start in range(0, len(values), size):
        piece = values[start : start + size]
        yield piece
        put_away(piece)


def _file_of(values: Any) -> _InFile | None:
    owner = values
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner if isinstance(owner, _InFile) else None

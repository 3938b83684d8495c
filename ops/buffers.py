"""Large buffers that are used again: fresh pages cost several times what filling them does.

Payloads of messages, and copies of arrays that are about to change, share them, so that a process
holds as many as were ever in use at a time. All is done by single operations of lists, which no
other thread can interrupt.

They are mapped by themselves, not taken from numpy, which requests huge pages: to fill those for
the first time took two to four times as long on virtual machines.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
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


class MappedFile:
    """The pages of a mapped file, as the memory of an array.

    `put_away` finds it behind an array or a part of one.
    """

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


def _file_of(values: Any) -> MappedFile | None:
    owner = values
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner if isinstance(owner, MappedFile) else None

"""Pool of large memory buffers, because allocating memory pages takes longer than filling them.

The buffer pool provides memory for message payloads, and for copies of arrays that are about to
change. A process keeps about as many buffers in the pool as it ever used at the same time.

The buffer pool allocates memory with `mmap`, not with numpy. For its arrays numpy requests huge
pages, and on virtual machines the first write to huge pages took two to four times as long as the
first write to normal pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from thinwire.ops.types import Array

#: Size of the smallest pooled buffer, in bytes. Smaller buffers come from malloc and are not
#: pooled.
LEAST_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64
#: Number of buffer capacities per power of two. A pooled buffer is at most 1/16 larger than the
#: requested size. Messages of nearly the same size then share buffers.
_STEPS = 16
#: Largest number of free buffers of one capacity in the pool. A free buffer beyond this number is
#: unmapped.
_MOST_FREE = 8

#: Size, in bytes, of the part of a mapped file's array that `pieces` holds in memory at a time.
PIECE_BYTES = 4 << 20

# Capacity in bytes -> free buffers of this capacity. Threads share the dict without a lock: every
# access is one operation of a dict or list (`setdefault`, `append`, `pop`, `list`), which no other
# thread can interrupt.
_free: dict[int, list[Array]] = {}


class _InUse:
    """Memory buffer taken from the pool, for as long as an array uses the buffer.

    A buffer returns to the pool when no array and no view uses the buffer any more.
    """

    def __init__(self, raw: Array) -> None:
        self._raw = raw
        self.__array_interface__ = raw.__array_interface__

    # Every array or view of the pooled memory refers to this object through the array's chain of
    # `base` attributes. So `__del__` runs only when nothing can read or write the memory, and the
    # next owner may overwrite it.
    def __del__(self) -> None:
        free = _free.setdefault(len(self._raw), [])
        if len(free) < _MOST_FREE:
            free.append(self._raw)


def buffer(num_bytes: int) -> Array:
    """Return an uninitialized [num_bytes] uint8 array that starts at a multiple of 64 bytes."""
    if num_bytes < LEAST_BYTES:
        return _aligned(num_bytes)
    step = (1 << num_bytes.bit_length()) // (2 * _STEPS)
    capacity = -(-num_bytes // step) * step
    try:
        raw = _free[capacity].pop()
    except (KeyError, IndexError):
        # Free buffers of capacities other than the requested one may be left over from an earlier
        # model. They are unmapped by the loop below, because no other code unmaps them. `list`
        # takes a snapshot, because another thread may add a capacity meanwhile.
        for size in [size for size in list(_free) if size != capacity]:
            _free.pop(size, None)
        pages = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
    return np.asarray(_InUse(raw))[:num_bytes]


def copied(values: Array) -> Array:
    """Return a copy of an array [n], in memory from the buffer pool of `thinwire.ops.buffers`."""
    copy = buffer(values.nbytes).view(values.dtype)
    np.copyto(copy, values)
    return copy


def _aligned(num_bytes: int) -> Array:
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


class MappedFile:
    """Pages of a memory-mapped file that serve as the memory of an array.

    The function `put_away` finds the MappedFile object through the attribute `base` of a numpy
    array or view.
    """

    def __init__(self, pages: mmap.mmap) -> None:
        raw = np.frombuffer(pages, np.uint8)
        self._pages, self._start = pages, raw.ctypes.data
        self.__array_interface__ = raw.__array_interface__

    def put_away(self, part: Array) -> None:
        """Remove an array's pages from memory; their contents stay in the memory-mapped file."""
        # The first page is removed whole, so neighbors of `part` may leave memory too. A later read
        # of the neighbors loads their page from the file again.
        first = (part.ctypes.data - self._start) // mmap.PAGESIZE * mmap.PAGESIZE
        stop = part.ctypes.data - self._start + part.nbytes
        if stop > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, stop - first)


def put_away(values: Array | memoryview) -> None:
    """Remove an array in a memory-mapped file, or a view of such an array, from memory.

    The next access to an array that `put_away` has removed reads the contents from the mapped file
    again. `put_away` does nothing for an array that is not in a mapped file.
    """
    if (owner := _file_of(values)) is not None:
        owner.put_away(np.asarray(values))


def is_in_file(values: Array) -> bool:
    """Return True if the memory of an array is a memory-mapped file."""
    return _file_of(values) is not None


def pieces(values: Array) -> Iterator[Array]:
    """Yield an array in memory as a whole, and an array in a mapped file piece by piece.

    `pieces` removes each piece of a mapped file's array from the process' memory before it yields
    the next piece.
    """
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

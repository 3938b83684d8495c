"""Large buffers that are used again: fresh pages cost several times what filling them does.

Payloads of messages, and copies of arrays that are about to change, share them, so that a process
holds as many as were ever in use at a time. All is done by single operations of lists, which no
other thread can interrupt.

They are mapped by themselves, not taken from numpy, which requests huge pages: to fill those for
the first time took two to four times as long on virtual machines.
"""

from __future__ import annotations

import mmap
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


def _aligned(num_bytes: int) -> NDArray[Any]:
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes]

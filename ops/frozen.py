"""Arrays as they were at a moment, read piece by piece while their owner goes on to change them.

Whoever changes an array announces it to a `Freezer` before; what a reader has not had yet is then
put aside, and only that. So a reply, or a checkpoint, of weights that do not change meanwhile costs
no copy of them.

One thread owns an array, changes it and freezes it; another one may read what was frozen. No lock
is needed: what is put aside is there before the change begins, and a reader looks for it after it
has copied a piece. If it finds nothing, the piece was copied before the change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Int64


class StoredCopy(Protocol):
    """A copy of an array [n] outside memory, whose parts can be read."""

    @property
    def nbytes(self) -> int:
        """Size of all values."""

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return a copy of the values from `start` to `stop`."""


#: Returns what is kept of an array: a copy, or what stands for one.
Keep = Callable[["NDArray[Any]"], Any]
#: Copies an array [n]: into memory, or to where parts of it can be read.
Copy = Callable[["NDArray[Any]"], "NDArray[Any] | StoredCopy"]
#: Announces that entries of an array (ascending; None: any) are about to change.
BeforeChange = Callable[["NDArray[Any]", "Int64 | None"], None]
#: Smaller arrays are copied.
_LEAST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
#: A reader with this many changes put aside, or with half the size of its array, needs no more of
#: them: the array is put aside as it is.
_MOST_ASIDES = 256


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy: the owner itself is to have it."""
    return array.copy()


def unguarded(array: NDArray[Any], indices: Int64 | None) -> None:
    """Announce nothing: nobody reads."""
    del array, indices


_Readers = list["weakref.ref[FrozenArray]"]


class FrozenArray:
    """What an array held when it was frozen.

    Attributes:
        dtype: Of the array.
        shape: Of the array.
        nbytes: Of the array.
    """

    def __init__(self, array: NDArray[Any], readers: _Readers) -> None:
        """Stand for a contiguous array; `Freezer.freeze` makes these."""
        self.dtype, self.shape, self.nbytes = array.dtype, array.shape, array.nbytes
        self._array, self._readers = array, readers
        # First entry, which, values.
        self._aside: list[tuple[int, Int64 | None, NDArray[Any] | StoredCopy]] = []
        self._aside_bytes = 0
        self.first = 0  # the first entry that has not been read
        readers.append(weakref.ref(self))

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return int(self.shape[0])

    def again(self) -> FrozenArray:
        """Return another one of the same moment, for a further reader; of one that is not read."""
        other = FrozenArray(self._array, self._readers)
        other._aside, other._aside_bytes = list(self._aside), self._aside_bytes
        return other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a copy of the whole."""
        del copy
        whole = self._copy(0, self._array.size).reshape(self.shape)
        return whole if dtype is None else whole.astype(dtype)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes, once, in order; memory for what was read is free."""
        size = max(1, _PIECE_BYTES // self.dtype.itemsize)
        for start in range(0, self._array.size, size):
            stop = min(start + size, self._array.size)
            piece = self._copy(start, stop)
            self.first = stop
            yield piece.data.cast("B")
        self._aside.clear()

    def put_aside(
        self, first: int, indices: Int64 | None, values: NDArray[Any] | StoredCopy
    ) -> None:
        """Keep values that are about to change: of these entries, or of all from `first` on."""
        self._aside.append((first, indices, values))
        self._aside_bytes += values.nbytes + (0 if indices is None else indices.nbytes)

    @property
    def has_much_aside(self) -> bool:
        """Whether further changes are better put aside as the whole array."""
        return len(self._aside) >= _MOST_ASIDES or self._aside_bytes > self.nbytes // 2

    def _copy(self, start: int, stop: int) -> NDArray[Any]:
        piece = self._array.reshape(-1)[start:stop].copy()
        for first, indices, values in reversed(list(self._aside)):  # the oldest ones count
            if indices is None:
                piece[:] = values[start - first : stop - first]
            else:
                low, high = indices.searchsorted((start, stop))
                piece[indices[low:high] - start] = values[low:high]
        return piece


class Freezer:
    """Knows what is frozen of its owner's arrays.

    Attributes:
        is_on: Whether there are readers beside the owner; if not, `freeze` copies.
    """

    def __init__(self) -> None:
        from thinwire.ops.buffers import copied

        self.is_on = False
        self._copy: Copy = copied
        self._found: dict[int, _Readers] = {}  # by id of the array

    def turn_on(self, copy: Copy) -> None:
        """Expect readers; `copy` makes the copy of an array that is put aside."""
        self.is_on, self._copy = True, copy

    def freeze(self, array: NDArray[Any]) -> Any:
        """Return what stands for a copy of an array: a `FrozenArray` if that is worth it."""
        if not self.is_on or array.nbytes < _LEAST_BYTES or not array.flags.c_contiguous:
            return array.copy()
        return FrozenArray(array, self._found.setdefault(id(array), []))

    def before_change(self, array: NDArray[Any], indices: Int64 | None = None) -> None:
        """Put aside what readers still need; see `BeforeChange`."""
        if not self._found or (found := self._found.get(id(array))) is None:
            return
        readers = [each for reference in found if (each := reference()) is not None]
        readers = [each for each in readers if each.first < array.size]
        first = min((each.first for each in readers), default=array.size)
        if first < array.size:
            flat = array.reshape(-1)
            values: NDArray[Any] | StoredCopy
            if any(each.has_much_aside for each in readers):
                indices = None  # one copy serves all
            if indices is None:
                values = self._copy(flat[first:])
            else:
                indices = indices[indices.searchsorted(first) :]
                values = flat[indices]
            for each in readers:
                each.put_aside(first, indices, values)
            if indices is None:  # they need nothing more of it
                readers = []
        found[:] = [weakref.ref(each) for each in readers]
        if not found:
            del self._found[id(array)]

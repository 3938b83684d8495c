"""Copy-on-write snapshots of arrays, read in pieces while their owner changes the arrays.

The owner of an array calls `before_change` of its `Freezer` before each change. Before an array
changes, its `Freezer` saves only the old values of entries that a reader of a snapshot has not read
yet. A reply or a checkpoint that uses a snapshot of the weights copies nothing while the weights do
not change.

One thread owns an array, changes it and takes snapshots of it. Other threads may read the snapshots
of an array. The snapshots of arrays need no lock, because owner and reader each follow an order of
operations. The thread that owns an array saves the old values before it starts to change the array.
A reader of a snapshot first copies a piece of the array, and then looks for saved old values of the
piece. If a reader of a snapshot finds no saved old value of a piece, the owner had not started to
change the piece when the reader copied it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from thinwire.ops.types import Array, Int64


class StoredCopy(Protocol):
    """Copy of an array [n] that is stored outside memory, for instance in a file."""

    @property
    def nbytes(self) -> int:
        """Size of all values of the stored array, in bytes."""

    def __getitem__(self, part: slice) -> Array:
        """Return a copy of the stored array's entries from `part.start` to `part.stop`."""


#: Function that returns the current content of an array, as a copy or as a `FrozenArray`
#: (snapshot).
Keep = Callable[[Array], Any]
#: Function that copies an array [n] into memory or into a `StoredCopy`.
Copy = Callable[[Array], "Array | StoredCopy"]
#: Function that the owner of an array calls before entries of the array change. Arguments: the
#: array, and the ascending positions of the entries (None: any entry may change).
BeforeChange = Callable[[Array, Int64 | None], None]
#: Size of the smallest array of which a Freezer takes a snapshot, in bytes. Smaller arrays are
#: copied.
_LEAST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
#: Largest number of saved changes of one snapshot. At this number, or at half the bytes of the
#: array, the next change saves the whole array once, and the freezer need not save later changes.
_MOST_ASIDES = 256


def copied(array: Array) -> Array:
    """Return a copy of an array, for a caller that has no `Freezer` for snapshots."""
    return array.copy()


def unguarded(array: Array, indices: Int64 | None) -> None:
    """Do nothing: the default function to call before a change of an array without snapshots."""


_Readers = list["weakref.ref[FrozenArray]"]


class FrozenArray:
    """Snapshot of an array: the content that the array had when the snapshot was taken.

    Attributes:
        dtype: Data type of the array in the snapshot.
        shape: Shape of the array in the snapshot.
        nbytes: Size of the snapshot's whole content, in bytes.
        first: Position of the first array entry that `pieces` has not yielded yet. The freezer need
            not save entries before `first`.
    """

    def __init__(self, array: Array, readers: _Readers) -> None:
        """Take a snapshot of a contiguous array.

        Only `Freezer.freeze` calls the constructor of `FrozenArray`.

        Args:
            array: Array of which to take a snapshot; the array's owner calls
                `Freezer.before_change` before each change.
            readers: The freezer's list of snapshots of the array, to which the new snapshot is
                added.
        """
        self.dtype, self.shape, self.nbytes = array.dtype, array.shape, array.nbytes
        self._array, self._readers = array, readers
        # Saved old values of the snapshot's array, oldest change first: (first entry, positions,
        # old values). Positions None: the change saved all entries from the first entry on.
        self._aside: list[tuple[int, Int64 | None, Array | StoredCopy]] = []
        self._aside_bytes = 0
        self.first = 0
        # A weak reference is stored, so that the owner stops saving values for a snapshot that its
        # reader has dropped.
        readers.append(weakref.ref(self))

    def __len__(self) -> int:
        """Return the length of the frozen array's first axis."""
        return int(self.shape[0])

    def again(self) -> FrozenArray:
        """Return a second snapshot of an array's content, for another reader.

        `again` must be called before a reader has read the original snapshot, because the two
        snapshots share the saved old values.
        """
        other = FrozenArray(self._array, self._readers)
        other._aside, other._aside_bytes = list(self._aside), self._aside_bytes
        return other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return a copy of the whole array as it was when the snapshot was taken."""
        whole = self._copy(0, self._array.size).reshape(self.shape)
        return whole if dtype is None else whole.astype(dtype)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the snapshot's bytes piece by piece, once; then release the saved old values."""
        size = max(1, _PIECE_BYTES // self.dtype.itemsize)
        for start in range(0, self._array.size, size):
            stop = min(start + size, self._array.size)
            piece = self._copy(start, stop)
            # `first` is set only after the copy: the owner saves no entries below `first`. If the
            # owner still reads the old value of `first`, it saves too many entries, which does no
            # harm.
            self.first = stop
            yield piece.data.cast("B")
        self._aside.clear()

    def put_aside(self, first: int, indices: Int64 | None, values: Array | StoredCopy) -> None:
        """Save the old values of entries that the owner of the array is about to change.

        Args:
            first: Position of the first array entry that a reader of a snapshot has not read yet.
            indices: [k] int64 ascending positions of `values`; None if `values` holds all entries
                from `first` on.
            values: Old values of the array entries that are about to change.
        """
        self._aside.append((first, indices, values))
        self._aside_bytes += values.nbytes + (0 if indices is None else indices.nbytes)

    @property
    def has_much_aside(self) -> bool:
        """True if a copy of the whole array is cheaper than saving old values at each change."""
        return len(self._aside) >= _MOST_ASIDES or self._aside_bytes > self.nbytes // 2

    def _copy(self, start: int, stop: int) -> Array:
        # The piece is copied first, then saved values are looked up. In the opposite order, the
        # owner could save and change an entry between the look-up and the copy, and the piece would
        # hold the new value.
        piece = self._array.reshape(-1)[start:stop].copy()
        # `list` takes a snapshot, because the owner's thread may append meanwhile. The oldest saved
        # change is written last: it holds the value at the time of the snapshot, and newer saved
        # changes hold changed values.
        for first, indices, values in reversed(list(self._aside)):
            if indices is None:
                piece[:] = values[start - first : stop - first]
            else:
                low, high = indices.searchsorted((start, stop))
                piece[indices[low:high] - start] = values[low:high]
        return piece


class Freezer:
    """Takes copy-on-write snapshots of the arrays of one owner (a thread).

    The owner of the arrays calls `before_change` before each change.

    Attributes:
        is_on: True if `freeze` returns snapshots that other threads may read. False if `freeze`
            returns copies.
    """

    def __init__(self) -> None:
        from thinwire.ops.buffers import copied

        self.is_on = False
        self._copy: Copy = copied
        # Python id of an array -> snapshots of the array. The id cannot pass to another array while
        # a snapshot is in use, because the snapshot refers to the array. References to dropped
        # snapshots are dead.
        self._found: dict[int, _Readers] = {}

    def turn_on(self, copy: Copy) -> None:
        """Make `freeze` return copy-on-write snapshots of arrays instead of copies.

        Args:
            copy: Function that copies a whole array, when the freezer must save all of its old
                values.
        """
        self.is_on, self._copy = True, copy

    def freeze(self, array: Array) -> Any:
        """Return an array's content: a `FrozenArray` of a large array, a copy of a small array."""
        if not self.is_on or array.nbytes < _LEAST_BYTES or not array.flags.c_contiguous:
            return array.copy()
        return FrozenArray(array, self._found.setdefault(id(array), []))

    @property
    def has_readers(self) -> bool:
        """False if no snapshot needs old values, so that `before_change` has no effect."""
        return bool(self._found)

    def before_change(self, array: Array, indices: Int64 | None = None) -> None:
        """Save old values that readers of snapshots still need, before the owner changes an array.

        Args:
            array: Array that the owner is about to change.
            indices: [k] int64 ascending positions of the entries that will change; None: any entry
                may change.
        """
        if not self._found or (references := self._found.get(id(array))) is None:
            return
        readers = [reader for reference in references if (reader := reference()) is not None]
        readers = [reader for reader in readers if reader.first < array.size]
        # Save the entries from the position of the reader that has read least, so that one saved
        # copy serves all readers.
        first = min((reader.first for reader in readers), default=array.size)
        if first < array.size:
            flat = array.reshape(-1)
            values: Array | StoredCopy
            if any(reader.has_much_aside for reader in readers):
                indices = None  # the value None means to save the whole array
            if indices is None:
                values = self._copy(flat[first:])
            else:
                indices = indices[indices.searchsorted(first) :]
                values = flat[indices]
            for reader in readers:
                reader.put_aside(first, indices, values)
            # The saved copy now holds all entries that the readers of snapshots have not read, so
            # later changes do not concern these readers.
            if indices is None:
                readers = []
        references[:] = [weakref.ref(reader) for reader in readers]
        if not references:
            del self._found[id(array)]

"""Parts of a checkpoint: objects of an object store with the bytes of a state's arrays."""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from thinwire.runtime.persistence.object_store import ObjectMissingError, ObjectStore


class Portions:
    """Divides a sequence of byte pieces into portions of given sizes, without copying the bytes.

    Args:
        pieces: Pieces of bytes (one-dimensional, of format "B"), of any sizes.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the next ``num_bytes`` bytes in pieces; there must be that many bytes left."""
        while num_bytes:
            if not len(self._rest):
                self._rest = next(self._pieces)
            piece, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(piece)
            yield piece


class PartsReader:
    """Readable file of the joined bytes of all parts of a checkpoint; holds one part open.

    Attributes:
        num_bytes: Number of bytes of all parts, in total.

    Args:
        store: Object store of the parts.
        parts: Records of the parts in their order, from the log entry of the checkpoint.
    """

    def __init__(self, store: ObjectStore, parts: list[dict[str, Any]]) -> None:
        self._store, self._parts = store, parts
        # starts[i]: offset of the first byte of part i; the last item is the number of all bytes
        self._starts = list(itertools.accumulate((part["bytes"] for part in parts), initial=0))
        self.num_bytes: int = self._starts[-1]
        self._position = 0
        self._number = -1  # number of the open part; -1: none
        self._file: BinaryIO = io.BytesIO()

    def __enter__(self) -> PartsReader:
        """Return this reader, which is closed at the end of the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the open part."""
        self._file.close()

    def seek(self, offset: int, /) -> None:
        """Make a byte offset the position of the next read."""
        self._position = offset

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill a buffer from the current position on; return the number of bytes that exist.

        Raises:
            ValueError: A part is missing or has another size than its record.
            StorageError: The storage of the parts failed.
            OSError: The disk cannot read the bytes of a part.
        """
        num_read = 0
        while num_read < len(buffer) and self._position < self.num_bytes:
            number = bisect.bisect_right(self._starts, self._position) - 1
            self._open(number)
            self._file.seek(self._position - self._starts[number])
            count: int = self._file.readinto(buffer[num_read:])  # type: ignore[attr-defined]
            if not count:
                break
            num_read += count
            self._position += count
        return num_read

    def _open(self, number: int) -> None:
        """Open a part instead of the open part, and check the part's size."""
        if number == self._number:
            return
        self._file.close()
        name, expected = str(self._parts[number]["name"]), self._parts[number]["bytes"]
        try:
            self._file, self._number = self._store.open(name), number
        except ObjectMissingError as error:
            raise ValueError(f"{name} is missing") from error
        size = self._file.seek(0, io.SEEK_END)
        if size != expected:
            raise ValueError(f"object {name} has {size} bytes; expected {expected}")

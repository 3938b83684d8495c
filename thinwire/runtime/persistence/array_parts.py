"""Parts of a checkpoint: objects of an object store with the bytes of a state's arrays."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from thinwire.runtime.persistence.object_store import ObjectMissingError, ObjectStore


class PartsReader:
    """Reader of the joined bytes of all parts of a checkpoint, in order; holds one part open.

    Attributes:
        num_bytes: Number of bytes of all parts, in total.

    Args:
        store: Object store of the parts.
        parts: Records of the parts in their order, from the log entry of the checkpoint.
    """

    def __init__(self, store: ObjectStore, parts: list[dict[str, Any]]) -> None:
        self.num_bytes: int = sum(part["bytes"] for part in parts)
        self._store, self._parts = store, iter(parts)
        self._file: BinaryIO = io.BytesIO()

    def fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes of the parts.

        Raises:
            ValueError: A part is missing or has another size than its record.
            StorageError: The storage of the parts failed.
            OSError: The disk cannot read the bytes of a part.
        """
        while len(buffer):
            count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                self._open_next()
            buffer = buffer[count:]

    def close(self) -> None:
        """Close the open part."""
        self._file.close()

    def _open_next(self) -> None:
        self.close()
        part = next(self._parts, None)
        if part is None:
            raise ValueError("the parts of the checkpoint end before the last array")
        try:
            self._file = self._store.open(str(part["name"]))
        except ObjectMissingError as error:
            raise ValueError(f"{part['name']} is missing") from error
        size = self._file.seek(0, io.SEEK_END)
        if size != part["bytes"]:
            raise ValueError(f"object {part['name']} has {size} bytes; expected {part['bytes']}")
        self._file.seek(0)

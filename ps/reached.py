"""How far a shard has come, on disk: one that comes back knows how many updates it lacks.

Twenty bytes, written over in place after each update, before anybody is told of it. Like a journal
they outlive the process, and not a crash of the machine.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import struct
import zlib

from absl import logging

_NAME = "reached.bin"
_VALUES = struct.Struct("<QQ")  # generation, version
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the values


@dataclasses.dataclass(frozen=True)
class Mark:
    """The last version of one life of a shard."""

    generation: int
    version: int


def read(folder: pathlib.Path) -> Mark | None:
    """Return what was written last; None where nothing was, or it is damaged."""
    try:
        data = (folder / _NAME).read_bytes()
        (checksum,) = _CHECKSUM.unpack(data[_VALUES.size :])
        values = data[: _VALUES.size]
        return Mark(*_VALUES.unpack(values)) if zlib.crc32(values) == checksum else None
    except (OSError, struct.error):
        return None


class Reached:
    """Writes the marks of one life of a shard (writer thread)."""

    def __init__(self, folder: pathlib.Path, mark: Mark) -> None:
        """Begin at `mark`, which is not written: nothing has been applied in this life."""
        self._folder, self._generation, self._version = folder, mark.generation, mark.version
        self._descriptor: int | None = None
        self._failed = False

    def note(self, version: int) -> None:
        """Write down that this version was reached; a disk that refuses is asked no more."""
        if version == self._version or self._failed:
            return
        self._version = version
        values = _VALUES.pack(self._generation, version)
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._folder / _NAME, flags, 0o644)
            os.pwrite(self._descriptor, values + _CHECKSUM.pack(zlib.crc32(values)), 0)
        except OSError as error:
            self._failed = True
            path = self._folder / _NAME
            logging.error(
                "cannot write %s: %s. Updates that are lost when this PS dies are then counted "
                "only as far as workers have seen them.", path, error.strerror or error,
            )  # fmt: skip

    def close(self) -> None:
        """Write nothing more."""
        self._failed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

"""The journal of one shard: what its core was told since the last snapshot, in order.

A file is begun with each snapshot and named in it. Its first record, the head, says what it is: the
settings of the core, and which file it goes on from, up to where. So the files from a snapshot's
own one on are all that happened to the core after that snapshot, across restarts.

Records are written before anything is done about the event, straight to the system: nothing is lost
when the process dies. They are not synced: when the machine dies, the snapshot is what is left.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, BinaryIO

from ops.types import State
from ps import events, journal_records
from ps.journal_records import Coder, CutShort, Damaged

#: A snapshot is due when the journal is so many times as large as the model ...
_MODELS = 4
#: ... and at least this large.
LEAST_BYTES = 64 << 20
_MAGIC = b"TWJRNL1\n"
_NAME = re.compile(r"journal-(\d{6,})\.bin")


class JournalFailed(Exception):
    """The disk does not take the journal; the message says where and what to do."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in a journal: a file, and how many bytes of it."""

    number: int
    offset: int


def path_of(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the file of this number."""
    return folder / f"journal-{number:06d}.bin"


def numbers(folder: pathlib.Path) -> list[int]:
    """Return the numbers of all files in a folder, ascending."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def contents(path: pathlib.Path, most_bytes: int = -1) -> memoryview:
    """Return the records of a file; offsets into it count from its first record.

    Args:
        path: The file.
        most_bytes: To be read of it; -1: all.

    Raises:
        Damaged: It is no journal, or ends before that can be told (CutShort).
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror or error}") from error
    if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
        raise CutShort(f"ends after {len(data)} bytes, before its head")
    if data[: len(_MAGIC)] != _MAGIC:
        raise Damaged(f"begins with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
    return memoryview(data)[len(_MAGIC) :]


def remove_before(folder: pathlib.Path, number: int) -> None:
    """Remove files that no snapshot needs any more."""
    for old in numbers(folder):
        if old < number:
            path_of(folder, old).unlink(missing_ok=True)


def _create(path: pathlib.Path) -> BinaryIO:
    return open(path, "xb", buffering=0)  # type: ignore[return-value]  # unbuffered


class Journal:
    """Writes the journal of one life of a shard (writer thread).

    Args:
        folder: Of the shard's checkpoints.
        coder: Of its events.
        model_bytes: Size of its weights.
        after: Where the earlier life's journal ended; None: there is nothing to go on from.
        create: Makes a new file, without a buffer.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        coder: Coder,
        model_bytes: int,
        after: Place | None = None,
        create: Callable[[pathlib.Path], BinaryIO] = _create,
    ) -> None:
        self.folder, self._coder, self._create = folder, coder, create
        self._most_bytes = max(LEAST_BYTES, _MODELS * model_bytes)
        self._file: BinaryIO | None = None
        self._place = after or Place(0, 0)
        self.num_records = 0
        self.num_bytes = 0  # of all files

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot, which begins another file."""
        return self._place.offset > self._most_bytes

    @property
    def bytes_since_snapshot(self) -> int:
        """Size of the present file: what a restart would read again."""
        return self._place.offset

    def begin(self, settings: State) -> int:
        """Begin another file, for what follows the state that the core has now; return its number.

        Args:
            settings: What the core was made with, as plain data without arrays.

        Raises:
            JournalFailed: The disk refused.
        """
        self.close()
        after = dataclasses.asdict(self._place) if self._place.number else None
        number = max([self._place.number, *numbers(self.folder)]) + 1
        self._place = Place(number, 0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._create(path_of(self.folder, number))
        except OSError as error:
            raise self._failure(error) from error
        self._write([_MAGIC])
        self._place = Place(number, 0)
        self._write(journal_records.head({"after": after, "settings": settings}))
        return number

    def append(self, event: events.Event, now: float) -> None:
        """Write down an event that the core is about to be told.

        Raises:
            JournalFailed: The disk refused; what is written of the record counts as nothing.
        """
        self._write(self._coder.code(event, now))
        self.num_records += 1

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, pieces: list[Any]) -> None:
        if self._file is None:
            raise ValueError("the journal is closed")
        size = 0
        try:
            for piece in pieces:
                rest = memoryview(piece)
                size += len(rest)
                while len(rest):
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failure(error) from error
        self.num_bytes += size
        self._place = Place(self._place.number, self._place.offset + size)

    def _failure(self, error: OSError) -> JournalFailed:
        path = path_of(self.folder, self._place.number)
        return JournalFailed(
            f"cannot write the journal {path}: {error.strerror or error}. Nothing that was "
            "acknowledged is lost: make room on that disk, and start the same command again; or "
            "give --journal=off, and the run goes back to its last snapshot whenever a PS dies."
        )

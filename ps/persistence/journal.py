"""The journal of one shard: what its core was told since the last snapshot, in order.

A file is begun with each snapshot and named in it. Its first record, the head, says what it is: the
settings of the core, and which file it goes on from, up to where. So the files from a snapshot's
own one on are all that happened to the core after that snapshot, across restarts.

Records are written before anything is done about the event, straight to the system: nothing is lost
when the process dies. They are not synced: when the machine dies, the snapshot is what is left.

A core whose events are written down before anything comes of them.

How far a shard has come, on disk: one that comes back knows how many updates it lacks.

Twenty bytes, written over in place after each update, before anybody is told of it. Like a journal
they outlive the process, and not a crash of the machine.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from absl import logging

from thinwire.ops.types import State
from thinwire.ps.core import events, faults, soft_state
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence import journal_format
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, TruncatedRecord

#: A snapshot is due when the journal is so many times as large as the model ...
_MODELS = 4
#: ... and at least this large.
LEAST_BYTES = 64 << 20
_MAGIC = b"TWJRNL1\n"
_NAME = re.compile(r"journal-(\d{6,})\.bin")


class JournalFailed(Exception):
    """The disk does not take the journal; the message says where and what to do."""


@dataclasses.dataclass(frozen=True)
class JournalPosition:
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
        raise DamagedRecord(f"cannot be read: {error.strerror or error}") from error
    if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
        raise TruncatedRecord(f"ends after {len(data)} bytes, before its head")
    if data[: len(_MAGIC)] != _MAGIC:
        raise DamagedRecord(f"begins with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
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
        coder: EventCoder,
        model_bytes: int,
        after: JournalPosition | None = None,
        create: Callable[[pathlib.Path], BinaryIO] = _create,
    ) -> None:
        self.folder, self._coder, self._create = folder, coder, create
        self._most_bytes = max(LEAST_BYTES, _MODELS * model_bytes)
        self._file: BinaryIO | None = None
        self._place = after or JournalPosition(0, 0)
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
        self._place = JournalPosition(number, 0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._create(path_of(self.folder, number))
        except OSError as error:
            raise self._failure(error) from error
        self._write([_MAGIC])
        self._place = JournalPosition(number, 0)
        self._write(journal_format.head({"after": after, "settings": settings}))
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
        self._place = JournalPosition(self._place.number, self._place.offset + size)

    def _failure(self, error: OSError) -> JournalFailed:
        path = path_of(self.folder, self._place.number)
        return JournalFailed(
            f"cannot write the journal {path}: {error.strerror or error}. Nothing that was "
            "acknowledged is lost: make room on that disk, and start the same command again; or "
            "give --journal=off, and the run goes back to its last snapshot whenever a PS dies."
        )


_REACHED_NAME = "reached.bin"
_VALUES = struct.Struct("<QQ")  # generation, version
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the values


@dataclasses.dataclass(frozen=True)
class HighWaterMark:
    """The last version of one life of a shard."""

    generation: int
    version: int


def read(folder: pathlib.Path) -> HighWaterMark | None:
    """Return what was written last; None where nothing was, or it is damaged."""
    try:
        data = (folder / _REACHED_NAME).read_bytes()
        (checksum,) = _CHECKSUM.unpack(data[_VALUES.size :])
        values = data[: _VALUES.size]
        return HighWaterMark(*_VALUES.unpack(values)) if zlib.crc32(values) == checksum else None
    except (OSError, struct.error):
        return None


class HighWaterLog:
    """Writes the marks of one life of a shard (writer thread)."""

    def __init__(self, folder: pathlib.Path, mark: HighWaterMark) -> None:
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
                self._descriptor = os.open(self._folder / _REACHED_NAME, flags, 0o644)
            os.pwrite(self._descriptor, values + _CHECKSUM.pack(zlib.crc32(values)), 0)
        except OSError as error:
            self._failed = True
            path = self._folder / _REACHED_NAME
            logging.error(
                "cannot write %s: %s. Updates that are lost when this PS dies are then counted "
                "only as far as workers have seen them.",
                path,
                error.strerror or error,
            )

    def close(self) -> None:
        """Write nothing more."""
        self._failed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


#: Why a run ends whose journal cannot be written any more.
STOP_REASON = "journal_failed"


class JournaledCore:
    """Writes down, then handles; without a journal it only handles.

    An event of a worker that the core does not survive is refused: the event that says so is
    written down behind it, by which a replay knows not to try it again.

    When the disk refuses, the run ends: what the core has not been told by then it is not told. A
    following shard cannot end a run by itself; until shard 0 does, it answers no push, for it would
    not be applied.

    Attributes:
        journal: None: nothing is written.
        failure: What went wrong; None: nothing.
        about: What the summary says beside the counts.
        recovered: What earlier journals brought back, all lives together.
        reached: Where to note how far the core has come; None: nowhere.
        on_failure: Called once, when the disk has refused.
    """

    def __init__(self, core: PsCore) -> None:
        """Begin without a journal."""
        self.core = core
        self.journal: Journal | None = None
        self.failure: JournalFailed | None = None
        self.about: dict[str, Any] = {}
        self.recovered: State = {"replayed": 0, "cuts": []}
        self.reached: HighWaterLog | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._settings: State = {}
        self._writes = self._ends = False

    def write_to(self, journal: Journal, settings: State) -> None:
        """Write to this journal from the next `begin` on."""
        self.journal, self._settings, self._writes = journal, settings, True

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Tell the core, or, where that cannot be written down, tell it to end the run."""
        self._write(event, now)
        if self.failure is not None and not self._ends:
            self._ends = True
            return self.core.handle(events.Stop(STOP_REASON), now)
        follows = not self.core.membership.leads
        if self.failure is not None and follows and isinstance(event, events.Push):
            return []
        actions = self._tell(event, now)
        if self.reached is not None:
            self.reached.note(self.core.version)
        if self.journal is not None and self._writes and self.journal.is_due:
            actions.append(events.SaveSnapshot(self.core.version, self.core.snapshot()))
        return actions

    def _write(self, event: events.Event, now: float) -> None:
        if self.journal is None or not self._writes:
            return
        try:
            self.journal.append(event, now)
        except JournalFailed as failure:
            self._fail(failure)

    def _tell(self, event: events.Event, now: float) -> list[events.Action]:
        """Tell the core; what it raises over an event of a worker is that worker's end alone."""
        try:
            return self.core.handle(event, now)
        except Exception as error:
            if not isinstance(event, events.OfWorker):
                raise
            failed = faults.failed(event, error)
        self._write(failed, now)
        return self.core.handle(failed, now)

    def begin(self) -> State:
        """Begin another file; return what the snapshot of the present state must say of it."""
        if self.journal is None or not self._writes:
            return {"recovered": self.recovered}
        try:
            number = self.journal.begin(self._settings)
        except JournalFailed as failure:
            self._fail(failure)
            return {"recovered": self.recovered}
        soft = soft_state.save(self.core)
        return {"recovered": self.recovered, "journal": number, "soft": soft}

    def consistent(self, state: State) -> State:
        """Return the core's durable state as it is now, where `state` may be of a moment ago.

        A run that ends takes its last snapshot before everybody has been answered.
        """
        return self.core.snapshot() if self._writes and self.core.stop_reason else state

    def close(self) -> None:
        """Write nothing more: the next snapshot is the last one and holds everything."""
        self._writes = False
        for file in (self.journal, self.reached):
            if file is not None:
                file.close()

    def summary(self) -> dict[str, Any]:
        """Return the block of the run's summary."""
        journal = self.journal
        counts = {"events": journal.num_records, "bytes": journal.num_bytes} if journal else {}
        return {"journal": {**self.about, **self.recovered, **counts}} if self.about else {}

    def _fail(self, failure: JournalFailed) -> None:
        self.failure = failure
        logging.error("%s", failure)
        self.close()
        self.on_failure()

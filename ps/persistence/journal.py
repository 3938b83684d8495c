"""The write-ahead journal of one shard: every event of its core since the last snapshot, in order.

Each snapshot begins a file and names it. The file's first record, its head, holds the settings of
the core, and which file it continues, up to which byte. So the files from a snapshot's own one on
hold everything that happened to the core after that snapshot, across restarts.

An event is appended before the core handles it (`JournaledCore`), and the version that an update
leads to is written before any reply leaves the shard (`HighWaterLog`): a restarted shard knows how
many updates it lacks. Both are written unbuffered and not synced, so they survive the death of the
process; after a crash of the machine the last snapshot is what remains.
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

from thinwire.ops.printable import printable_traceback
from thinwire.ops.types import State
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence import journal_format
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, TruncatedRecord

#: The stop reason of a run whose journal cannot be written any more.
STOP_REASON = "journal_failed"
#: A snapshot is due when the journal is this many times as large as the model ...
_MODELS = 4
#: ... and at least this large.
LEAST_BYTES = 64 << 20
#: 1: by attributes of the core; 2: draws without steps; 3: no joiners; 4: blocks span one slot.
_MAGIC = b"TWJRNL6\n"
_READABLE = (b"TWJRNL4\n", b"TWJRNL5\n", _MAGIC)
_NAME = re.compile(r"journal-(\d{6,})\.bin")
_MARK_NAME = "reached.bin"
_VALUES = struct.Struct("<QQ")  # generation, version
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the values


class JournalFailed(Exception):
    """The journal cannot be written; the message names the file and the remedy."""


class Uncodable(Exception):
    """An event cannot be written down: a value of its sender is of no legal kind.

    Attributes:
        cause: What the coder has raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
        most_bytes: How many to read; -1: all.

    Raises:
        DamagedRecord: It is not a journal (TruncatedRecord: it ends before its head).
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes)
    except OSError as error:
        raise DamagedRecord(f"cannot be read: {error.strerror or error}") from error
    if len(data) < len(_MAGIC) and any(magic.startswith(data) for magic in _READABLE):
        raise TruncatedRecord(f"ends after {len(data)} bytes, before its head")
    if data[: len(_MAGIC)] not in _READABLE:
        raise DamagedRecord(f"begins with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
    return memoryview(data)[len(_MAGIC) :]


def remove_before(folder: pathlib.Path, number: int) -> None:
    """Remove the files before this number, which no snapshot needs any more."""
    for old in numbers(folder):
        if old < number:
            path_of(folder, old).unlink(missing_ok=True)


def _create(path: pathlib.Path) -> BinaryIO:
    return open(path, "xb", buffering=0)


class Journal:
    """Writes the journal of one generation of a shard (writer thread).

    Args:
        folder: Of the shard's checkpoints.
        coder: Of its events.
        model_bytes: Size of its weights.
        after: Where the journal of the generation before ended; None: there is nothing to continue.
        create: Creates a file, unbuffered.
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
        """Size of the present file, which a restart would replay."""
        return self._place.offset

    def begin(self, settings: State) -> int:
        """Begin another file, for the events after the core's present state; return its number.

        Args:
            settings: Of the core, as plain data without arrays.

        Raises:
            JournalFailed: The disk failed.
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
        """Append an event that the core is about to handle.

        Raises:
            JournalFailed: The disk failed; a record that is only partly written does not count.
            Uncodable: Nothing was written.
        """
        try:
            record = self._coder.code(event, now)
        except Exception as error:
            raise Uncodable(error) from error
        self._write(record)
        self.num_records += 1

    def close(self) -> None:
        """Close the file; nothing more can be appended."""
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
            "acknowledged is lost: free space on that disk, and start the same command again; or "
            "set --journal=off, and the run returns to its last snapshot whenever a PS dies."
        )


@dataclasses.dataclass(frozen=True)
class HighWaterMark:
    """The last version that a generation of a shard has reached."""

    generation: int
    version: int


def read_mark(folder: pathlib.Path) -> HighWaterMark | None:
    """Return the newest mark; None if there is none, or it is damaged."""
    try:
        data = (folder / _MARK_NAME).read_bytes()
        (checksum,) = _CHECKSUM.unpack(data[_VALUES.size :])
        values = data[: _VALUES.size]
        return HighWaterMark(*_VALUES.unpack(values)) if zlib.crc32(values) == checksum else None
    except (OSError, struct.error):
        return None


class HighWaterLog:
    """Writes the marks of one generation of a shard (writer thread).

    A mark is 20 bytes, overwritten in place.
    """

    def __init__(self, folder: pathlib.Path, mark: HighWaterMark) -> None:
        """Begin at `mark`, which is not written: this generation has applied nothing yet."""
        self._folder, self._generation, self._version = folder, mark.generation, mark.version
        self._descriptor: int | None = None
        self._failed = False

    def record(self, version: int) -> None:
        """Record that this version was reached; after a failure of the disk nothing is written."""
        if version == self._version or self._failed:
            return
        self._version = version
        values = _VALUES.pack(self._generation, version)
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._folder / _MARK_NAME, flags, 0o644)
            os.pwrite(self._descriptor, values + _CHECKSUM.pack(zlib.crc32(values)), 0)
        except OSError as error:
            self._failed = True
            path = self._folder / _MARK_NAME
            logging.error(
                "cannot write %s: %s. Updates that are lost when this PS dies are counted only as "
                "far as workers have seen them.",
                path,
                error.strerror or error,
            )

    def close(self) -> None:
        """Close the file; later marks are ignored."""
        self._failed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JournaledCore:
    """A core whose events are written before it handles them; without a journal it only handles.

    A worker's event over which the core raises is rejected: an event that records the failure is
    appended behind it, so that a replay does not try it again. An event that cannot be coded for
    the journal is rejected in the same way, before the core has it.

    When the disk fails, the run ends, and the core handles nothing that is not in the journal. A
    following shard cannot end a run by itself; until shard 0 does, it replies to no push, for the
    push would not be applied.

    Attributes:
        journal: None: nothing is written.
        failure: Why the journal cannot be written; None: it can.
        about: What the run's summary holds on the journal besides the counts.
        recovered: What earlier journals restored, over all generations.
        high_water: Records the versions that the core reaches; None: nobody does.
        on_failure: Called once, when the disk has failed.
    """

    def __init__(self, core: PsCore) -> None:
        """Begin without a journal."""
        self.core = core
        self.journal: Journal | None = None
        self.failure: JournalFailed | None = None
        self.about: dict[str, Any] = {}
        self.recovered: State = {"replayed": 0, "cuts": []}
        self.high_water: HighWaterLog | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._settings: State = {}
        self._writes = self._ends = False

    def write_to(self, journal: Journal, settings: State) -> None:
        """Write to this journal from the next `begin` on."""
        self.journal, self._settings, self._writes = journal, settings, True

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Have the core handle an event; end the run if the event cannot be written first."""
        event = self._written(event, now)
        if self.failure is not None and not self._ends:
            self._ends = True
            return self.core.handle(events.Stop(STOP_REASON), now)
        follows = not self.core.membership.leads
        if self.failure is not None and follows and isinstance(event, events.Push):
            return []
        actions = self._handle_or_reject(event, now)
        if self.high_water is not None:
            self.high_water.record(self.core.version)
        if self.journal is not None and self._writes and self.journal.is_due:
            actions.append(events.SaveSnapshot(self.core.version, self.core.snapshot()))
        return actions

    def _written(self, event: events.Event, now: float) -> events.Event:
        """Write an event; return it, or the rejection of its sender if it cannot be coded."""
        try:
            self._write(event, now)
            return event
        except Uncodable as uncodable:
            if not isinstance(event, events.OfWorker):
                raise
            failed = events.Failed.of(event, uncodable.cause)
            _log_failure(event, failed, uncodable.cause)
        self._write(failed, now)
        return failed

    def _write(self, event: events.Event, now: float) -> None:
        if self.journal is None or not self._writes:
            return
        try:
            self.journal.append(event, now)
        except JournalFailed as failure:
            self._fail(failure)

    def _handle_or_reject(self, event: events.Event, now: float) -> list[events.Action]:
        """Have the core handle an event; if it raises over a worker's, only that worker fails."""
        try:
            return self.core.handle(event, now)
        except Exception as error:
            if not isinstance(event, events.OfWorker):
                raise
            failed = events.Failed.of(event, error)
            _log_failure(event, failed, error)
        self._write(failed, now)
        return self.core.handle(failed, now)

    def begin(self) -> State:
        """Begin another file; return what the snapshot of the present state must hold on it."""
        if self.journal is None or not self._writes:
            return {"recovered": self.recovered}
        try:
            number = self.journal.begin(self._settings)
        except JournalFailed as failure:
            self._fail(failure)
            return {"recovered": self.recovered}
        soft = self.core.state_dict(soft=True)
        return {"recovered": self.recovered, "journal": number, "soft": soft}

    def consistent(self, state: State) -> State:
        """Return the core's present durable state, where `state` may be older than the file.

        A run that ends takes its last snapshot before every worker has received its last reply.
        """
        return self.core.snapshot() if self._writes and self.core.stop_reason else state

    def close(self) -> None:
        """Stop writing: the next snapshot is the last one and holds everything."""
        self._writes = False
        for file in (self.journal, self.high_water):
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


def _log_failure(event: events.OfWorker, failed: events.Failed, error: Exception) -> None:
    logging.log_every_n_seconds(  # a client that insists must not fill the disk
        logging.ERROR,
        "cannot handle a %s of worker %d (%s); the worker is expelled, the run goes on. This is a "
        "bug of Thinwire: please report it with what follows.\n%s",
        1,
        *(type(event).__name__, event.worker, failed.cause),
        printable_traceback(error),
    )

"""The write-ahead journal of a PS shard: all events that the shard has handled since a snapshot.

Each snapshot of a shard begins a journal file and stores the file's number. The first record (head)
of a journal file holds the settings of the shard's state machine, the number of the preceding
journal file, and the byte offset at which that file ends. The journal file that a snapshot begins
and all later journal files hold every event of the shard's state machine after that snapshot,
across restarts.

`JournaledCore` appends an event to the journal before the shard's state machine handles the event.
`HighWaterLog` writes the shard's new version to disk before the shard sends any reply, so that a
restarted shard knows how many updates are lost. The journal and the high-water mark are written
unbuffered but without fsync, so they survive the death of the process. After a crash of the
machine, the shard may have only its last snapshot.
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

from thinwire.ops.policy import PolicyFailed
from thinwire.ops.printable import printable_traceback
from thinwire.ops.types import State
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence import journal_format
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, TruncatedRecord

#: Stop reason of a run that ended because a journal could not be written.
STOP_REASON = "journal_failed"
#: Size of a journal file, as a multiple of the model's size, above which the shard saves a snapshot
#: and begins another file. `LEAST_BYTES` is a second lower bound of the file's size.
_MODELS = 4
#: Size of a journal file, in bytes, up to which the shard needs no snapshot. Without this bound,
#: the shard would save a small model very often.
LEAST_BYTES = 64 << 20
#: First bytes of a journal file; the digit in them is the number of the file format. Earlier
#: formats: 1 stored attributes of the core; 2 had draws without steps; 3 had no joiners; in 4 a
#: block spans one slot.
_MAGIC = b"TWJRNL6\n"
_NAME = re.compile(r"journal-(\d{6,})\.bin")
_MARK_NAME = "reached.bin"
#: Generation (number of restarts) of the shard, version of its weights.
_VALUES = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")  # CRC-32 checksum of generation and version


class JournalFailed(Exception):
    """Error: a shard cannot write its journal; the message names the file and the remedy."""


class Uncodable(Exception):
    """Error: an event cannot be coded as a journal record, because of the type of one of its
    values.

    Attributes:
        cause: Exception raised when the event was coded as a journal record.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclasses.dataclass(frozen=True)
class JournalPosition:
    """A position in a journal: number of a file, and byte offset from the file's first record."""

    number: int
    offset: int


def path_of(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the path of the journal file with the given number in the folder."""
    return folder / f"journal-{number:06d}.bin"


def numbers(folder: pathlib.Path) -> list[int]:
    """Return the numbers of all journal files in a folder, in ascending order."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def contents(path: pathlib.Path, most_bytes: int = -1) -> memoryview:
    """Return the bytes of a journal file from its first record to its end.

    Args:
        path: Path of the journal file to read.
        most_bytes: Number of bytes of the journal file to read, including the magic bytes at its
            start; -1 for the whole file.

    Raises:
        DamagedRecord: The file is not a journal. The subclass TruncatedRecord means that the file
            ends before its head (first record).
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
    """Remove the journal files with numbers below `number`, which no stored snapshot needs."""
    for old in numbers(folder):
        if old < number:
            path_of(folder, old).unlink(missing_ok=True)


def _create(path: pathlib.Path) -> BinaryIO:
    return open(path, "xb", buffering=0)


class Journal:
    """Writes the journal of a shard from one restart to the next. Only the shard's writer thread
    may use the journal.

    Args:
        folder: Folder of the shard's checkpoints, which also holds the journal files.
        coder: Coder of the shard's events as journal records.
        model_bytes: Size of the shard's weights, in bytes.
        after: Position of the end of the journal from before the restart; None if there is no
            journal to continue.
        create: Function that creates an unbuffered file at a path.
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
        self.num_bytes = 0  # number of bytes written to all journal files so far

    @property
    def is_due(self) -> bool:
        """True if the journal file is so large that a snapshot (and another file) is due."""
        return self._place.offset > self._most_bytes

    @property
    def bytes_since_snapshot(self) -> int:
        """Size of the current journal file, in bytes; a restarted shard would replay this file."""
        return self._place.offset

    def begin(self, settings: State) -> int:
        """Begin a new journal file, for the events after the shard's current state.

        Args:
            settings: Settings of the shard's state machine, as plain data without arrays, for the
                head of the journal file.

        Returns:
            The number of the new journal file.

        Raises:
            JournalFailed: The journal file cannot be written to the disk.
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
        """Append an event that the shard's state machine is about to handle to the journal.

        Raises:
            JournalFailed: The record cannot be written to the journal; a replay ignores a partly
                written record.
            Uncodable: The event cannot be coded as a journal record; the journal is unchanged.
        """
        try:
            record = self._coder.code(event, now)
        except Exception as error:
            raise Uncodable(error) from error
        self._write(record)
        self.num_records += 1

    def close(self) -> None:
        """Close the journal file; a later `append` raises ValueError."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, pieces: list[Any]) -> None:
        if self._file is None:
            raise ValueError("the PS shard's journal of accepted events is closed")
        size = 0
        try:
            for piece in pieces:
                unwritten = memoryview(piece)
                size += len(unwritten)
                while len(unwritten):
                    unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise self._failure(error) from error
        self.num_bytes += size
        self._place = JournalPosition(self._place.number, self._place.offset + size)

    def _failure(self, error: OSError) -> JournalFailed:
        path = path_of(self.folder, self._place.number)
        return JournalFailed(
            f"cannot write the journal {path}: {error.strerror or error}. No acknowledged update "
            "is lost: free space on that disk, and start the same command again; or set "
            "--journal=off: the run then returns to its last snapshot whenever a PS dies."
        )


@dataclasses.dataclass(frozen=True)
class HighWaterMark:
    """The newest version of the weights that a shard reached between two restarts."""

    generation: int
    version: int


def read_mark(folder: pathlib.Path) -> HighWaterMark | None:
    """Return a shard's newest high-water mark; None if the mark's file is missing or damaged."""
    try:
        data = (folder / _MARK_NAME).read_bytes()
        (checksum,) = _CHECKSUM.unpack(data[_VALUES.size :])
        values = data[: _VALUES.size]
        return HighWaterMark(*_VALUES.unpack(values)) if zlib.crc32(values) == checksum else None
    except (OSError, struct.error):
        return None


class HighWaterLog:
    """Writes a shard's high-water mark, the newest version of its weights. Only the shard's writer
    thread writes the high-water mark.

    The file of a high-water mark has 20 bytes, which are overwritten in place. A checksum detects a
    high-water mark that was only partly written.
    """

    def __init__(self, folder: pathlib.Path, mark: HighWaterMark) -> None:
        """Begin at the high-water mark `mark` without writing it: a restarted shard has applied no
        update.
        """
        self._folder, self._generation, self._version = folder, mark.generation, mark.version
        self._descriptor: int | None = None
        self._failed = False

    def record(self, version: int) -> None:
        """Write the version as high-water mark if it is new; do nothing if an earlier write
        failed.
        """
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
                "cannot write the file %s: %s. If this PS dies, the run only counts those lost "
                "updates that a worker has received.",
                path,
                error.strerror or error,
            )

    def close(self) -> None:
        """Close the file of the high-water mark; later calls of `record` do nothing."""
        self._failed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JournaledCore:
    """Writes each event of a shard to the journal, if any, before the state machine handles the
    event.

    If the shard's state machine raises an exception on a worker's event, the event is rejected: a
    `Failed` event follows it in the journal, so that a replay does not handle the rejected event
    again. If an event cannot be encoded for the journal, it is rejected before the shard's state
    machine handles it.

    When the journal cannot be written, the run ends, and the shard's state machine handles no event
    that is not in the journal. Only shard 0 can end a run. If a shard other than 0 cannot write its
    journal, the shard applies no push and replies to no push until shard 0 ends the run.

    Attributes:
        journal: Journal that events are written to; None: events are not written.
        failure: Error of a failed write to the journal; None if no write has failed.
        about: Entries about the journal for the run's summary, without the counts of events and
            bytes.
        recovered: Number of events restored from journals over all restarts, and descriptions of
            the damage that ended a replay.
        high_water: Log of the newest version that the shard's state machine has reached; None:
            versions are not logged.

    Args:
        core: State machine of the shard.
        on_failure: Function called once, when the journal cannot be written.
    """

    def __init__(self, core: PsCore, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin without a journal, so that the events of the shard are not written to disk."""
        self.core, self._on_failure = core, on_failure
        self.journal: Journal | None = None
        self.failure: JournalFailed | None = None
        self.about: dict[str, Any] = {}
        self.recovered: State = {"replayed": 0, "cuts": []}
        self.high_water: HighWaterLog | None = None
        self._settings: State = {}
        self._writes = self._ends = False

    def write_to(self, journal: Journal, settings: State) -> None:
        """Write the shard's events to the given journal from the next call of `begin` on."""
        self.journal, self._settings, self._writes = journal, settings, True

    def continue_with(self, core: PsCore) -> None:
        """Handle later events with the core of the script's next model, without a journal until
        `write_to` is called.

        Args:
            core: State machine that continues the run. The caller has closed the journal of the
                previous state machine.
        """
        self.core, self.journal = core, None

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """Write an event to the journal, then call the shard's state machine with it; end the run
        if writing fails.
        """
        # The order of these lines is an invariant: the event is in the journal before the core
        # changes, and the version is in the high-water mark before the caller sends the actions. A
        # crash at any line then loses no acknowledged update without counting the update as lost.
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
        """Write an event to the journal and return it; replace an event that cannot be coded by a
        `Failed` event.
        """
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
        """Call the shard's state machine with an event; reject a worker's event on which the
        shard's state machine raises an exception.
        """
        try:
            return self.core.handle(event, now)
        except PolicyFailed:
            raise  # the user's policy would fail again with every other worker
        except Exception as error:
            if not isinstance(event, events.OfWorker):
                raise
            failed = events.Failed.of(event, error)
            _log_failure(event, failed, error)
        self._write(failed, now)
        return self.core.handle(failed, now)

    def begin(self) -> State:
        """Begin a new journal file; return the journal's entries for the snapshot of the shard's
        state.
        """
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
        """Return the shard's state to save in the checkpoint that begins a new journal file.

        At the end of a run, the shard takes a snapshot before every worker has received its last
        reply, so the state machine may have handled more events than `state` includes. The new
        journal file does not hold the events that the shard's state machine has handled since the
        snapshot `state`. `consistent` returns the shard's current state after the end of the run,
        and the snapshot `state` before.
        """
        return self.core.snapshot() if self._writes and self.core.stop_reason else state

    def close(self) -> None:
        """Close the files of the journal and the high-water mark before the run's last snapshot."""
        self._writes = False
        for file in (self.journal, self.high_water):
            if file is not None:
                file.close()

    def summary(self) -> dict[str, Any]:
        """Return {"journal": counts of events and bytes} for the run's summary; {} if `about` is
        empty.
        """
        journal = self.journal
        counts = {"events": journal.num_records, "bytes": journal.num_bytes} if journal else {}
        return {"journal": {**self.about, **self.recovered, **counts}} if self.about else {}

    def _fail(self, failure: JournalFailed) -> None:
        self.failure = failure
        logging.error("%s", failure)
        self.close()
        self._on_failure()


def _log_failure(event: events.OfWorker, failed: events.Failed, error: Exception) -> None:
    logging.log_every_n_seconds(  # a worker that repeats the event must not fill the disk
        logging.ERROR,
        "cannot handle a %s of worker %d (%s): expelling the worker; the run continues. This is a "
        "bug of Thinwire: please report it with this traceback.\n%s",
        1,
        *(type(event).__name__, event.worker, failed.cause),
        printable_traceback(error),
    )

"""Restores the state in which a PS shard died: loads a snapshot, replays the journal's events.

The shard's state machine is deterministic: equal sequences of events lead to equal states, bit for
bit. If the journal is damaged, the replay ends after the last intact record. The replay of the
journal ends at an event on which the shard's state machine raises an exception.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from thinwire.ops.types import State
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.serialization import from_plain, to_plain
from thinwire.ps.persistence import journal, journal_format
from thinwire.ps.persistence.journal import JournalPosition
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, TruncatedRecord

_LARGEST_HEAD_BYTES = 1 << 20
#: Function that makes a core without events: (settings of the core, lease in seconds) -> core.
MakeCore = Callable[[CoreConfig, float], PsCore]


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """The settings of a shard's state machine as stored in the heads (first records) of journal
    files.
    """

    config: CoreConfig
    lease_seconds: float

    def to_plain(self) -> State:
        """Return the settings of the shard's state machine as plain data without arrays."""
        return {
            field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @staticmethod
    def of(content: State) -> ReplaySettings:
        """Return the settings of a shard's state machine from plain data that `to_plain` returned.

        Raises:
            DamagedRecord: The plain data do not hold the settings of a shard's state machine.
        """
        try:
            return ReplaySettings(**{name: from_plain(value) for name, value in content.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedRecord(f"settings: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of the replay of a shard's journal.

    Attributes:
        core: Durable (checkpointed) state of the shard's state machine after the replay.
        place: Position in the journal after the last replayed record.
        num_records: Number of events that were replayed from the journal.
        generation: Highest generation (number of restarts of the shard) in the snapshot's state and
            in the heads of all journal files.
        damage: Why the replay ended before the end of the journal; None if all records were
            replayed.
    """

    core: State
    place: JournalPosition
    num_records: int
    generation: int
    damage: str | None = None


class _Unhandled(Exception):
    """Error: the shard's state machine raised an exception on an event of the journal."""

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self.num_records = num_records  # number of replayed events before the failed event


class _RecordReader:
    """Reads the records of a shard's journal in order, beginning with one journal file."""

    def __init__(self, folder: pathlib.Path, first: int) -> None:
        self._folder = folder
        self.heads: dict[int, _FileHeader] = {}
        # Number of a journal file -> why the head of the file cannot be read.
        self._broken: dict[int, str] = {}
        for number in journal.numbers(folder):
            try:
                self.heads[number] = _head(folder, number)
            except TruncatedRecord:  # a journal file with a partly written head holds no event
                continue
            except DamagedRecord as error:
                self._broken[number] = f"cannot be read ({error})"
        # Position in the journal at which the last read record ends.
        self.place = JournalPosition(first, 0)
        self.is_head = False

    def records(self) -> Iterator[memoryview]:
        """Yield the bodies of all journal records; `place` and `is_head` describe the last one.

        Raises:
            DamagedRecord: A record of the journal was changed after it was written.
        """
        number = self.place.number
        while True:
            # Several journal files may continue one file, because after a replay that ended at
            # damage, the restarted shard began a new file at this position. Only the newest
            # continuation holds the acknowledged events; an older continuation holds events that
            # the restart gave up.
            after = {n: head.after for n, head in self.heads.items() if head.after is not None}
            follow = (n for n, place in after.items() if n > number == place.number)
            follows = max(follow, default=None)
            yield from self._records_of(number, after[follows].offset if follows else None)
            if follows is None:
                self._check_no_file_after(number)
                return
            number = follows

    def _records_of(self, number: int, stop: int | None) -> Iterator[memoryview]:
        data = journal.contents(journal.path_of(self._folder, number))
        self.place = JournalPosition(number, 0)
        for end, body in journal_format.bodies(data[:stop]):
            self.is_head = self.place.offset == 0
            yield body
            self.place = JournalPosition(number, end)
        if stop is not None and len(data) < stop:
            raise DamagedRecord(
                f"ends at byte {len(data)}, but the next file continues at byte {stop}"
            )

    def _check_no_file_after(self, last: int) -> None:
        """Raise DamagedRecord if the next journal file does not continue the file with number
        `last`.
        """
        for number in sorted(number for number in {*self.heads, *self._broken} if number > last):
            after = self.heads[number].after if number in self.heads else None
            leads = f"continues file {after.number}" if after else "continues no file"
            name = journal.path_of(self._folder, number).name
            raise DamagedRecord(
                f"the journal ends here, and {name} {self._broken.get(number, leads)}"
            )


@dataclasses.dataclass(frozen=True)
class _FileHeader:
    """The head of a journal file, which is the file's first record."""

    # Position in the journal file that this file continues; None if it continues no file.
    after: JournalPosition | None
    settings: ReplaySettings

    @staticmethod
    def of(body: memoryview) -> _FileHeader:
        """Read the head of a journal file from the body of the file's first record.

        Raises:
            DamagedRecord: The body of the journal record is not the head of a file.
        """
        content = journal_format.content_of_head(body)
        try:
            after = JournalPosition(**content["after"]) if content["after"] else None
            return _FileHeader(after, ReplaySettings.of(content["settings"]))
        except (KeyError, TypeError) as error:
            raise DamagedRecord(f"head: {type(error).__name__}: {error}") from error


def _head(folder: pathlib.Path, number: int) -> _FileHeader:
    """Return the head (first record) of the journal file with the given number.

    Raises:
        DamagedRecord: The head of the journal file cannot be read. The subclass TruncatedRecord
            means that the file ends within the head.
    """
    data = journal.contents(journal.path_of(folder, number), 2 * _LARGEST_HEAD_BYTES)
    if (claimed := int.from_bytes(data[:4], "little")) > _LARGEST_HEAD_BYTES:
        raise DamagedRecord(f"the head claims {claimed} bytes, which is too large")
    for _, body in journal_format.bodies(data):
        return _FileHeader.of(body)
    raise TruncatedRecord("the journal file has no head")


def replay(
    folder: pathlib.Path,
    snapshot: State,
    soft: State,
    first: int,
    make: MakeCore,
    coder: EventCoder,
) -> Replayed:
    """Replay the events that a shard wrote to its journal after a snapshot.

    Args:
        folder: Folder that contains the journal files of the shard.
        snapshot: Durable state of the shard's state machine in the snapshot.
        soft: State of the shard's state machine in the snapshot that a restart without a journal
            would lose.
        first: Number of the journal file that the shard began with the snapshot.
        make: Function that makes a shard's state machine from its settings.
        coder: Coder of the shard's events as journal records.
    """
    # If the core raises an exception on an event, the core's state may be half changed. The replay
    # therefore starts again from the snapshot with a new core, and stops before the event that
    # failed.
    most, damage = None, None
    while True:
        try:
            replayed = _attempt(_RecordReader(folder, first), (snapshot, soft), make, coder, most)
        except _Unhandled as error:
            logging.error("%s", error.__cause__, exc_info=error.__cause__)
            cause = error.__cause__
            damage = f"the core raises on the next record ({type(cause).__name__}: {cause})"
            most = error.num_records
            continue
        damage = damage or replayed.damage
        return dataclasses.replace(replayed, damage=damage and _describe(damage, folder, replayed))


def _describe(damage: str, folder: pathlib.Path, found: Replayed) -> str:
    path = journal.path_of(folder, found.place.number)
    return f"{path}: {damage}; cut at byte {found.place.offset}, {found.num_records} events kept"


def _attempt(
    files: _RecordReader,
    start: tuple[State, State],
    make: MakeCore,
    coder: EventCoder,
    most: int | None,
) -> Replayed:
    """Replay a journal's events: all if `most` is None, otherwise only the first `most` events.

    Raises:
        _Unhandled: The shard's state machine raised an exception on an event of the journal.
    """
    core: PsCore | None = None
    settings, damage, count = None, None, 0
    # The last read (event, time), which the core has not handled yet. `JournaledCore` writes a
    # `Failed` record behind an event on which the core raised an exception. The replay therefore
    # calls the core with an event only after the next record has shown that the event did not fail.
    newest: tuple[Any, float] | None = None
    try:
        for body in files.records():
            if files.is_head:
                _handle(core.handle if core is not None else None, newest, count)
                newest = None
                settings = _FileHeader.of(body).settings
                core = _core_for(core, settings, start, make)
                continue
            if core is None or count == most:
                break
            event, now = coder.decode(body)
            if not isinstance(event, events.Failed):
                _handle(core.handle if core is not None else None, newest, count)
            newest = event, now
            count += 1
    except DamagedRecord as error:
        damage = str(error)
    _handle(core.handle if core is not None else None, newest, count)
    state = core.state_dict() if core is not None else start[0]
    lives = [head.settings.config.generation for head in files.heads.values()]
    generation = max([state["generation"], *lives])
    return Replayed(state, files.place, count, generation, damage)


def _handle(
    handle: Callable[[Any, float], object] | None, newest: tuple[Any, float] | None, count: int
) -> None:
    """Call the shard's state machine with a replayed event; drop the resulting actions (such as
    replies).

    The dead process has performed the actions that replayed events result in, or no worker needs
    these actions after the restart.

    Args:
        handle: Method `handle` of the shard's state machine; None if no head of a journal file has
            been read yet.
        newest: Replayed event, and the time at which the dead process handled the event; None if
            there is no event.
        count: Number of replayed events up to and including this event.

    Raises:
        _Unhandled: The shard's state machine raised an exception on the replayed event.
    """
    if handle is None or newest is None:
        return
    try:
        handle(*newest)
    except Exception as error:
        raise _Unhandled(count - 1) from error


def _core_for(
    core: PsCore | None, settings: ReplaySettings, start: tuple[State, State], make: MakeCore
) -> PsCore:
    """Return the state machine that replays a journal file: `core`, or a new one if the shard
    restarted there.
    """
    if core is not None and core.config.generation == settings.config.generation:
        return core
    fresh = make(settings.config, settings.lease_seconds)
    if core is None:
        # A second attempt at the replay needs `start` unchanged.
        durable, soft = copy.deepcopy(start)
        fresh.load_state_dict(durable)
        fresh.load_state_dict(soft, soft=True)
    else:  # here the shard restarted from the state after the earlier records of the journal
        fresh.load_state_dict(core.state_dict())
    return fresh

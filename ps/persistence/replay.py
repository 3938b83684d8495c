"""Restores the state that a shard died with: its snapshot, and the journal's events replayed on it.

The core is deterministic, so that the same events lead to the same state, bit for bit. Damage ends
the replay at the last intact record; an event over which the core raises ends it too.
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
#: Makes a core that has handled no event: (its settings, seconds of a lease) -> core.
MakeCore = Callable[[CoreConfig, float], PsCore]


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """The settings of a generation's core, as the head of each of its files holds them."""

    config: CoreConfig
    lease_seconds: float

    def to_plain(self) -> State:
        """Return plain data without arrays."""
        return {
            field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @staticmethod
    def of(content: State) -> ReplaySettings:
        """Return the settings of which `to_plain` returned this content.

        Raises:
            DamagedRecord: It is something else.
        """
        try:
            return ReplaySettings(**{name: from_plain(value) for name, value in content.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedRecord(f"settings: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The state that a replay led to, and where it ended."""

    core: State  # durable
    place: JournalPosition  # after the last record
    num_records: int
    generation: int  # the highest one that this shard ever had
    damage: str | None = None  # why it ends there, if a record follows


class _Unhandled(Exception):
    """The core raised over an event of the journal."""

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self.num_records = num_records  # before the event


class _RecordReader:
    """The records of a journal from one file on, one after the other."""

    def __init__(self, folder: pathlib.Path, first: int) -> None:
        self._folder = folder
        self.heads: dict[int, _FileHeader] = {}
        self._broken: dict[int, str] = {}  # number -> why its head cannot be read
        for number in journal.numbers(folder):
            try:
                self.heads[number] = _head(folder, number)
            except TruncatedRecord:  # begun, but no event was handled after it
                continue
            except DamagedRecord as error:
                self._broken[number] = f"cannot be read ({error})"
        self.place = JournalPosition(first, 0)  # where the newest record ends
        self.is_head = False

    def records(self) -> Iterator[memoryview]:
        """Yield the bodies; `place` and `is_head` are of the newest.

        Raises:
            DamagedRecord: At the first one that is not as it was written.
        """
        number = self.place.number
        while True:
            # A restart after damage continues the same file once more: the later file counts.
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
        """Raise DamagedRecord if there are later files that do not continue the last one."""
        for number in sorted(each for each in {*self.heads, *self._broken} if each > last):
            after = self.heads[number].after if number in self.heads else None
            leads = f"continues file {after.number}" if after else "begins anew"
            name = journal.path_of(self._folder, number).name
            raise DamagedRecord(
                f"the journal ends here, and {name} {self._broken.get(number, leads)}"
            )


@dataclasses.dataclass(frozen=True)
class _FileHeader:
    """A file's first record."""

    after: JournalPosition | None  # where the file that it continues ends
    settings: ReplaySettings

    @staticmethod
    def of(body: memoryview) -> _FileHeader:
        """Read the record.

        Raises:
            DamagedRecord: It is not a head.
        """
        content = journal_format.content_of_head(body)
        try:
            after = JournalPosition(**content["after"]) if content["after"] else None
            return _FileHeader(after, ReplaySettings.of(content["settings"]))
        except (KeyError, TypeError) as error:
            raise DamagedRecord(f"head: {type(error).__name__}: {error}") from error


def _head(folder: pathlib.Path, number: int) -> _FileHeader:
    """Return a file's head.

    Raises:
        DamagedRecord: It cannot be read (TruncatedRecord: the file ends before it does).
    """
    data = journal.contents(journal.path_of(folder, number), 2 * _LARGEST_HEAD_BYTES)
    if (claimed := int.from_bytes(data[:4], "little")) > _LARGEST_HEAD_BYTES:
        raise DamagedRecord(f"a head of {claimed} bytes")
    for _, body in journal_format.bodies(data):
        return _FileHeader.of(body)
    raise TruncatedRecord("there is no head")


def replay(
    folder: pathlib.Path,
    snapshot: State,
    soft: State,
    first: int,
    make: MakeCore,
    coder: EventCoder,
) -> Replayed:
    """Have a core handle once more the events that were journaled after a snapshot.

    Args:
        folder: Of the journal.
        snapshot: The core's durable state.
        soft: The rest of its state.
        first: The file that was begun with the snapshot.
        make: Makes cores.
        coder: Of the shard's events.
    """
    most, damage = None, None
    while True:
        try:
            found = _attempt(_RecordReader(folder, first), (snapshot, soft), make, coder, most)
        except _Unhandled as error:
            logging.error("%s", error.__cause__, exc_info=error.__cause__)
            cause = error.__cause__
            damage = f"the core fails on the next record ({type(cause).__name__}: {cause})"
            most = error.num_records
            continue
        damage = damage or found.damage
        return dataclasses.replace(found, damage=damage and _describe(damage, folder, found))


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
    """Replay all records, or the first `most`."""
    core: PsCore | None = None
    settings, damage, count = None, None, 0
    newest: tuple[Any, float] | None = None  # handled later: the next record may reject it
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
    """Have an event handled; its actions were done then, or need not be done any more.

    Args:
        handle: The core's; None: no head has been read yet.
        newest: (event, the moment it was handled); None: there is none.
        count: Records up to this one.

    Raises:
        _Unhandled: The core raised.
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
    """Return the core whose events a file holds."""
    if core is not None and core.config.generation == settings.config.generation:
        return core
    fresh = make(settings.config, settings.lease_seconds)
    if core is None:
        durable, soft = copy.deepcopy(start)  # another attempt may need it unchanged
        fresh.load_state_dict(durable)
        fresh.load_state_dict(soft, soft=True)
    else:  # a restart of the shard, from everything that the journal held by then
        fresh.load_state_dict(core.state_dict())
    return fresh

"""From a snapshot and its journal to the state that a shard died with."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from thinwire.ops.types import State
from thinwire.ps.core import events, soft_state
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.plain import from_plain, to_plain
from thinwire.ps.persistence import journal, journal_format
from thinwire.ps.persistence.journal import JournalPosition
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, TruncatedRecord

_LARGEST_HEAD_BYTES = 1 << 20
#: Makes a core that has been told nothing: (its settings, seconds of a lease) -> core.
MakeCore = Callable[[CoreConfig, float], PsCore]


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """What a life's core was made with; the head of each of its files says so."""

    config: CoreConfig
    lease_seconds: float
    limits: dict[str, float | None]  # stop reason -> the limit that it is named after

    def to_plain(self) -> State:
        """Return plain data without arrays."""
        return {
            field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @staticmethod
    def of(content: State) -> ReplaySettings:
        """Return what `to_plain` gave.

        Raises:
            Damaged: It is something else.
        """
        try:
            return ReplaySettings(**{name: from_plain(value) for name, value in content.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedRecord(f"settings: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Replayed:
    """How far a journal has brought a snapshot."""

    core: State  # durable
    place: JournalPosition  # where it ends
    num_records: int
    generation: int  # the highest one that this shard ever had
    limits: dict[str, float | None]  # of the last life
    damage: str | None = None  # why it ends there, if not because nothing follows


class _Unhandled(Exception):
    """The core does not take an event of the journal."""

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self.num_records = num_records  # before it


class _RecordReader:
    """The records of a journal from one file on, one after the other."""

    def __init__(self, folder: pathlib.Path, first: int) -> None:
        self._folder = folder
        self.heads: dict[int, _FileHeader] = {}
        self._broken: dict[int, str] = {}  # number -> why its head cannot be read
        for number in journal.numbers(folder):
            try:
                self.heads[number] = _head(folder, number)
            except TruncatedRecord:  # it was begun, and nobody was told anything after that
                continue
            except DamagedRecord as error:
                self._broken[number] = f"cannot be read ({error})"
        self.place = JournalPosition(first, 0)  # where the newest record ends
        self.is_head = False

    def records(self) -> Iterator[memoryview]:
        """Return the bodies; `place` and `is_head` are of the newest.

        Raises:
            Damaged: At the first one that is not what was written.
        """
        number = self.place.number
        while True:
            # A restart after damage goes on from the same file once more: the later one counts.
            after = {n: head.after for n, head in self.heads.items() if head.after is not None}
            follow = (n for n, place in after.items() if n > number == place.number)
            follows = max(follow, default=None)
            yield from self._records_of(number, after[follows].offset if follows else None)
            if follows is None:
                self._refuse_more(number)
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
            raise DamagedRecord(f"ends at byte {len(data)}, and the next file goes on from {stop}")

    def _refuse_more(self, last: int) -> None:
        """Say so where there are later files, and no way from the last one to them."""
        for number in sorted(each for each in {*self.heads, *self._broken} if each > last):
            after = self.heads[number].after if number in self.heads else None
            leads = f"goes on from file {after.number}" if after else "begins anew"
            name = journal.path_of(self._folder, number).name
            raise DamagedRecord(
                f"the journal ends here, and {name} {self._broken.get(number, leads)}"
            )


@dataclasses.dataclass(frozen=True)
class _FileHeader:
    """A file's first record."""

    after: JournalPosition | None  # what it goes on from
    settings: ReplaySettings

    @staticmethod
    def of(body: memoryview) -> _FileHeader:
        """Read the record.

        Raises:
            Damaged: It is none.
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
        Damaged: It cannot be read; CutShort: the file ends before it does.
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
    """Tell a core again what it was told after a snapshot.

    Args:
        folder: Of the journal.
        snapshot: The core's durable state.
        soft: What it knew besides.
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
            damage = f"the core does not take the next record ({type(cause).__name__}: {cause})"
            most = error.num_records
            continue
        return dataclasses.replace(found, damage=_told(folder, found, damage or found.damage))


def _told(folder: pathlib.Path, found: Replayed, damage: str | None) -> str | None:
    if damage is None:
        return None
    path = journal.path_of(folder, found.place.number)
    return f"{path}: {damage}; cut at byte {found.place.offset}, {found.num_records} events kept"


def _attempt(
    files: _RecordReader,
    start: tuple[State, State],
    make: MakeCore,
    coder: EventCoder,
    most: int | None,
) -> Replayed:
    """Replay all, or at most so many records."""
    core: PsCore | None = None
    settings, damage, count = None, None, 0
    held: tuple[Any, float] | None = None  # the newest record: the next one may say that it failed
    try:
        for body in files.records():
            if files.is_head:
                held = _handle(core, held, count)
                settings = _FileHeader.of(body).settings
                core = _enter(core, settings, start, make)
                continue
            if core is None or count == most:
                break
            event, now = coder.decode(body)
            if not isinstance(event, events.Failed):
                _handle(core, held, count)
            held = event, now
            count += 1
    except DamagedRecord as error:
        damage = str(error)
    _handle(core, held, count)
    state = core.snapshot() if core is not None else start[0]
    lives = [head.settings.config.generation for head in files.heads.values()]
    generation = max([state["generation"], *lives])
    limits = settings.limits if settings is not None else {}
    return Replayed(state, files.place, count, generation, limits, damage)


def _handle(core: PsCore | None, held: tuple[Any, float] | None, count: int) -> None:
    """Tell the core; what it wants to be done was done, or is not to be done any more.

    Args:
        core: None: there is nobody to tell.
        held: (event, the moment it was handled); None: nothing is to be told.
        count: Records up to this one.

    Raises:
        _Unhandled: It does not take the event.
    """
    if core is None or held is None:
        return
    try:
        core.handle(*held)
    except Exception as error:
        raise _Unhandled(count - 1) from error


def _enter(
    core: PsCore | None, settings: ReplaySettings, start: tuple[State, State], make: MakeCore
) -> PsCore:
    """Return the core that a file is about."""
    if core is not None and core.config.generation == settings.config.generation:
        return core
    fresh = make(settings.config, settings.lease_seconds)
    if core is None:
        durable, soft = copy.deepcopy(
            start
        )  # a core goes on with it, and another may have to begin
        fresh.restore(durable)
        soft_state.restore(fresh, soft)
    else:  # the shard was started anew, from all that was in the journal till then
        fresh.restore(core.snapshot())
    return fresh

"""Records of the events of a run: requests, replies, updates, starts and ends of nodes.

A history is a list of records in order of time: workers' requests and the replies, updates that
shards applied and sent, in real processes and in the Simulator (`tests.chaos.recorder`). The
records hold no verdict; `tests.chaos.checker` checks them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One action of a node, or one event that reached a node."""

    at: float  # seconds, by a clock that all nodes of the run share


# -- workers ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfWorker(Record):
    """A record of one process of a worker."""

    worker: int
    incarnation: int = 0  # 0: not known there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcomed(OfWorker):
    """A shard has accepted a Hello."""

    shard: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(OfWorker):
    """A pull (`step` 0) or a push was invoked, with the worker's claims."""

    shard: int
    step: int
    base_version: int = 0
    generation: int = 0
    samples: int = 0
    local_steps: int = 0
    lag: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made(OfWorker):
    """A worker has made its update for a shard; the digest is of the decoded update."""

    shard: int
    step: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acknowledged(OfWorker):
    """A shard's reply settled a request; `refused`: the update was left out, for its size."""

    shard: int
    step: int  # 0: of a pull
    version: int
    generation: int
    stop: bool
    refused: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took(OfWorker):
    """A worker has received a shard's model; the digest is of the worker's copy."""

    shard: int
    version: int
    generation: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeganLife(OfWorker):
    """A worker's process has begun, with residuals of nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(OfWorker):
    """A codec was given values [n] float32, and made a packet of them."""

    step: int
    learning_rate: float
    epoch: float
    group: int
    keep: float | None
    values: bytes
    digest: str  # digest of the packet


@dataclasses.dataclass(frozen=True, kw_only=True)
class PutBack(OfWorker):
    """A worker added its last update back to its residuals, because the update was rejected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped(OfWorker):
    """A worker dropped its residuals: its update was too large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept(OfWorker):
    """A worker's state was saved after this step."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored(OfWorker):
    """A worker continues from a state saved after step `saved`; shards had applied `applied`."""

    saved: int
    applied: int


# -- shards -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfShard(Record):
    """A record of one incarnation of a shard.

    A killed shard may have journaled an event without handling it: the next incarnation replays it,
    and records its actions as `replayed`.
    """

    shard: int
    generation: int
    replayed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life(OfShard):
    """A shard begins to handle events."""

    version: int
    samples: int
    journal: bool  # every event is on disk before it is handled
    digest: str  # digest of the state that follows from updates
    backups: str  # digest of copies that workers hold
    rule: dict[str, Any]  # state of the synchronization rule, as plain data
    steps: dict[str, int]  # worker -> newest step applied
    parts: dict[str, str]  # name of a part of the core -> digest of its durable state
    before: dict[str, str] | None  # the same of the life before, when it died; None: not known
    disk_failed: bool = False  # the disk failed: its last replies are not on disk
    settings: Any = None  # state of the core, as plain data
    theta: bytes = b""  # [n] float32; empty where models are recorded by digests alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
    """One push, as a shard released it."""

    worker: int
    incarnation: int
    step: int
    base_version: int
    generation: int
    epoch: int
    samples: int
    local_steps: int
    lag: int
    digest: str  # digest of the update
    indices: bytes | None  # int64; None: all
    values: bytes  # float32; empty where models are recorded by digests alone
    kept: bool  # the weighting did not drop it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released(OfShard):
    """A shard has applied one round."""

    before: int  # version
    version: int  # after
    samples: int  # before
    oldest_base: int
    share: float  # fraction of all workers
    epoch: int  # membership epoch at this shard
    arrivals: tuple[Arrived, ...]
    digest: str  # digest of the state that follows from updates, after the round
    theta: bytes  # [n] float32 after; empty where models are recorded by digests alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handed(OfShard):
    """A shard has made the reply to a worker; the digest is of the model after the reply."""

    worker: int
    version: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgot(OfShard):
    """A shard forgets a worker, which has left."""

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleCall(OfShard):
    """A call of the synchronization rule, and its result."""

    call: str
    arguments: list[Any]
    released: list[list[list[int]]] | None = None  # result of `advance`: rounds of (worker, step)
    proceeding: list[int] | None = None
    clocks: dict[str, int] = dataclasses.field(default_factory=dict)  # after `advance`
    live: tuple[int, ...] = ()  # after `advance`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(OfShard):
    """Shard 0 announced an epoch of membership."""

    number: int
    live: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed(OfShard):
    """Another shard received an epoch; its state afterwards."""

    number: int
    live: tuple[int, ...]
    epoch: int
    present: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(OfShard):
    """A shard's state was collected to be saved."""

    version: int
    samples: int
    digest: str
    backups: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutOff(Record):
    """A test cut records from a dead shard's journal: updates in these records may be missing."""

    shard: int
    updates: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended(OfShard):
    """The final state of a shard."""

    version: int
    samples: int
    lost_updates: int
    digest: str
    finite: bool
    reason: str


KINDS: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in (
        *(Welcomed, Request, Made, Acknowledged, Took, BeganLife, Coded, PutBack, Dropped, Kept),
        *(Restored, Life, Released, Handed, Forgot, RuleCall, Published, Followed),
        *(Snapshot, CutOff, Ended),
    )
}


class History(list[Record]):
    """Records in order of time."""

    def of(self, *kinds: type[Record]) -> Iterator[Any]:
        """Go through the records of some kinds."""
        return (record for record in self if isinstance(record, kinds))

    @property
    def shards(self) -> list[int]:
        """All shards, ascending."""
        return sorted({record.shard for record in self.of(OfShard)})

    def with_others(self, others: Iterable[Record]) -> History:
        """Return a history with some more records, in order of time."""
        return History(sorted([*self, *others], key=lambda record: record.at))

    def write(self, path: pathlib.Path) -> None:
        """Write them all to a file, a line each."""
        path.write_text("".join(line_of(record) for record in self))

    @staticmethod
    def read(paths: Iterable[pathlib.Path]) -> History:
        """Read the histories of several nodes; a last line may be cut short."""
        found: list[Record] = []
        for path in paths:
            text = path.read_text()
            found += map(record_of, text[: text.rfind("\n") + 1].splitlines())
        return History(sorted(found, key=lambda record: record.at))


# -- as lines -----------------------------------------------------------------------------------


def line_of(record: Record) -> str:
    """Return a record as a line of JSON."""
    return json.dumps([type(record).__name__, dataclasses.asdict(record)], default=_coded) + "\n"


def record_of(line: str) -> Record:
    """Return the record of a line."""
    name, fields = json.loads(line, object_hook=_decoded)
    if "arrivals" in fields:
        fields["arrivals"] = tuple(Arrived(**each) for each in fields["arrivals"])
    for tuples in ("live", "present"):
        if tuples in fields:
            fields[tuples] = tuple(fields[tuples])
    return KINDS[name](**fields)


def _coded(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no plain data")


def _decoded(fields: dict[str, Any]) -> Any:
    return base64.b64decode(fields["b64"]) if set(fields) == {"b64"} else fields


# -- digests ------------------------------------------------------------------------------------


def digest(*values: Any) -> str:
    """Return a digest of plain data and arrays, by their bits.

    >>> digest({"a": 1}, [np.zeros(2)]) == digest({"a": 1}, [np.zeros(2)])
    True
    >>> digest(np.zeros(2)) == digest(np.zeros(2, np.float32))
    False
    """
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        _feed(found, value)
    return found.hexdigest()


#: Types whose text determines the value; most digested values have one of these types.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
#: Names of dtypes. numpy builds `dtype.name` at each access, which takes ten times as long as this.
_name_of = functools.cache(str)


def _feed(into: Any, value: Any) -> None:
    if type(value) in _PLAIN:
        into.update(repr(value).encode() + b";")
    elif isinstance(value, dict):
        into.update(b"{")
        for key in sorted(value, key=str):
            into.update(str(key).encode())
            _feed(into, value[key])
    elif isinstance(value, list | tuple):
        into.update(b"[")
        for each in value:
            _feed(into, each)
    elif isinstance(value, np.ndarray):
        into.update(f"{_name_of(value.dtype)}{value.shape}".encode())
        into.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.generic):
        _feed(into, value.item())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(into, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    else:
        into.update(repr(value).encode() + b";")

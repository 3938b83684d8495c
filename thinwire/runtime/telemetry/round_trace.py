"""Records of every round of every worker, in the units of ESync's logs.

A worker sends its records in batches to shard 0, which passes them on to the Supervisor; there each
becomes a line of ``measure/worker-N.jsonl``. Names and units follow ESync's per-round files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from thinwire.ops.pacing import Pacer
from thinwire.runtime.persistence.documents import Document, parse_json

CHECK_READY = "check ready"  # a query to the state server
GET_BATCH = "get_batch"
FORWARD_AND_BACKWARD = "forward and backward"  # an emulated device's pause included
LOCAL_UPDATE = "local update"
ENCODE = "encode"  # making the push; not a phase of ESync's own logs
GLOBAL_UPDATE = "global update"  # exchange of a change of weights: barrier, transfer, apply
GLOBAL_AGGREGATE = "global aggregate"  # the same of a gradient
EVALUATION = "evaluation"
#: The phase of an exchange, under either name.
GLOBAL_PHASES = (GLOBAL_UPDATE, GLOBAL_AGGREGATE)
#: Work on the model itself.
COMPUTING_PHASES = (FORWARD_AND_BACKWARD, LOCAL_UPDATE)

#: Values of --measure: nothing, sums of each round, or every local step as well.
LEVELS = ("off", "rounds", "steps")
#: Largest batch; a shard accepts up to 256 KiB.
MAX_BATCH_BYTES = 200 << 10
_DECIMALS = 6  # of seconds


class RoundRecord(NamedTuple):
    """One round as the worker measured it, in seconds of the worker's monotonic clock."""

    num_iters: int  # the worker's exchange, from 1
    num_samples: int  # examples it trained on in this round
    total_time: float  # seconds since it began to train, earlier incarnations included
    n_local: int  # local steps
    epoch: int  # of its own examples, whole
    version: int  # of shard 0's model after the round
    staleness: int  # updates the model had moved on by when the push was merged
    loss: float | None  # mean over the local steps
    bytes_sent: int  # all shards, framing included
    bytes_received: int
    barrier_wait: float  # seconds the synchronisation rule held the reply back
    transfer: float  # rest of the round trip: both links, queues, merging
    time: dict[str, float]  # phase -> seconds, summed over the round
    steps: (
        list[dict[str, float]] | None
    )  # the same for every local step; None with --measure=rounds


@dataclasses.dataclass(frozen=True)
class MeasuredBy(Document):
    """The node that measured."""

    host: str
    device: str  # cpu, gpu0, gpu1 ...
    rank: int  # from 0: worker N has rank N - 1
    life: str  # the worker's incarnation; rounds are numbered within it


@dataclasses.dataclass(frozen=True)
class Round(Document):
    """A record and its origin, as a line of a file."""

    num_iters: int
    num_samples: int
    total_time: float
    time: dict[str, float]
    n_local: int = 1
    epoch: int = 0
    version: int = 0
    staleness: int = 0
    loss: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    barrier_wait: float = 0.0
    transfer: float = 0.0
    steps: list[dict[str, float]] | None = None
    host: str = "unknown"
    device: str = "cpu"
    rank: int = 0
    life: str = ""

    @property
    def global_seconds(self) -> float:
        """Barrier, transfer and apply in one."""
        return sum(self.time.get(name, 0.0) for name in GLOBAL_PHASES)

    @property
    def computing_seconds(self) -> float:
        """Forward, backward and update alone."""
        return sum(self.time.get(name, 0.0) for name in COMPUTING_PHASES)

    @property
    def entries(self) -> int:
        """Entries that ESync's log has of this round: one per local step, one for READY."""
        return self.n_local + (1 if CHECK_READY in self.time else 0)


def phases_of(pacer: Pacer) -> tuple[str, ...]:
    """Return the phases that a worker with this pacer goes through, in order."""
    local = pacer.queries or not pacer.push_now(1)
    return (
        *((CHECK_READY,) if pacer.queries else ()),
        GET_BATCH,
        FORWARD_AND_BACKWARD,
        *((LOCAL_UPDATE,) if local else ()),
        ENCODE,
        GLOBAL_UPDATE if local else GLOBAL_AGGREGATE,
    )


def pack(origin: MeasuredBy, rows: Iterable[RoundRecord]) -> list[str]:
    """Return documents of at most MAX_BATCH_BYTES; a longer record loses its steps."""
    head = {**origin.to_dict(), "columns": list(RoundRecord._fields)}
    start = _dumps(head)[:-1] + ',"rows":['
    batches: list[str] = []
    texts: list[str] = []
    size = len(start)
    for row in rows:
        text = _dumps(_plain(row))
        if len(start) + len(text) + 2 > MAX_BATCH_BYTES:
            text = _dumps(_plain(row._replace(steps=None)))
        if texts and size + len(text) + 3 > MAX_BATCH_BYTES:
            batches.append(f"{start}{','.join(texts)}]}}")
            texts, size = [], len(start)
        texts.append(text)
        size += len(text) + 1
    if texts:
        batches.append(f"{start}{','.join(texts)}]}}")
    return batches


def unpack(text: str | bytes) -> list[Round]:
    """Return the rounds of a batch of any origin, every field checked; raises ValueError."""
    batch = parse_json(text)
    if not isinstance(batch, dict):
        raise ValueError("a batch of rounds is not an object")
    columns, rows = batch.pop("columns", None), batch.pop("rows", None)
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise ValueError("a batch of rounds has no columns and rows")
    if not all(isinstance(name, str) for name in columns):
        raise ValueError(f"the columns of a batch are {columns!a:.80}, expected names")
    origin = MeasuredBy.from_dict(batch).to_dict()
    return [Round.from_dict({**_named(columns, row), **origin}) for row in rows]


def line_of(each: Round) -> str:
    """Return one line of a file, without unknown values."""
    values = {name: value for name, value in each.to_dict().items() if value is not None}
    return _dumps(values) + "\n"


def _named(columns: Sequence[str], row: Any) -> dict[str, Any]:
    if not isinstance(row, list) or len(row) != len(columns):
        raise ValueError(f"a row of {len(columns)} columns is {row!a:.80}")
    return dict(zip(columns, row, strict=True))


def _plain(row: RoundRecord) -> list[Any]:
    return [_rounded(value) for value in row]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, dict):
        return {name: round(seconds, _DECIMALS) for name, seconds in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)

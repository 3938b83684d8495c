"""Records of every round of every worker, in the units of ESync's logs.

A worker sends its records in batches to shard 0, which forwards the records to the Supervisor. The
Supervisor writes a record as a line of ``measure/worker-N.jsonl``. Names and units follow ESync's
per-round files.
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
FORWARD_AND_BACKWARD = "forward and backward"  # includes the pause of an emulated device
LOCAL_UPDATE = "local update"
ENCODE = "encode"  # encoding of the push; ESync's own logs lack this phase
GLOBAL_UPDATE = "global update"  # exchange of a weight change: barrier, transfer, apply
GLOBAL_AGGREGATE = "global aggregate"  # exchange of a gradient: barrier, transfer, apply
EVALUATION = "evaluation"
#: Phases of an exchange; a round has one of the two phases.
GLOBAL_PHASES = (GLOBAL_UPDATE, GLOBAL_AGGREGATE)
#: Phases that compute on the model.
COMPUTING_PHASES = (FORWARD_AND_BACKWARD, LOCAL_UPDATE)

#: Values of --measure: no records, sums of every round, or every local step as well.
LEVELS = ("off", "rounds", "steps")
#: Size of the largest batch, in bytes: below 256 KiB, the limit of a shard.
MAX_BATCH_BYTES = 200 << 10
_DECIMALS = 6  # decimals of seconds and other fractions in a record


class RoundRecord(NamedTuple):
    """One round as the worker measured it, in seconds of the worker's monotonic clock."""

    num_iters: int  # number of the worker's exchange, from 1
    num_samples: int  # examples that the worker trained on in this round
    total_time: float  # seconds since the worker started to train, with earlier incarnations
    n_local: int  # number of local steps
    epoch: int  # completed passes over the worker's own examples
    version: int  # version of shard 0's model after the round
    staleness: int  # updates applied between the pull and the merging of the push
    loss: float | None  # mean training loss over the local steps
    bytes_sent: int  # bytes sent to all shards, with framing
    bytes_received: int  # bytes received from all shards, with framing
    barrier_wait: float  # seconds for which the synchronization rule delayed the reply
    transfer: float  # round trip without the barrier, in seconds: both links, queues, merging
    time: dict[str, float]  # phase -> seconds, summed over the round
    steps: list[dict[str, float]] | None  # phase -> seconds per local step; None: not recorded


@dataclasses.dataclass(frozen=True)
class MeasuredBy(Document):
    """Worker process that measured a batch of records."""

    host: str
    device: str  # device name: cpu, gpu0, gpu1, ...
    rank: int  # rank from 0: worker N has rank N - 1
    life: str  # id of the worker's incarnation; `num_iters` grows within an incarnation


@dataclasses.dataclass(frozen=True)
class Round(Document):
    """Record of a round with its origin, as a line of a file."""

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
        """Seconds of the exchange: barrier, transfer and apply."""
        return sum(self.time.get(name, 0.0) for name in GLOBAL_PHASES)

    @property
    def computing_seconds(self) -> float:
        """Seconds of computing on the model: forward pass, backward pass and local update."""
        return sum(self.time.get(name, 0.0) for name in COMPUTING_PHASES)

    @property
    def entries(self) -> int:
        """Number of entries of this round in ESync's log: one per local step, one for READY."""
        return self.n_local + (1 if CHECK_READY in self.time else 0)


def phases_of(pacer: Pacer) -> tuple[str, ...]:
    """Return the phases of a worker's round with this pacer, in order."""
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
    """Encode records as batches of at most MAX_BATCH_BYTES; a longer record loses its steps."""
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
    """Decode an untrusted batch and check every field; raises ValueError."""
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
    """Return a round as one line of a file, without the fields whose value is None."""
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

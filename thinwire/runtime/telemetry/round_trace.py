"""Time records of each worker's rounds (local steps and one exchange), for --measure.

A worker sends the time records of its rounds in batches to PS shard 0, which forwards the records
to the Supervisor. The Supervisor writes each round's record as a line of
``measure/worker-N.jsonl``. Names and units of a round record's fields follow the log files of ESync
(a synchronization method with published code).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.ops.pacing.base import Pacer
from thinwire.runtime.persistence.documents import Document, parse_json

CHECK_READY = "check ready"  # phase of ESync in which the worker queries the state server
GET_BATCH = "get_batch"
#: Forward and backward pass, with the pause of an emulated slow device.
FORWARD_AND_BACKWARD = "forward and backward"
LOCAL_UPDATE = "local update"
ENCODE = "encode"  # phase that encodes the push; original ESync's logs lack it
GLOBAL_UPDATE = "global update"  # phase that exchanges a weight change: barrier, transfer, apply
GLOBAL_AGGREGATE = "global aggregate"  # phase that exchanges a gradient: barrier, transfer, apply
EVALUATION = "evaluation"
#: Phases that exchange with the PS, of which a round has exactly one.
GLOBAL_PHASES = (GLOBAL_UPDATE, GLOBAL_AGGREGATE)
#: Phases of a round in which a worker computes on the model.
COMPUTING_PHASES = (FORWARD_AND_BACKWARD, LOCAL_UPDATE)

#: Values of --measure: "off" records no times, "rounds" the sums of each round, "steps" also the
#: times of each local step.
LEVELS = ("off", "rounds", "steps")
#: Largest size of a batch of round records, in bytes, below a PS shard's limit of 256 KiB.
MAX_BATCH_BYTES = 200 << 10
_DECIMALS = 6  # number of decimals of seconds and other fractions in a record


@dataclasses.dataclass(frozen=True)
class MeasuredBy(Document):
    """Worker process that measured a batch of time records of training rounds."""

    host: str
    device: str  # name of the worker's device: cpu, gpu0, gpu1, ...
    rank: int  # rank of the worker from 0: worker N has rank N - 1
    life: str  # id of the worker's process, within which `num_iters` grows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Document):
    """Time record of one training round, and the worker that measured it, as a line of a file."""

    num_iters: int  # number of the worker's exchange with the PS, from 1
    num_samples: int  # number of examples that the worker trained on in this round
    total_time: float  # seconds of training by this worker so far, over all its incarnations
    n_local: int = 1  # number of local steps in this round
    epoch: int = 0  # number of completed passes over the worker's own examples
    version: int = 0  # number of updates of PS shard 0's model after the round
    staleness: int = 0  # number of updates applied between this worker's pull and push
    loss: float | None = None  # mean training loss over the round's local steps; None: unknown
    bytes_sent: int = 0  # bytes sent to all PS shards in this round, with framing
    bytes_received: int = 0  # bytes received from all PS shards in this round, with framing
    barrier_wait: float = 0.0  # seconds for which a PS delayed its reply to wait for workers
    transfer: float = 0.0  # seconds of the exchange except the barrier: links, queues, merging
    time: dict[str, float]  # phase name -> seconds in this round
    # Per local step: phase -> seconds; None: not recorded
    steps: list[dict[str, float]] | None = None
    # Fields of `MeasuredBy`
    host: str = "unknown"
    device: str = "cpu"
    rank: int = 0
    life: str = ""

    @property
    def global_seconds(self) -> float:
        """Seconds of a training round's exchange with the PS: barrier, transfer and apply."""
        return sum(self.time.get(name, 0.0) for name in GLOBAL_PHASES)

    @property
    def computing_seconds(self) -> float:
        """Seconds of a round in which the worker computed: forward, backward and local update."""
        return sum(self.time.get(name, 0.0) for name in COMPUTING_PHASES)

    @property
    def entries(self) -> int:
        """Number of a round's entries in an ESync log file: one per local step, one for READY."""
        return self.n_local + (1 if CHECK_READY in self.time else 0)


_ORIGIN = {field.name for field in dataclasses.fields(MeasuredBy)}
_COLUMNS = [field.name for field in dataclasses.fields(Round) if field.name not in _ORIGIN]


def phases_of(pacer: Pacer) -> tuple[str, ...]:
    """Return the names of the phases of a worker's training round under a pacer, in order."""
    local = pacer.queries or not pacer.push_now(1)
    return (
        *((CHECK_READY,) if pacer.queries else ()),
        GET_BATCH,
        FORWARD_AND_BACKWARD,
        *((LOCAL_UPDATE,) if local else ()),
        ENCODE,
        GLOBAL_UPDATE if local else GLOBAL_AGGREGATE,
    )


def pack(origin: MeasuredBy, rows: Iterable[Round]) -> list[str]:
    """Encode training-round records in batches of up to MAX_BATCH_BYTES; shorten long records."""
    head = {**origin.to_dict(), "columns": _COLUMNS}
    start = _dumps(head)[:-1] + ',"rows":['
    batches: list[list[str]] = []
    size = MAX_BATCH_BYTES
    for row in rows:
        text = _dumps(_plain(row))
        if len(start) + len(text) + 2 > MAX_BATCH_BYTES:
            text = _dumps(_plain(dataclasses.replace(row, steps=None)))
        if size + len(text) + 3 > MAX_BATCH_BYTES:
            batches.append([])
            size = len(start)
        batches[-1].append(text)
        size += len(text) + 1
    return [f"{start}{','.join(texts)}]}}" for texts in batches]


def unpack(text: str | bytes) -> list[Round]:
    """Decode and check an untrusted batch of round records; raise ValueError for a wrong field."""
    batch = parse_json(text)
    if not isinstance(batch, dict):
        raise ValueError("a batch of round records is not a JSON object")
    columns, rows = batch.pop("columns", None), batch.pop("rows", None)
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise ValueError("a batch of round records has no columns and rows; expected two lists")
    if not all(isinstance(name, str) for name in columns):
        raise ValueError(f"round records have the columns {columns!a:.80}; expected names")
    origin = MeasuredBy.from_dict(batch).to_dict()
    return [Round.from_dict({**_named(columns, row), **origin}) for row in rows]


def line_of(each: Round) -> str:
    """Return a training round's record as a line of JSON, without fields whose value is None."""
    values = {name: value for name, value in each.to_dict().items() if value is not None}
    return _dumps(values) + "\n"


def _named(columns: Sequence[str], row: Any) -> dict[str, Any]:
    if not isinstance(row, list) or len(row) != len(columns):
        raise ValueError(f"round records have the row {row!a:.80}; expected {len(columns)} values")
    return dict(zip(columns, row, strict=True))


def _plain(row: Round) -> list[Any]:
    return [_rounded(getattr(row, name)) for name in _COLUMNS]


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

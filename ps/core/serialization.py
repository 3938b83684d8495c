"""Converts a shard's dataclasses, sets and deques into plain data, and plain data back.

Plain data holds only None, bools, numbers, strings, lists, dicts with string keys, and arrays. A
checkpoint can store plain data, and JSON can store plain data without arrays. `from_plain` restores
only the types that the module `serialization` declares, by their declared names. Restoring a value
from plain data runs no code except the constructor of the value's type.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from thinwire.ops.aggregation import outliers
from thinwire.ops.downlink.replicas import LastReply
from thinwire.ops.downlink.types import ModelReply, Operation
from thinwire.ops.offer import LossScale
from thinwire.ops.optimizers import schedule
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.sync.base import Draw, Joiners
from thinwire.ops.types import Block, ChunkedValues, CodedValues, ModelSpec, TensorSpec, Update
from thinwire.ops.wire.blocks import IndexCoding, ValueCoding, WireBlock
from thinwire.ps.core import events, members, membership
from thinwire.runtime.failure_detector import MeanDeviation, RtoEstimator

_TYPE, _OF = "type", "of"


class _Record:
    """Name and fields of a dataclass in the files of journals and checkpoints.

    Args:
        name: Name that identifies the dataclass in journals and checkpoints.
        kind: Class object of the dataclass, which `from_plain` calls.
        fields: Names in the files of all fields that the dataclass compares, separated by spaces.
            ``old=new`` means that the field ``old`` in the files is the attribute ``new``.
        embedded: For each attribute whose fields the files hold among the fields of the record
            itself, the dataclass of the attribute. All fields of this dataclass have defaults,
            which count for a file without the field.
    """

    def __init__(self, name: str, kind: Any, fields: str, **embedded: Any) -> None:
        self.name, self.kind = name, kind
        pairs = (field.partition("=") for field in fields.split())
        self.attributes = {in_file: attribute or in_file for in_file, _, attribute in pairs}
        self.embedded = {name: (part, _compared(part)) for name, part in embedded.items()}
        actual = _compared(kind) - embedded.keys()
        if actual != set(self.attributes.values()):
            raise TypeError(
                f"{name}: this module declares the fields {sorted(self.attributes.values())}, but "
                f"{kind.__name__} has {sorted(actual)}; declare the change in _RECORDS, and raise "
                "the format numbers of the journal and the checkpoint."
            )

    def to_plain(self, value: Any) -> dict[str, Any]:
        content = {
            in_file: to_plain(getattr(value, attribute))
            for in_file, attribute in self.attributes.items()
        }
        for attribute, (_, names) in self.embedded.items():
            part = getattr(value, attribute)
            content |= {name: to_plain(getattr(part, name)) for name in sorted(names)}
        return {_TYPE: self.name, _OF: content}

    def from_plain(self, content: dict[str, Any]) -> Any:
        values = {in_file: from_plain(item) for in_file, item in content.items()}
        parts = {
            attribute: part(**{name: values.pop(name) for name in names & values.keys()})
            for attribute, (part, names) in self.embedded.items()
        }
        return self.kind(**{self.attributes[name]: item for name, item in values.items()}, **parts)


def _compared(kind: Any) -> set[str]:
    """Return the names of the fields that a dataclass compares."""
    return {field.name for field in dataclasses.fields(kind) if field.compare}


#: Forms of all dataclasses in events and in a core's state. A changed name or field makes old
#: journals and checkpoints unreadable, so a change must raise the format numbers in
#: persistence.journal and persistence.shard_store.
_RECORDS = (
    _Record("Join", events.Join, "worker incarnation reconnects peer epoch"),
    _Record("Pull", events.Pull, "worker incarnation base_version generation"),
    _Record(
        "Push",
        events.Push,
        "worker incarnation epoch update aux num_bytes change blocks",
        head=PushHead,
        origin=PushOrigin,
    ),
    _Record(
        "Query",
        events.Query,
        "worker incarnation step local_steps step_seconds age_seconds query_seconds",
    ),
    _Record("EvaluationPull", events.EvaluationPull, "observer"),
    _Record("WorkerAlive", events.WorkerAlive, "worker"),
    _Record("WorkerDisconnected", events.WorkerDisconnected, "worker incarnation"),
    _Record("Leave", events.Leave, "worker incarnation cause"),
    _Record("GroupAssignment", events.GroupAssignment, "epoch groups after"),
    _Record(
        "MembershipEpoch",
        events.MembershipEpoch,
        "number live started formed incarnations draws joiners over",
    ),
    _Record("Draw", Draw, "number of_round workers steps after"),
    _Record("Joiners", Joiners, "workers has_entered members after"),
    _Record("PushRejected", events.PushRejected, "worker reason"),
    _Record("Stop", events.Stop, "reason"),
    _Record("ProcessStalled", events.ProcessStalled, "seconds"),
    _Record("Tick", events.Tick, ""),
    _Record("WorkerIncarnation", events.WorkerIncarnation, "worker incarnation"),
    _Record("WorkerUnreachable", events.WorkerUnreachable, "member"),
    _Record("Failed", events.Failed, "worker incarnation step is_hello cause"),
    _Record("LossScale", LossScale, "initial growth_steps streak"),
    _Record("ModelSpec", ModelSpec, "tensors"),
    _Record("TensorSpec", TensorSpec, "path shape dtype"),
    _Record("Update", Update, "indices values"),
    _Record("Block", Block, "slot size indices values slots"),
    _Record("CodedValues", CodedValues, "dtype data scale"),
    _Record("ChunkedValues", ChunkedValues, "dtype data scale scales edges chunk first"),
    _Record(
        "WireBlock",
        WireBlock,
        "slot count coding coding_parameter index_bytes value_dtype scale value_bytes value_coding "
        "chunk chunk_first slots",
    ),
    _Record("ModelReply", ModelReply, "operation update version kind is_resync"),
    _Record("LastReply", LastReply, "step base_version reply"),
    _Record("Budget", schedule.Budget, "iter_max examples"),
    _Record("Schedule", schedule.Schedule, "learning_rate drops"),
    _Record("RateCurve", schedule.RateCurve, "learning_rate drops shape warmup floor"),
    _Record(
        "Guards",
        outliers.Guards,
        "update_peak_factor max_update_norm update_norm_factor quarantine_after quarantine_seconds",
    ),
    _Record(
        "CoreConfig",
        members.CoreConfig,
        "budget schedule nb_workers generation generations_undone max_seconds "
        "start_timeout_seconds snapshot_interval_seconds spec guards loss_scale first_batches",
    ),
    _Record(
        "Member",
        members.Member,
        "incarnation last_step base_version oldest_base push_bytes buffered submitted request "
        "may_proceed requested_at staleness",
    ),
    _Record("OpenRequest", members.OpenRequest, "step base_version"),
    _Record("Lease", membership.Lease, "incarnation peer last_seen connected suspected arrivals"),
    _Record("IncarnationClaim", membership.IncarnationClaim, "incarnation epoch peer"),
    _Record(
        "RtoEstimator",
        RtoEstimator,
        "least_seconds most_seconds seen_at=last_arrival_at beat_at longest_seconds patience beats",
    ),
    _Record("MeanDeviation", MeanDeviation, "mean_seconds deviation_seconds num_samples"),
)
_BY_NAME = {record.name: record for record in _RECORDS}
_BY_TYPE = {record.kind: record for record in _RECORDS}
_ENUMS: dict[str, Any] = {
    "Operation": Operation,
    "IndexCoding": IndexCoding,
    "ValueCoding": ValueCoding,
}


def to_plain(value: Any) -> Any:
    """Return a value as plain data (dicts, lists, numbers), which shares the value's arrays. Values
    of type bytes become uint8 arrays in plain data.

    Plain data omit the fields of dataclasses that the dataclass does not compare.

    Raises:
        TypeError: The value is or contains an object of a type that the module `serialization` does
            not declare.
    """
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, np.ndarray):
        return value
    if type(value) in (bytes, memoryview):
        return np.frombuffer(value, np.uint8)
    if type(value) is list:
        return [to_plain(item) for item in value]
    if (record := _BY_TYPE.get(type(value))) is not None:
        return record.to_plain(value)
    name = type(value).__name__
    if isinstance(value, enum.Enum) and _ENUMS.get(name) is type(value):
        return {_TYPE: name, _OF: value.value}
    if isinstance(value, Mapping):
        name = "Counter" if isinstance(value, collections.Counter) else "dict"
        return {_TYPE: name, _OF: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if isinstance(value, collections.deque):
        return {_TYPE: "deque", _OF: [to_plain(item) for item in value], "most": value.maxlen}
    if type(value) in (tuple, set):
        items = sorted(value) if type(value) is set else value
        return {_TYPE: name, _OF: [to_plain(item) for item in items]}
    raise TypeError(f"a {type(value).__name__} cannot become plain data: {value!r:.80}")


def from_plain(value: Any) -> Any:
    """Restore a value from the plain data (dicts, lists, numbers) that `to_plain` returned.

    Raises:
        ValueError, KeyError, TypeError: The plain data are not a result of `to_plain`.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    name, content = value[_TYPE], value[_OF]
    if name in _BY_NAME:
        return _BY_NAME[name].from_plain(content)
    if name in _ENUMS:
        return _ENUMS[name](content)
    if name in ("dict", "Counter"):
        pairs = {from_plain(key): from_plain(item) for key, item in content}
        return collections.Counter(pairs) if name == "Counter" else pairs
    items = [from_plain(item) for item in content]
    if name == "deque":
        return collections.deque(items, maxlen=value["most"])
    if name in ("tuple", "set"):
        return tuple(items) if name == "tuple" else set(items)
    raise ValueError(f"a document's value has the unknown type {name!r:.80}; expected a data class")

"""Dataclasses, sets, deques and the like as plain data, and back.

What comes out holds only None, bools, numbers, strings, lists, dicts with string keys, and arrays:
a checkpoint takes it, and, where there are no arrays, JSON. Only the types below are made again,
and making one runs no code but its constructor.
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
from thinwire.ops.failure_detector import MeanDeviation, RtoEstimator
from thinwire.ops.optimizers import schedule
from thinwire.ops.types import Block, CodedValues, Update
from thinwire.ps.core import events, members
from thinwire.ps.core import membership as core_membership
from thinwire.ps.core.counters import GroupAccount, WorkerAccount

_TYPE, _OF = "type", "of"

#: Everything with fields that a core may remember or be told.
_RECORDS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(
            events.Join,
            events.Pull,
            events.Push,
            events.Query,
            events.EvaluationPull,
            events.WorkerAlive,
        ),
        *(
            events.WorkerDisconnected,
            events.Leave,
            events.GroupAssignment,
            events.MembershipEpoch,
            events.PushRejected,
            events.Stop,
        ),
        *(
            events.ProcessStalled,
            events.Tick,
            events.WorkerIncarnation,
            events.WorkerUnreachable,
            events.Failed,
        ),
        *(Update, Block, CodedValues),
        *(ModelReply, LastReply),
        *(schedule.Budget, schedule.Schedule, outliers.Guards),
        *(
            members.Member,
            members.CoreConfig,
            core_membership.Lease,
            core_membership.IncarnationClaim,
        ),
        *(RtoEstimator, MeanDeviation),
        *(WorkerAccount, GroupAccount),
    )
}
_ENUMS: dict[str, Any] = {"Operation": Operation}


def to_plain(value: Any) -> Any:
    """Return a value as plain data; arrays are not copied.

    Fields that make no difference between two records are left out.

    Raises:
        TypeError: It is, or holds, something that cannot be made again.
    """
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, np.ndarray):
        return value
    if type(value) is list:
        return [to_plain(item) for item in value]
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        fields = (field.name for field in dataclasses.fields(value) if field.compare)
        return {_TYPE: name, _OF: {field: to_plain(getattr(value, field)) for field in fields}}
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
    raise TypeError(f"a {type(value).__name__} cannot be kept as plain data: {value!r:.80}")


def from_plain(value: Any) -> Any:
    """Undo `to_plain`.

    Raises:
        ValueError, KeyError, TypeError: It is not what `to_plain` gives.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    name, content = value[_TYPE], value[_OF]
    if name in _RECORDS:
        return _RECORDS[name](**{field: from_plain(item) for field, item in content.items()})
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
    raise ValueError(f"no type {name!r:.80} is known here")

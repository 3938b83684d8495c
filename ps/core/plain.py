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
from thinwire.ops.downlink.types import Handed, Operation
from thinwire.ops.failure_detector import Arrivals, Spread
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
        *(events.Join, events.Pull, events.Push, events.Query, events.Observe, events.Alive),
        *(events.Lost, events.Leave, events.Formed, events.Epoch, events.Refused, events.Stop),
        *(events.Stalled, events.Tick, events.Life, events.Unheard, events.Failed),
        *(Update, Block, CodedValues),
        *(Handed, LastReply),
        *(schedule.Budget, schedule.Schedule, outliers.Guards),
        *(members.Member, members.CoreConfig, core_membership.Lease, core_membership.Claim),
        *(Arrivals, Spread),
        *(WorkerAccount, GroupAccount),
    )
}
_ENUMS: dict[str, Any] = {"Operation": Operation}


def plain(value: Any) -> Any:
    """Return a value as plain data; arrays are not copied.

    Fields that make no difference between two records are left out.

    Raises:
        TypeError: It is, or holds, something that cannot be made again.
    """
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, np.ndarray):
        return value
    if type(value) is list:
        return [plain(item) for item in value]
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        fields = (field.name for field in dataclasses.fields(value) if field.compare)
        return {_TYPE: name, _OF: {field: plain(getattr(value, field)) for field in fields}}
    if isinstance(value, enum.Enum) and _ENUMS.get(name) is type(value):
        return {_TYPE: name, _OF: value.value}
    if isinstance(value, Mapping):
        name = "Counter" if isinstance(value, collections.Counter) else "dict"
        return {_TYPE: name, _OF: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, collections.deque):
        return {_TYPE: "deque", _OF: [plain(item) for item in value], "most": value.maxlen}
    if type(value) in (tuple, set):
        items = sorted(value) if type(value) is set else value
        return {_TYPE: name, _OF: [plain(item) for item in items]}
    raise TypeError(f"a {type(value).__name__} cannot be kept as plain data: {value!r:.80}")


def made(value: Any) -> Any:
    """Undo `plain`.

    Raises:
        ValueError, KeyError, TypeError: It is not what `plain` gives.
    """
    if isinstance(value, list):
        return [made(item) for item in value]
    if not isinstance(value, dict):
        return value
    name, content = value[_TYPE], value[_OF]
    if name in _RECORDS:
        return _RECORDS[name](**{field: made(item) for field, item in content.items()})
    if name in _ENUMS:
        return _ENUMS[name](content)
    if name in ("dict", "Counter"):
        pairs = {made(key): made(item) for key, item in content}
        return collections.Counter(pairs) if name == "Counter" else pairs
    items = [made(item) for item in content]
    if name == "deque":
        return collections.deque(items, maxlen=value["most"])
    if name in ("tuple", "set"):
        return tuple(items) if name == "tuple" else set(items)
    raise ValueError(f"no type {name!r:.80} is known here")

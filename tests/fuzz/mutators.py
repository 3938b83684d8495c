"""Changes messages field by field, because random byte changes seldom give a valid message."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.target import parsed

_WIDTHS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 12),
}
_REALS = (0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, float("nan"), float("inf"), float("-inf"))
#: How deep a message is followed, and how long a list gets.
_DEPTH, _LONGEST = 3, 6


def changed(message: Message, dice: random.Random) -> None:
    """Change one to four fields of a message, in place."""
    for _ in range(dice.randrange(1, 5)):
        _change(message, dice, _DEPTH)


def _change(message: Message, dice: random.Random, depth: int) -> None:
    field = dice.choice(message.DESCRIPTOR.fields)
    if depth and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change_inner(message, field, dice, depth)
    elif dice.randrange(8) == 0:
        message.ClearField(field.name)
    elif field.is_repeated:
        values = list(getattr(message, field.name))
        if values and dice.randrange(3) == 0:
            values.pop(dice.randrange(len(values)))
        elif values and dice.randrange(2):
            at = dice.randrange(len(values))
            values[at] = _value(field, values[at], dice)
        elif len(values) < _LONGEST:
            values.append(_value(field, field.default_value or None, dice))
        message.ClearField(field.name)
        getattr(message, field.name).extend(values)
    elif field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        setattr(message, field.name, _value(field, getattr(message, field.name), dice))


def _change_inner(message: Message, field: Any, dice: random.Random, depth: int) -> None:
    if not field.is_repeated:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _change(inner, dice, depth - 1)
        return
    rows = getattr(message, field.name)
    what = dice.randrange(4)
    if what == 0 and len(rows):
        del rows[dice.randrange(len(rows))]
    elif (what == 1 or not len(rows)) and len(rows) < _LONGEST:
        row = rows.add()
        if len(rows) > 1 and dice.randrange(2):
            row.CopyFrom(rows[dice.randrange(len(rows) - 1)])
        else:
            _change(row, dice, depth - 1)
    elif len(rows):
        _change(rows[dice.randrange(len(rows))], dice, depth - 1)


def _value(field: Any, before: Any, dice: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not before
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return dice.choice((*_REALS, dice.random()))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return _bytes(before or b"", dice)
        return dice.choice(("", "x", (before or "") + "é", "9" * 400, (before or "")[:-1], "\0"))
    low, high = _WIDTHS[kind]
    near = (before or 0) + dice.choice((-1, 1))
    number = dice.choice((0, 1, 2, 3, 7, 28, near, near, 255, low, high, dice.randrange(64)))
    return min(high, max(low, number))


def _bytes(before: bytes, dice: random.Random) -> bytes:
    spoilt = bytearray(before)
    at = dice.randrange(len(spoilt) + 1)
    match dice.randrange(5):
        case 0:
            del spoilt[at : at + dice.randrange(1, 8)]
        case 1:
            spoilt[at:at] = dice.randbytes(dice.randrange(1, 8))
        case 2:
            spoilt[at:at] = b"\0" * dice.randrange(1, 16)
        case _ if at < len(spoilt):
            spoilt[at] = dice.randrange(256)
    return bytes(spoilt)


def mutated(data: bytes, kind: type[Message], head: int, dice: random.Random) -> bytes | None:
    """Return an input with its message changed; None if the input holds no message.

    Args:
        data: `head` bytes, then the message.
        kind: Kind of the message.
        head: Bytes before the message; one byte is changed now and then.
        dice: Decides.
    """
    message = kind()
    if not parsed(message, data[head:]):
        return None
    changed(message, dice)
    start = bytearray(data[:head].ljust(head, b"\0"))
    if head and dice.randrange(8) == 0:
        start[dice.randrange(head)] = dice.randrange(256)
    return bytes(start) + message.SerializeToString()

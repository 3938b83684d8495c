"""Documents: frozen dataclasses that nodes exchange as JSON, with a check of every field read.

Documents come from other hosts, so the reader does not trust them. When a document is read,
unknown, missing or ill-typed fields, NaN, numbers above 1e300, control characters and deep nesting
raise a ValueError that names the field and the value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from thinwire.runtime.run.files import replace_file

_DocumentType = typing.TypeVar("_DocumentType", bound="Document")
_Dataclass = typing.TypeVar("_Dataclass")
_Found = typing.TypeVar("_Found")
_LARGEST_COUNT = 2**63 - 1
_LONGEST_TEXT = 1000
#: Largest magnitude of a number in a document, so that the sum of many numbers is finite.
LARGEST_NUMBER = 1e300
_DEEPEST_NESTING = 16


class Document:
    """Base class of dataclasses that nodes send, or store in files, as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return field name -> plain JSON value for the fields of this document."""
        return to_dict(self)

    def to_json(self) -> str:
        """Return this document as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls: type[_DocumentType], values: Any, where: str = "") -> _DocumentType:
        """Build a document from parsed JSON; raise ValueError if a field of the JSON is wrong."""
        return from_dict(cls, values, where)

    @classmethod
    def from_json(cls: type[_DocumentType], text: str | bytes) -> _DocumentType:
        """Parse and check a document's JSON from an untrusted source; raise ValueError if wrong."""
        return cls.from_dict(parse_json(text))


def to_dict(document: Any) -> dict[str, Any]:
    """Return field name -> plain JSON value for the fields of a dataclass.

    The fields of a document are counts (ints of 0 to 2**63 - 1), floats, strings, and lists, dicts
    and dataclasses of these types. A field of a document with the annotation ``float | None`` is
    written as null if its value is not finite.

    Raises:
        ValueError: A field of the dataclass that may not be null is NaN or infinite.
    """
    kinds = _kinds(type(document))
    return {name: _write(getattr(document, name), kind, name) for name, kind in kinds.items()}


def from_dict(cls: type[_Dataclass], values: Any, where: str = "") -> _Dataclass:
    """Build a dataclass from untrusted parsed JSON; fields with a default may be missing.

    Raises:
        ValueError: A field of the JSON object is unknown, missing or has a wrong value. The message
            names the field.
    """
    where = where or cls.__name__
    if not isinstance(values, dict):
        _refuse(where, values, "an object")
    kinds = _kinds(cls)
    for name in values:
        if name not in kinds:
            raise ValueError(f"{where} has the unknown field {name!r:.80}")
    fields = {
        name: _read(values[name], kind, f"{where}.{name}")
        for name, kind in kinds.items()
        if name in values
    }
    for name in kinds:
        if name not in fields and name in _required(cls):
            raise ValueError(f"{where} lacks the field {name!r}")
    return cls(**fields)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: NaN, Infinity and very deep nesting raise ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("values of the JSON document are nested too deeply") from error


def write_json_atomically(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write ``document`` as JSON so that readers see the old file or the whole new file.

    Raises:
        ValueError: The document holds NaN or infinity, which JSON cannot express.
        OSError: The JSON file cannot be written. The error names the file.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    replace_file(path, text, durable=True)


def _once(find: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """Cache the results of a function of dataclasses or annotations, which are few."""
    return functools.cache(find)


_kind_origin: Callable[[Any], Any] = _once(typing.get_origin)
_kind_arguments: Callable[[Any], Any] = _once(typing.get_args)


@_once
def _kinds(cls: Any) -> dict[str, Any]:
    """Return field name -> resolved annotation of a dataclass, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@_once
def _required(cls: Any) -> frozenset[str]:
    missing = dataclasses.MISSING
    return frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is missing and field.default_factory is missing
    )


def _write(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        arguments = _kind_arguments(kind)
        item_kind = arguments[1] if arguments else Any
        return {str(key): _write(item, item_kind, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_write(item, Any, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if _is_optional(kind):
            return None
        raise ValueError(f"{where} has the value {value}; expected a finite number")
    return value


def _read(value: Any, kind: Any, where: str) -> Any:
    """Check a JSON value against a field's annotation ``kind``; return it as the annotated type."""
    if kind is Any:
        return check_plain(value, where)
    if _is_optional(kind):
        (kind,) = (choice for choice in _kind_arguments(kind) if choice is not type(None))
        return None if value is None else _read(value, kind, where)
    origin, arguments = _kind_origin(kind), _kind_arguments(kind)
    if origin is typing.Literal:
        if value not in arguments:
            _refuse(where, value, f"one of {', '.join(arguments)}")
        return value
    if origin is list:
        if not isinstance(value, list):
            _refuse(where, value, "a list")
        return [_read(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        return _read_dict(value, arguments[0], arguments[1], where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where)
    return _read_scalar(value, kind, where)


def _read_dict(value: Any, key_kind: Any, item_kind: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    result = {}
    for text, item in value.items():
        key: Any = _read_scalar(text, str, f"a key of {where}")
        if key_kind is int:
            if not (text.isascii() and text.isdigit() and len(text) <= 18):
                _refuse(f"a key of {where}", text, "a whole number")
            key = int(text)
        result[key] = _read(item, item_kind, f"{where}.{text}")
    return result


def _read_scalar(value: Any, kind: Any, where: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        if not is_name(value):
            _refuse(where, value, f"at most {_LONGEST_TEXT} printable characters")
        return value
    if kind is int and type(value) is int:
        if not 0 <= value <= _LARGEST_COUNT:
            _refuse(where, value, "a count from 0 to 2**63 - 1")
        return value
    if kind is float and type(value) in (int, float):
        # Compare the number before converting it, because float() and isfinite() raise
        # OverflowError for an int larger than any float.
        if abs(value) > LARGEST_NUMBER or not math.isfinite(value):
            _refuse(where, value, "a finite number")
        return float(value)
    _refuse(where, value, {int: "a whole number", float: "a number"}.get(kind, kind.__name__))


def is_name(text: str) -> bool:
    """Return True if a text is short and has no control characters, as documents require."""
    return len(text) <= _LONGEST_TEXT and text.isprintable()


def check_plain(value: Any, where: str, depth: int = _DEEPEST_NESTING) -> Any:
    """Check a JSON value without a declared type, for example the figures of a policy.

    Raises:
        ValueError: A document may not hold the value. The message names the field and the value.
    """
    if depth == 0:
        raise ValueError(f"{where} has values nested more than {_DEEPEST_NESTING} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _read_scalar(key, str, f"a key of {where}")
            check_plain(item, f"{where}.{key}", depth - 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]", depth - 1)
    elif isinstance(value, str):
        _read_scalar(value, str, where)
    elif value is not None and not isinstance(value, bool):
        _read_scalar(value, float, where)
    return value


def _is_optional(kind: Any) -> bool:
    return _kind_origin(kind) in (types.UnionType, typing.Union) and (
        type(None) in _kind_arguments(kind)
    )


def _refuse(where: str, value: Any, expected: str) -> NoReturn:
    # Escape the value with ascii(), because an attacker may have chosen it, and a log or a terminal
    # would interpret control characters in the error message.
    shown = f"{value.bit_length()} bits" if type(value) is int and value > 2**64 else ascii(value)
    raise ValueError(f"{where} is {shown:.80}, expected {expected}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the JSON document contains the number {name}; expected finite numbers")

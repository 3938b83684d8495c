"""Command-line flags as data: a flag is one line of a table of its package.

A package's `flags.py` lists its flags under topics; `thinwire.flags.run.define` registers them, and
only there a flag library is known. So a table is read like documentation, and is built without
imports. Flags that few people set are marked by `advanced`: `--help` leaves them to `--helpfull`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

Kind = Literal["switch", "integer", "number", "choice", "text", "list"]


@dataclasses.dataclass(frozen=True)
class FlagRule:
    """What a value must fulfil beyond its type and bounds; None (not given) always does."""

    holds: Callable[[Any], bool]
    sentence: str  # goes on after "--name "


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag."""

    kind: Kind
    name: str
    default: Any  # None: not given
    text: str  # the line of --help
    low: float | None = None  # inclusive bounds of integer and number
    high: float | None = None
    values: tuple[str, ...] = ()  # of a choice
    rule: FlagRule | None = None
    is_advanced: bool = False  # shown by --helpfull, not by --help


@dataclasses.dataclass(frozen=True)
class Topic:
    """Flags that --help shows together."""

    title: str
    options: tuple[Option, ...]


def advanced(*options: Option) -> tuple[Option, ...]:
    """Return the flags, marked as shown by --helpfull only: ``(*advanced(...), switch(...))``."""
    return tuple(dataclasses.replace(option, is_advanced=True) for option in options)


def switch(name: str, text: str, default: bool = False) -> Option:
    """Return a flag that is off, or on, unless given."""
    return Option("switch", name, default, text)


def integer(
    name: str,
    default: int | None,
    text: str,
    low: int | None = None,
    high: int | None = None,
    rule: FlagRule | None = None,
) -> Option:
    """Return a flag of a whole number from `low` to `high`."""
    return Option("integer", name, default, text, low, high, rule=rule)


def number(
    name: str,
    default: float | None,
    text: str,
    low: float | None = None,
    high: float | None = None,
    rule: FlagRule | None = None,
) -> Option:
    """Return a flag of a finite number from `low` to `high`."""
    return Option("number", name, default, text, low, high, rule=rule)


def choice(name: str, default: str | None, text: str, values: Iterable[str]) -> Option:
    """Return a flag of one word out of `values`."""
    return Option("choice", name, default, text, values=tuple(values))


def words(name: str, default: str | None, text: str, rule: FlagRule | None = None) -> Option:
    """Return a flag of free text, such as a path."""
    return Option("text", name, default, text, rule=rule)


def comma_list(name: str, default: str, text: str, rule: FlagRule | None = None) -> Option:
    """Return a flag of words between commas; empty text is the empty list."""
    return Option("list", name, default, text, rule=rule)


def numbers_per_worker(name: str, default: str, text: str) -> Option:
    """Return a flag of one number, or of one for each worker."""
    rule = FlagRule(_are_numbers, "takes numbers, such as 100 or 100,10,1")
    return comma_list(name, default, f"{text} One value, or one per worker.", rule)


def above_zero(advice: str = "") -> FlagRule:
    """Return the rule of numbers that must not be 0 either."""
    return FlagRule(lambda value: value > 0, "must be above 0" + (f"; {advice}" if advice else ""))


def _are_numbers(values: list[str]) -> bool:
    try:
        return bool([float(value) for value in values])
    except ValueError:
        return False


#: The rule of a list of numbers that may be empty.
ARE_NUMBERS_OR_NONE = FlagRule(
    lambda values: not values or _are_numbers(values), "takes numbers, such as 4,2,1"
)

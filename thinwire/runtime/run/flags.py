"""Command-line flags as data: a flag is one line of a table of its package.

A package's `flags.py` lists its flags under topics; `thinwire.flags.registration` registers
them, and only there a flag library is known. A table is read like documentation, and is built
without imports. Flags that few people set are marked by `advanced`: `--help` leaves them to
`--helpfull`.
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
    text: str  # the line of --help; unit and default are added to it
    unit: str = ""  # seconds, Mbit/s, fraction ...; what the text of a text flag is
    low: float | None = None  # inclusive bounds of integer and number
    high: float | None = None
    values: tuple[str, ...] = ()  # of a choice
    rule: FlagRule | None = None
    unset: str = ""  # what holds if it is not given and has no default
    is_advanced: bool = False  # shown by --helpfull, not by --help

    @property
    def values_and_default(self) -> str:
        """What it takes, and what holds if it is not given.

        >>> number("pause", 10.0, "Time between two looks.", "seconds").values_and_default
        'seconds; default 10'
        """
        if self.kind == "switch":
            return f"switch; default {self.unset or ('on' if self.default else 'off')}"
        default = self.unset if self.default in (None, "") else f"{self.default}".removesuffix(".0")
        return f"{'|'.join(self.values) or self.unit}; default {default}"


@dataclasses.dataclass(frozen=True)
class Topic:
    """Flags that --help shows together."""

    title: str
    options: tuple[Option, ...]


def advanced(*options: Option) -> tuple[Option, ...]:
    """Return the flags, marked as shown by --helpfull only: ``(*advanced(...), switch(...))``."""
    return tuple(dataclasses.replace(option, is_advanced=True) for option in options)


def switch(name: str, text: str, default: bool | None = False, unset: str = "") -> Option:
    """Return a flag that is off, or on, unless given; `unset` is what None means."""
    return Option("switch", name, default, text, unset=unset)


def integer(
    name: str,
    default: int | None,
    text: str,
    unit: str,
    low: int | None = None,
    high: int | None = None,
    rule: FlagRule | None = None,
    unset: str = "",
) -> Option:
    """Return a flag of a whole number from `low` to `high`."""
    return Option("integer", name, default, text, unit, low, high, rule=rule, unset=unset)


def number(
    name: str,
    default: float | None,
    text: str,
    unit: str,
    low: float | None = None,
    high: float | None = None,
    rule: FlagRule | None = None,
    unset: str = "",
) -> Option:
    """Return a flag of a finite number from `low` to `high`."""
    return Option("number", name, default, text, unit, low, high, rule=rule, unset=unset)


def choice(
    name: str, default: str | None, text: str, values: Iterable[str], unset: str = ""
) -> Option:
    """Return a flag of one word out of `values`."""
    return Option("choice", name, default, text, values=tuple(values), unset=unset)


def words(
    name: str,
    default: str | None,
    text: str,
    unit: str,
    rule: FlagRule | None = None,
    unset: str = "",
) -> Option:
    """Return a flag of free text, such as a path."""
    return Option("text", name, default, text, unit, rule=rule, unset=unset)


def comma_list(
    name: str, default: str, text: str, unit: str, rule: FlagRule | None = None, unset: str = ""
) -> Option:
    """Return a flag of words between commas; empty text is the empty list."""
    return Option("list", name, default, text, unit, rule=rule, unset=unset)


def numbers_per_worker(name: str, default: str, text: str, unit: str) -> Option:
    """Return a flag of one number, or of one for each worker."""
    rule = FlagRule(_are_numbers, "takes numbers, such as 100 or 100,10,1")
    return comma_list(name, default, text, f"{unit}, one for all or one per worker", rule)


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

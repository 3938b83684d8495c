"""Options: command-line flags as data, with help text, unit, default and legal values.

The field of a policy's dataclass declares the flag that sets the field (`thinwire.ops.policy`). The
other flags are in tables: the module `flags.py` of a package lists the package's flags by topics.
Only `thinwire.flags.registration`, which registers the flags, uses a flag library. Flags that few
users set are marked with `advanced`: only `--helpfull` lists these flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

Kind = Literal["switch", "integer", "number", "choice", "text", "list"]


@dataclasses.dataclass(frozen=True)
class FlagRule:
    """Condition on a flag's value in addition to type and bounds; None fulfils every rule."""

    holds: Callable[[Any], bool]
    sentence: str  # message of a value that violates the rule, after "--name "


@dataclasses.dataclass(frozen=True)
class Option:
    """One command-line flag."""

    kind: Kind
    name: str
    default: Any  # value if the flag is not given; None: the flag is unset
    text: str  # help text, to which --help adds unit and default
    unit: str = ""  # unit of a number (seconds, Mbit/s, ...), or kind of a text
    low: float | None = None  # inclusive lower bound of a numeric flag; None: no bound
    high: float | None = None  # inclusive upper bound of a numeric flag; None: no bound
    values: tuple[str, ...] = ()  # allowed words of a choice flag
    rule: FlagRule | None = None
    unset: str = ""  # help text on the behavior if the flag is unset
    is_advanced: bool = False  # True: only --helpfull lists the flag, --help does not

    @property
    def values_and_default(self) -> str:
        """Accepted values and the default of the flag, for the help text.

        >>> number("pause", 10.0, "Time between two looks.", "seconds").values_and_default
        'seconds; default 10'
        """
        if self.kind == "switch":
            return f"switch; default {self.unset or ('on' if self.default else 'off')}"
        default = self.unset if self.default in (None, "") else f"{self.default}".removesuffix(".0")
        return f"{'|'.join(self.values) or self.unit}; default {default}"

    def is_given(self, value: Any) -> bool:
        """Return True if a value is set and differs from the default, which may be off or empty."""
        is_off = value == () or (value is False and self.default is None)
        return value is not None and value != self.default and not is_off

    def refusal(self, value: Any) -> str | None:
        """Return why a value of the option is illegal, as a sentence; None if the value is legal.

        >>> number("pause", 10.0, "Time between two looks.", "seconds", low=1.0).refusal(0.5)
        '--pause=0.5: expected 1 or more.'
        """
        if self.rule is not None and not self.rule.holds(value):
            return f"--{self.name}={value} {self.rule.sentence}."
        if self.kind in ("integer", "number"):
            low = -math.inf if self.low is None else self.low
            high = math.inf if self.high is None else self.high
            if math.isfinite(value) and low <= value <= high:
                return None
            bounds = "a finite number" if low == -math.inf else f"{low:g} or more"
            expected = bounds if high == math.inf else f"{low:g} to {high:g}"
        elif not self.values or value in self.values:
            return None
        else:
            expected = f"one of {', '.join(self.values)}"
        return f"--{self.name}={value}: expected {expected}."


@dataclasses.dataclass(frozen=True)
class Topic:
    """Topic: a group of flags that --help lists under one heading.

    Attributes:
        title: Heading of the flags in the help text.
        listed: The topic's flags; or a function that returns the flags, because the flags of
            policies change when a user adds a policy (--policy).
    """

    title: str
    listed: tuple[Option, ...] | Callable[[], tuple[Option, ...]]

    @property
    def options(self) -> tuple[Option, ...]:
        """Flags of the topic, in the order of the help text."""
        return self.listed() if callable(self.listed) else self.listed


def advanced(*options: Option) -> tuple[Option, ...]:
    """Mark flags so that only --helpfull lists them: ``FLAGS = (*advanced(...), switch(...))``."""
    return tuple(dataclasses.replace(option, is_advanced=True) for option in options)


def switch(name: str, text: str, default: bool | None = False, unset: str = "") -> Option:
    """Return a boolean flag; `unset` describes the behavior if the flag's default is None."""
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
    """Return a flag whose value is a whole number from `low` to `high`."""
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
    """Return a flag whose value is a finite number from `low` to `high`."""
    return Option("number", name, default, text, unit, low, high, rule=rule, unset=unset)


def fraction(name: str, default: float, text: str, unit: str = "fraction") -> Option:
    """Return a flag whose value is a number from 0 to 1."""
    return number(name, default, text, unit, low=0.0, high=1.0)


def decay_factor(name: str, text: str, unset: str) -> Option:
    """Return a flag without default whose value is a decay factor below 1, such as a momentum."""
    return number(name, None, text, "factor", low=0.0, high=0.9999, unset=unset)


def choice(
    name: str, default: str | None, text: str, values: Iterable[str], unset: str = ""
) -> Option:
    """Return a flag whose value is one word out of `values`."""
    return Option("choice", name, default, text, values=tuple(values), unset=unset)


def words(
    name: str,
    default: str | None,
    text: str,
    unit: str,
    rule: FlagRule | None = None,
    unset: str = "",
) -> Option:
    """Return a flag whose value is free text, for example a path."""
    return Option("text", name, default, text, unit, rule=rule, unset=unset)


#: Rule for a flag's text that must not be empty.
NOT_EMPTY = FlagRule(lambda text: bool(text.strip()), "must not be empty")


def file(name: str, text: str, unset: str = "none") -> Option:
    """Return a flag whose value is the path of a file; it is unset by default."""
    return words(name, None, text, "file", NOT_EMPTY, unset)


def comma_list(
    name: str, default: str, text: str, unit: str, rule: FlagRule | None = None, unset: str = ""
) -> Option:
    """Return a flag whose value is a comma-separated list; an empty text is the empty list."""
    return Option("list", name, default, text, unit, rule=rule, unset=unset)


def numbers_per_worker(name: str, default: str, text: str, unit: str) -> Option:
    """Return a flag whose value is one number for all workers, or one number per worker."""
    rule = FlagRule(_are_numbers, "takes numbers, such as 100 or 100,10,1")
    return comma_list(name, default, text, f"{unit}, one for all or one per worker", rule)


def above_zero(advice: str = "") -> FlagRule:
    """Return the rule that a flag's number must be above 0; `advice` ends the error message."""
    return FlagRule(lambda value: value > 0, "must be above 0" + (f"; {advice}" if advice else ""))


def _are_numbers(values: list[str]) -> bool:
    try:
        return bool([float(value) for value in values])
    except ValueError:
        return False


#: Rule for a flag's value that must be a list of numbers, or empty.
ARE_NUMBERS_OR_NONE = FlagRule(
    lambda values: not values or _are_numbers(values), "takes numbers, such as 4,2,1"
)

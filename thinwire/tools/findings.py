"""Defines the result of a check of `thinwire doctor`: a line of text with advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Level = Literal["ok", "warning", "problem"]
_CODES: dict[Level, int] = {"ok": 0, "warning": 1, "problem": 2}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check of `thinwire doctor`.

    Attributes:
        what: Name of the checked property, for example ``clock``.
        level: Level of the result: ok, warning (a run works less well) or problem (a run does not
            work).
        text: Measured value or observed state, as text.
        advice: Advice to the user; empty if there is nothing to do.
    """

    what: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        """Return the check's result as a line of text."""
        line = f"{self.level:8} {self.what:22} {self.text}"
        return f"{line}; {self.advice}" if self.advice else line


def worst_code(findings: Iterable[Finding]) -> int:
    """Return an exit code: 0 if all check results are ok, 1 after a warning, 2 after a problem."""
    return max((_CODES[finding.level] for finding in findings), default=0)


def graded(
    what: str,
    value: float,
    text: str,
    advice: str,
    warn_above: float,
    fail_above: float = float("inf"),
) -> Finding:
    """Return a check's result for a measured value (smaller is better), by two limits.

    Args:
        what: Name of the checked property.
        value: Measured value, in the unit of the limits.
        text: Measured value as text.
        advice: Advice to the user for a warning or a problem.
        warn_above: Largest measured value for which the result of the check is ok.
        fail_above: Largest measured value for which the result is a warning. A larger value is a
            problem.
    """
    if value <= warn_above:
        return Finding(what, "ok", text)
    return Finding(what, "problem" if value > fail_above else "warning", text, advice)

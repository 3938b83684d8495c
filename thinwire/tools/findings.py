"""What an examination finds: one line each, with what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Level = Literal["ok", "warning", "problem"]
_CODES: dict[Level, int] = {"ok": 0, "warning": 1, "problem": 2}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was examined.

    Attributes:
        what: Was examined, for example ``clock``.
        level: ok, warning (a run works, less well) or problem (a run will not work).
        text: What was found.
        advice: What to do; empty if nothing.
    """

    what: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        """Return it as a line."""
        line = f"{self.level:8} {self.what:22} {self.text}"
        return f"{line}; {self.advice}" if self.advice else line


def worst_code(findings: Iterable[Finding]) -> int:
    """Return the exit code: 0 all ok, 1 a warning, 2 a problem."""
    return max((_CODES[each.level] for each in findings), default=0)


def graded(
    what: str,
    value: float,
    text: str,
    advice: str,
    warn_above: float,
    fail_above: float = float("inf"),
) -> Finding:
    """Return a finding by a value of which less is better."""
    if value <= warn_above:
        return Finding(what, "ok", text)
    return Finding(what, "problem" if value > fail_above else "warning", text, advice)

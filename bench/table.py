"""Result rows of benchmarks, which compare work with a limit, and the table of these rows."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement of one piece of work and of its limit or peer in the same run."""

    HEAD: ClassVar = ("work", "ours", "limit", "unit", "ratio", "spread", "goal", "met", "note")

    work: str
    value: float  # Thinwire's figure
    unit: str  # unit of `value` and `limit`
    limit: float  # figure of the limit or the peer
    ratio: float  # value / limit, or limit / value if `goal` is stated for that ratio
    goal: float | None  # bound of the ratio; None if the row is for comparison only
    better: Literal["lower", "higher"]  # "lower" if the goal is an upper bound of the ratio
    note: str = ""
    spread: str = ""  # range of the ratio over repetitions; empty if they are unknown

    @property
    def met(self) -> bool | None:
        """True if the ratio reaches the goal; None if the row has no goal."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.better == "lower" else self.ratio >= self.goal

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells as text, in the order of `HEAD`."""
        sign = "<=" if self.better == "lower" else ">="
        return (
            self.work,
            f"{self.value:.4g}",
            f"{self.limit:.4g}",
            self.unit,
            f"{self.ratio:.2f}",
            self.spread,
            "" if self.goal is None else f"{sign} {self.goal:.3g}",
            {True: "yes", False: "NO: falls short", None: "-"}[self.met],
            self.note,
        )


def spread(ratios: Iterable[float]) -> str:
    """Return the smallest and largest ratio as text; empty if there is only one ratio."""
    ordered = sorted(ratios)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}" if len(ordered) > 1 else ""


def quartiles(ratios: Iterable[float]) -> str:
    """Return the first and third quartile of the ratios as text."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def times(functions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Call the functions alternately (A B A B ...), so that a disturbance affects all of them.

    Args:
        functions: Functions to compare; each function is first called once without being counted.
        repeats: Number of counted calls of each function.

    Returns:
        Seconds of every call, one list for each function.
    """
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, durations in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            durations.append(time.perf_counter() - start)
    return seconds


def render(rows: Iterable[Row]) -> str:
    """Return the rows as one aligned text table."""
    cells = [Row.HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right_aligned = (1, 2, 4)
    lines = [
        "  ".join(
            cell.rjust(width) if number in right_aligned else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"

"""What every bench file hands back: rows of work against a limit, and the table they print as."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work, measured beside its limit or peer in the same run."""

    HEAD: ClassVar = ("work", "ours", "limit", "unit", "ratio", "spread", "goal", "met", "note")

    work: str
    value: float  # ours
    unit: str  # of value and limit
    limit: float  # the limit's or peer's
    ratio: float  # in the sense that `goal` is stated in
    goal: float | None  # for the ratio; None: printed for comparison
    better: Literal["lower", "higher"]  # which way the ratio should go
    note: str = ""
    spread: str = ""  # of repeated measurements, where they were kept

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the goal; None without one."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.better == "lower" else self.ratio >= self.goal

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows, under `HEAD`."""
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
    """Return the range of a row's ratio over its repetitions."""
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}" if len(found) > 1 else ""


def quartiles(ratios: Iterable[float]) -> str:
    """Return the middle half of a row's ratio over many repetitions."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def times(functions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Call the functions in turn (A B A B ...), so that a disturbance hits all.

    Args:
        functions: The contenders; each is called once more beforehand, not counted.
        repeats: Counted calls of each.

    Returns:
        Seconds of every call, a list for each function.
    """
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return seconds


def render(rows: Iterable[Row]) -> str:
    """Return the rows as one aligned table."""
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

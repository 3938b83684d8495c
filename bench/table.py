"""What every bench file hands back: rows of work against a limit, and the table they print as."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work, measured beside its limit or peer in the same run."""

    work: str
    value: float  # ours
    unit: str  # of value and limit
    limit: float  # the limit's or peer's
    ratio: float  # in the sense that `goal` is stated in
    goal: float | None  # for the ratio; None: printed for comparison
    better: Literal["lower", "higher"]  # which way the ratio should go
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the goal; None without one."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.better == "lower" else self.ratio >= self.goal


def interleave(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Call the functions in turn (A B A B ...), so that a disturbance hits all; return medians.

    Args:
        functions: The contenders; each is called once more beforehand, not counted.
        repeats: Counted calls of each.

    Returns:
        Seconds, one median for each function.
    """
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def render(rows: Iterable[Row]) -> str:
    """Return the rows as one aligned table."""
    cells = [("work", "ours", "limit", "unit", "ratio", "goal", "met", "note")]
    for row in rows:
        sign = "<=" if row.better == "lower" else ">="
        cells.append(
            (
                row.work,
                f"{row.value:.4g}",
                f"{row.limit:.4g}",
                row.unit,
                f"{row.ratio:.2f}",
                "" if row.goal is None else f"{sign} {row.goal:g}",
                {True: "yes", False: "NO", None: "-"}[row.met],
                row.note,
            )
        )
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

"""Write the history of every row of the dated tables: ``python -m bench.history``.

This module reads the CSV files of bench/results that `python -m bench` wrote: whole tables
(`DATE-bench.csv`) and tables of single parts (`DATE-bench-PART.csv`). It writes
bench/results/index.md with a line for each row and a column for each date; the cells are ratios to
the limit. `python -m bench` rewrites index.md at its end.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

from bench import origin
from bench.table import Row

INDEX = "index.md"
_DATED = re.compile(r"(\d{4}-\d{2}-\d{2})-(.+)\.csv")
_WORK, _RATIO, _GOAL, _MET = (Row.HEAD.index(name) for name in ("work", "ratio", "goal", "met"))
_MISSED = "NO: falls short"


@dataclasses.dataclass(frozen=True)
class DatedTable:
    """Contents of one dated CSV file, which is one column of the history."""

    date: str
    stem: str
    lines: tuple[tuple[str, ...], ...]  # each: the part, then the cells of `Row.HEAD`


def read(folder: pathlib.Path) -> list[DatedTable]:
    """Return a folder's tables of `Row` cells, sorted by date and name."""
    tables = []
    for path in sorted(folder.glob("*.csv")):
        match = _DATED.fullmatch(path.name)
        if match is None:
            continue
        with path.open(newline="") as file:
            head, *lines = [tuple(line) for line in csv.reader(file)] or [()]
        if head == ("part", *Row.HEAD):
            tables.append(DatedTable(match[1], match[2], tuple(lines)))
    return tables


def index(tables: Sequence[DatedTable]) -> str:
    """Return the history as Markdown: every row's ratio on each date."""
    dates = sorted({table.date for table in tables})
    rows: dict[tuple[str, str], dict[str, Sequence[str]]] = {}
    # Tables are sorted by date and stem: "bench-PART" comes before "bench", so that a row of the
    # whole table replaces the same row of a single part from the same day.
    for table in tables:
        for part, *cells in table.lines:
            rows.setdefault((part, cells[_WORK]), {})[table.date] = cells
    parts = list(dict.fromkeys(part for part, _ in rows))
    lines = [("part", "work", "unit", *dates, "goal")]
    for (part, work), by_date in sorted(rows.items(), key=lambda row: parts.index(row[0][0])):
        newest = by_date[max(by_date)]
        unit = newest[Row.HEAD.index("unit")]
        ratios = (_ratio(by_date.get(date)) for date in dates)
        lines.append((part, work, unit, *ratios, newest[_GOAL]))
    text = "# Every row over time\n\n"
    text += "Ratios to the limit or peer of the same run; `python -m bench.history` writes this\n"
    text += (
        "page from the dated CSV files in this folder. **Bold** ratios fell short of their goal.\n"
    )
    text += "The table of each date states the machine, the versions and the load.\n\n"
    return text + origin.markdown(lines)


def _ratio(cells: Sequence[str] | None) -> str:
    if cells is None:
        return ""
    return f"**{cells[_RATIO]}**" if cells[_MET] == _MISSED else cells[_RATIO]


def write(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Write the history of a folder's tables to index.md in that folder; return the file's path."""
    folder = folder or origin.RESULTS
    path = folder / INDEX
    path.write_text(index(read(folder)))
    return path


def main(arguments: Iterable[str] = ()) -> None:
    """Write the history of each folder in `arguments`; of `origin.RESULTS` if it is empty."""
    folders = [pathlib.Path(argument) for argument in arguments] or [origin.RESULTS]
    for folder in folders:
        sys.stdout.write(f"written: {write(folder)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

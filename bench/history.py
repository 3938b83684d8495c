"""What every row of the dated tables was over time: ``python -m bench.history``.

Reads the CSV files of bench/results that `python -m bench` has written, whole (`DATE-bench.csv`) or
of single parts (`DATE-bench-PART.csv`), and writes bench/results/index.md: a line for each row, a
column for each date, with the ratio to the limit. `python -m bench` writes it anew at its end.
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
    """One file: where a column of the history comes from."""

    date: str
    stem: str
    lines: tuple[tuple[str, ...], ...]  # part, then the cells of `Row.HEAD`


def read(folder: pathlib.Path) -> list[DatedTable]:
    """Return the tables of a folder that have rows of `Row`, in order of date and name."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        match = _DATED.fullmatch(path.name)
        if match is None:
            continue
        with path.open(newline="") as file:
            head, *lines = [tuple(line) for line in csv.reader(file)] or [()]
        if head == ("part", *Row.HEAD):
            found.append(DatedTable(match[1], match[2], tuple(lines)))
    return found


def index(tables: Sequence[DatedTable]) -> str:
    """Return the history as Markdown: of every row the ratio on each date."""
    dates = sorted({table.date for table in tables})
    rows: dict[tuple[str, str], dict[str, Sequence[str]]] = {}
    for table in tables:  # of one date, single parts come before a whole table, which counts
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
    text += "page from the dated CSV files beside it. **Bold** ones fell short of their goal.\n"
    text += "Machine, versions and load of each date are in its own table.\n\n"
    return text + origin.markdown(lines)


def _ratio(cells: Sequence[str] | None) -> str:
    if cells is None:
        return ""
    return f"**{cells[_RATIO]}**" if cells[_MET] == _MISSED else cells[_RATIO]


def write(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Write the history of a folder's tables into it; return its path."""
    folder = folder or origin.RESULTS
    path = folder / INDEX
    path.write_text(index(read(folder)))
    return path


def main(arguments: Iterable[str] = ()) -> None:
    """Write the history of a folder, `machine.RESULTS` unless another is given."""
    folders = [pathlib.Path(each) for each in arguments] or [origin.RESULTS]
    for folder in folders:
        sys.stdout.write(f"written: {write(folder)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

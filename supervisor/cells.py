"""What the report's tables are made of: cells that show figures for people, escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from supervisor.dashboard import format_bytes, format_duration

ABSENT = "–"


def table(
    heads: Sequence[str], rows: Sequence[str], kind: str = "", differs: Sequence[bool] = ()
) -> str:
    """Return a table.

    Args:
        heads: of the columns.
        rows: the cells of each, as HTML.
        kind: its class.
        differs: for the first rows, whether to tint them.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    marks = [*differs, *[False] * (len(rows) - len(differs))]
    body = "".join(
        f"<tr{' class=differs' if mark else ''}>{row}</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    return (
        f'<div class="table"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


#: Title of a column, key of its figure, and how that is written.
Shown = Sequence[tuple[str, str, Callable[[Any], str]]]


def figures(head: str, rows: Sequence[tuple[str, Mapping[str, Any]]], shown: Shown) -> str:
    """Return a table with a figure in each cell.

    Args:
        head: of the column of names.
        rows: a name and its figures.
        shown: the other columns.
    """
    lines = [
        f"<th>{text(name)}</th>"
        + "".join(f"<td>{text(show(row.get(key)))}</td>" for _, key, show in shown)
        for name, row in rows
    ]
    return table([head, *(title for title, _, _ in shown)], lines)


def text(value: Any) -> str:
    """Return anything as text between tags."""
    return html.escape(str(value))


def is_number(value: Any) -> bool:
    """Return whether a value can be shown as a figure."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(write: Callable[[float], str]) -> Callable[[Any], str]:
    """Show what is unknown, or no number, as a dash."""
    return lambda value: write(value) if is_number(value) else ABSENT


percent = _shown(lambda value: f"{100 * value:.1f} %")
duration = _shown(lambda value: f"{value:.1f} s" if value < 59.95 else format_duration(value))
size = _shown(format_bytes)
times = _shown(lambda value: f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×")
rate = _shown(lambda value: f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}")
count = _shown(lambda value: f"{value:,}")

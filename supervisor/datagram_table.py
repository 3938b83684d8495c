"""What became of a run's datagrams, as tables of the report's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.datagram_counts import BLOCK, rows_of
from supervisor import cells


def _steps(value: Any) -> str:
    return f"{value:.2f} steps" if cells.is_number(value) else cells.ABSENT


def _fraction(value: Any) -> str:
    return f"{value:.3f}" if cells.is_number(value) else cells.ABSENT


def _yes(value: Any) -> str:
    if value is True:
        return "fell back"
    return "no" if value is False else ""


_CHANNEL: cells.Shown = (
    ("blocks", "blocks", cells.count),
    ("sent", "datagrams_sent", cells.count),
    ("bytes sent", "bytes_sent", cells.size),
    ("announced", "announced", cells.count),
    ("arrived in time", "arrived", cells.count),
    ("late", "late", cells.count),
    ("lost", "lost", cells.count),
)
_WORKER: cells.Shown = (
    ("pushes", "pushes", cells.count),
    ("k", "k", _fraction),
    ("fresh", "fresh", cells.percent),
    ("fill", "fill", cells.percent),
    ("lateness", "lateness", _steps),
    ("late", "late", cells.count),
    ("lost", "lost", cells.count),
    ("to the stream", "fallen_back", _yes),
)


def block_of(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the summary's figures of datagrams; empty where none were sent."""
    block = summary.get(BLOCK)
    return block if isinstance(block, dict) else {}


def tables(summary: Mapping[str, Any]) -> str:
    """Return a table of the channels, one of the workers, and what was left out and dropped."""
    block = block_of(summary)
    if not block:
        return ""
    channels = [
        (f"channel {row.get('channel')}" if row.get("channel") else "stream", row)
        for row in rows_of(block, "channels")
    ]
    workers = [("all", block)]
    workers += [(f"worker {row.get('id')}", row) for row in rows_of(block, "workers")]
    return "\n".join(
        [
            cells.figures("channel", channels, _CHANNEL),
            "<br>",
            cells.figures("worker", workers, _WORKER),
            "<br>",
            _reasons(block),
        ]
    )


def _reasons(block: Mapping[str, Any]) -> str:
    """Return the tables of counts, each in a line."""
    titles = {
        "blocks": "blocks",
        "unsent": "datagrams not sent",
        "dropped": "datagrams dropped on arrival",
    }
    lines = [
        f"<th>{title}</th><td>{cells.text(_listed(block.get(name)))}</td>"
        for name, title in titles.items()
    ]
    return cells.table(["counted", ""], lines, "words")


def _listed(counts: Any) -> str:
    if not isinstance(counts, dict) or not counts:
        return "none"
    return " · ".join(f"{_spaced(name)} {cells.count(count)}" for name, count in counts.items())


def _spaced(name: Any) -> str:
    return str(name).replace("_", " ")

"""HTML of a run's report: one file without scripts or external resources, light and dark theme.

The functions `run_page` and `comparison_page` make whole report pages. The functions `table` and
`figures` make HTML tables with formatted and escaped values. The function `tables` makes the HTML
tables of a run's UDP datagram counts.
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thinwire.ops.privacy import accountant
from thinwire.ops.routing.counters import BLOCK, rows_of
from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry.evaluation import best_of, is_larger_better, is_share, ranges_in
from thinwire.supervisor.dashboard import format_bytes, format_duration

ABSENT = "–"
#: Largest number of metrics that have a tile on the page of one run, or two columns in a
#: comparison.
_MOST_METRICS_SHOWN = 4


def table(
    heads: Sequence[str], rows: Sequence[str], kind: str = "", differs: Sequence[bool] = ()
) -> str:
    """Return an HTML table with the given column titles and rows.

    Args:
        heads: Titles of the table's columns.
        rows: Cells of each table row, as HTML.
        kind: CSS class of the HTML table.
        differs: One entry for each row from the top; True tints the row, and a missing entry means
            False.
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


#: Columns of a table: (title, key of the value, function that formats the value).
Shown = Sequence[tuple[str, str, Callable[[Any], str]]]


def figures(head: str, rows: Sequence[tuple[str, Mapping[str, Any]]], shown: Shown) -> str:
    """Return an HTML table of formatted values with one row for each name in `rows`.

    Args:
        head: Title of the table's column of names.
        rows: Rows of the table: (name, values by key).
        shown: Columns of values, which follow the table's column of names.
    """
    lines = [
        f"<th>{text(name)}</th>"
        + "".join(f"<td>{text(show(row.get(key)))}</td>" for _, key, show in shown)
        for name, row in rows
    ]
    return table([head, *(title for title, _, _ in shown)], lines)


def text(value: Any) -> str:
    """Return a value of a report as escaped HTML text."""
    return html.escape(str(value))


def is_number(value: Any) -> bool:
    """Return True if a value is an int or float; False for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(write: Callable[[float], str]) -> Callable[[Any], str]:
    """Return a function that formats numbers with a given formatter and other values as a dash."""
    return lambda value: write(value) if is_number(value) else ABSENT


percent = _shown(lambda value: f"{100 * value:.1f} %")
number = _shown(lambda value: f"{value:.4g}")


def written(metric: str) -> Callable[[Any], str]:
    """Return the function that formats the values of a metric."""
    return percent if is_share(metric) else number


duration = _shown(lambda value: f"{value:.1f} s" if value < 59.95 else format_duration(value))
size = _shown(format_bytes)
times = _shown(lambda value: f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×")
rate = _shown(lambda value: f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}")
format_count = _shown(lambda value: f"{value:,}")


def _steps(value: Any) -> str:
    return f"{value:.2f} steps" if is_number(value) else ABSENT


def _fraction(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else ABSENT


def _yes(value: Any) -> str:
    if value is True:
        return "fell back"
    return "no" if value is False else ""


_CHANNEL: Shown = (
    ("blocks", "blocks", format_count),
    ("sent", "datagrams_sent", format_count),
    ("bytes sent", "bytes_sent", size),
    ("announced", "announced", format_count),
    ("arrived in time", "arrived", format_count),
    ("late", "late", format_count),
    ("lost", "lost", format_count),
)
_WORKER: Shown = (
    ("pushes", "pushes", format_count),
    ("k", "k", _fraction),
    ("fresh", "fresh", percent),
    ("fill", "fill", percent),
    ("lateness", "lateness", _steps),
    ("late", "late", format_count),
    ("lost", "lost", format_count),
    ("to the stream", "fallen_back", _yes),
)


def block_of(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the datagram counters of a run's summary; {} if the run sent no datagrams."""
    block = summary.get(BLOCK)
    return block if isinstance(block, dict) else {}


def tables(summary: Mapping[str, Any]) -> str:
    """Return HTML tables of UDP datagram counts by channel, by worker, and by reason of a loss."""
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
            figures("channel", channels, _CHANNEL),
            "<br>",
            figures("worker", workers, _WORKER),
            "<br>",
            _reasons(block),
        ]
    )


def _reasons(block: Mapping[str, Any]) -> str:
    """Return an HTML table of datagram counters by reason, one row per kind of counter."""
    titles = {
        "blocks": "blocks",
        "unsent": "datagrams not sent",
        "dropped": "datagrams dropped on arrival",
    }
    lines = [
        f"<th>{title}</th><td>{text(_listed(block.get(name)))}</td>"
        for name, title in titles.items()
    ]
    return table(["counted", ""], lines, "words")


def _listed(counts: Any) -> str:
    if not isinstance(counts, dict) or not counts:
        return "none"
    return " · ".join(f"{_spaced(name)} {format_count(count)}" for name, count in counts.items())


def _spaced(name: Any) -> str:
    return str(name).replace("_", " ")


_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f8; --card: #ffffff; --text: #1c2330;
  --muted: #667085; --line: #e3e6ed; --accent: #1f6fd6; --tint: #eaf1fc; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1217; --card: #171b22; --text: #e8ebf1;
  --muted: #98a2b3; --line: #2a303b; --accent: #5b9dff; --tint: #1b2a42; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 0; color: var(--muted); }
h1 { margin: 0 0 4px; font-size: 28px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 19px; overflow-wrap: anywhere; }
.tiles, .pictures { display: grid; gap: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-top: 28px; }
.pictures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  align-items: start; }
.pictures.curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.tile, figure, .table { background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 25px; line-height: 1.3; letter-spacing: -0.01em; }
.tile span { color: var(--muted); font-size: 13px; }
figure { margin: 0; padding: 16px 12px 10px; }
figcaption { padding: 0 8px 4px; font-weight: 600; }
img { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 16px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 500; font-size: 13px; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody th { font-weight: 600; }
.words td, .words th { text-align: left; }
td.best { color: var(--accent); font-weight: 650; }
tr.differs td, tr.differs th:first-child { background: var(--tint); }
@media print { body { background: none; } figure, .tile { break-inside: avoid; } }
"""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of a report: file name without ending, title, and PNG bytes for each theme."""

    name: str
    title: str
    themes: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class RunSection:
    """One run on a report page: name, content of summary.json and pictures."""

    name: str
    summary: Mapping[str, Any]
    pictures: Sequence[Picture]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the report's table in which each row summarizes one run.

    The field ``better`` of a column is the function that selects the best of several values; with
    None, no value is marked as best.
    """

    title: str
    value: Callable[[Mapping[str, Any]], Any]
    show: Callable[[Any], str]
    better: Callable[..., Any] | None = None


def run_page(run: RunSection, curves: Sequence[Picture]) -> str:
    """Return the HTML page of one run."""
    body = [_header(run.name, _one_line(run.summary)), _tiles(run.summary)]
    body += ["<h2>Metrics and their costs</h2>", _pictures(curves, "curves")]
    body += ["<h2>Staleness, time and data</h2>", _pictures(run.pictures)]
    body += ["<h2>Workers</h2>", _workers_table(run.summary["workers"])]
    if datagram_tables := tables(run.summary):
        body += ["<h2>Datagrams</h2>", datagram_tables]
    if promise := accountant.in_words(run.summary):
        body += ["<h2>Differential privacy</h2>", f"<p>{text(promise)}</p>"]
    body += ["<h2>Composition</h2>", _policies_table([run])]
    return _page(run.name, body)


def comparison_page(runs: Sequence[RunSection], curves: Sequence[Picture]) -> str:
    """Return the HTML page that compares several runs."""
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    body = [_header(title, " · ".join(run.name for run in runs))]
    body += ["<h2>Summary</h2>", _summary_table(runs)]
    body += ["<h2>Metrics and their costs</h2>", _pictures(curves, "curves")]
    body += ["<h2>Composition</h2>", _policies_table(runs)]
    for run in runs:
        body += [f"<h2>{text(run.name)}</h2>", _pictures(run.pictures)]
    return _page(title, body)


def _page(title: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)} · Thinwire</title>\n<style>{_STYLE}</style>\n</head>",
            "<body><main>",
            *body,
            "</main></body>\n</html>\n",
        ]
    )


def _header(title: str, line: str) -> str:
    return f"<header><h1>{text(title)}</h1><p>{text(line)}</p></header>"


def _one_line(summary: Mapping[str, Any]) -> str:
    words = [
        str(summary.get("method")),
        f"{format_count(summary.get('nb_workers'))} workers",
        f"{format_count(summary.get('num_parameters'))} parameters",
        f"{format_count(summary.get('updates'))} updates",
        f"ended by {summary.get('stop_reason')}",
    ]
    return " · ".join(words)


def _tiles(summary: Mapping[str, Any]) -> str:
    metrics = ranges_in(summary)
    tiles = [
        *(
            (written(name)(metrics[name]["last"]), f"test {name} at the end")
            for name in _leading(metrics)
        ),
        *_target_tile(summary),
        (duration(summary.get("seconds")), "training time"),
        (rate(summary.get("updates_per_second")), "updates per second"),
        (size(_traffic(summary)), "over the network"),
        (times(summary.get("compression_up")), "less sent up than dense"),
        (times(summary.get("compression_down")), "less sent down than dense"),
    ]
    shown = [
        f'<div class="tile"><b>{text(value)}</b><span>{text(title)}</span></div>'
        for value, title in tiles
    ]
    return f'<div class="tiles">{"".join(shown)}</div>'


def _target_tile(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the HTML tile with the run's time to its target metric value; "" without a target."""
    target = summary.get("target")
    if not isinstance(target, dict):
        return []
    cost = target.get("reached")
    shown = duration(cost.get("seconds")) if isinstance(cost, dict) else "never"
    return [(shown, f"to {target.get('text')}")]


def _pictures(pictures: Sequence[Picture], kind: str = "") -> str:
    return f'<div class="pictures {kind}">{"".join(map(_figure, pictures))}</div>'


def _figure(picture: Picture) -> str:
    light, dark = (_data_uri(picture.themes[theme]) for theme in ("light", "dark"))
    title = text(picture.title)
    return (
        f"<figure><figcaption>{title}</figcaption><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{title}"></picture></figure>'
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _summary_table(runs: Sequence[RunSection]) -> str:
    """Return an HTML table with one row for each run; mark the best value of each column."""
    columns = _summary_columns([run.summary for run in runs])
    rows: list[list[str]] = [[f"<th>{text(run.name)}</th>"] for run in runs]
    for column in columns:
        values = [column.value(run.summary) for run in runs]
        known = [value for value in values if is_number(value)]
        best = column.better(known) if column.better and len(set(known)) > 1 else None
        for row, value in zip(rows, values, strict=True):
            mark = ' class="best"' if best is not None and value == best else ""
            row.append(f"<td{mark}>{text(column.show(value))}</td>")
    heads = ["run", *(column.title for column in columns)]
    return table(heads, ["".join(row) for row in rows])


def _summary_columns(summaries: Sequence[Mapping[str, Any]]) -> list[_Column]:
    columns = [
        _Column("method", lambda s: s.get("method"), str),
        *_metric_columns(summaries),
        _Column("time", lambda s: s.get("seconds"), duration, min),
    ]
    columns += [_mark_column(mark) for mark in _shown_marks(summaries)]
    return [
        *columns,
        _Column("up", lambda s: s.get("bytes_up"), size, min),
        _Column("down", lambda s: s.get("bytes_down"), size, min),
        _Column("less up", lambda s: s.get("compression_up"), times, max),
        _Column("less down", lambda s: s.get("compression_down"), times, max),
        *_datagram_columns(summaries),
        _Column("updates", lambda s: s.get("updates"), format_count),
        _Column("updates/s", lambda s: s.get("updates_per_second"), rate, max),
        _Column("samples/s", lambda s: s.get("samples_per_second"), rate, max),
        _Column("staleness mean", lambda s: s["staleness"].get("mean"), rate),
        _Column("p95", lambda s: s["staleness"].get("p95"), format_count),
        _Column("workers", lambda s: s.get("nb_workers"), format_count),
        _Column("ended by", lambda s: s.get("stop_reason"), lambda v: str(v or ABSENT)),
    ]


def _metric_columns(summaries: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """Return two table columns for each shown metric: the final value and the best value."""
    names = dict.fromkeys(name for summary in summaries for name in ranges_in(summary))
    columns = []
    for name in _leading(names):
        better = max if is_larger_better(name) else min

        def last(summary: Mapping[str, Any], name: str = name) -> Any:
            return ranges_in(summary).get(name, {}).get("last")

        def best(summary: Mapping[str, Any], name: str = name) -> Any:
            return best_of(name, ranges_in(summary).get(name, {}))

        columns.append(_Column(f"final {name}", last, written(name), better))
        columns.append(_Column(f"best {name}", best, written(name), better))
    return columns


def _leading(names: Iterable[str]) -> list[str]:
    """Return the names of the metrics that a report shows: accuracy first, loss last."""
    ordered = sorted(names, key=lambda name: (name != ACCURACY, name == "loss"))
    return ordered[:_MOST_METRICS_SHOWN]


def _datagram_columns(summaries: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """Return the table columns "fresh" and "fill" (of UDP datagrams) if a run sent datagrams, else
    [].
    """
    if not any(map(block_of, summaries)):
        return []
    return [
        _Column("fresh", lambda s: block_of(s).get("fresh"), percent, max),
        _Column("fill", lambda s: block_of(s).get("fill"), percent, max),
    ]


def _shown_marks(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the two highest accuracy thresholds that any run reached, in ascending order."""
    reached = {m for s in summaries for m, cost in s["time_to_accuracy"].items() if cost}
    return sorted(reached)[-2:]


def _mark_column(mark: str) -> _Column:
    def seconds(summary: Mapping[str, Any]) -> Any:
        cost = summary["time_to_accuracy"].get(mark)
        return cost.get("seconds") if isinstance(cost, dict) else None

    return _Column(f"time to {mark}", seconds, duration, min)


def _policies_table(runs: Sequence[RunSection]) -> str:
    """Return an HTML table of the policies (such as codecs) of several runs; rows in which runs
    differ are tinted.
    """
    names = dict.fromkeys(name for run in runs for name in run.summary["seams"])
    rows = []
    for interface in names:
        values = [str(run.summary["seams"].get(interface, ABSENT)) for run in runs]
        shown = "".join(f"<td>{text(value)}</td>" for value in values)
        rows.append((len(set(values)) > 1, f"<th>{text(interface)}</th>{shown}"))
    heads = ["interface", *(run.name for run in runs)]
    return table(heads, [row for _, row in rows], "words", [differs for differs, _ in rows])


def _workers_table(workers: Sequence[Mapping[str, Any]]) -> str:
    shown: Shown = [
        ("state", "state", str),
        ("pushes", "pushes", format_count),
        ("samples", "samples", format_count),
        ("up", "bytes_up", size),
        ("down", "bytes_down", size),
        ("compute", "compute_seconds", duration),
        ("encode", "encode_seconds", duration),
        ("send", "send_seconds", duration),
        ("wait", "wait_seconds", duration),
    ]
    return figures("worker", [(f"worker {row.get('id')}", row) for row in workers], shown)


def _traffic(summary: Mapping[str, Any]) -> Any:
    parts = [summary.get("bytes_up"), summary.get("bytes_down")]
    return sum(parts) if all(map(is_number, parts)) else None

"""Pictures of a report, as PNG bytes in a light and a dark theme.

The pictures of a report are created without pyplot, so they need no global state and no window, and
any thread can draw. The functions `split_figure` and `split_csv` show the labels of each worker's
part of the training set.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.runtime.telemetry.evaluation import is_share
from thinwire.runtime.telemetry.run_status import Histogram

_DOTS_PER_INCH = 180
_MOST_STALENESS_BARS = 40
_MOST_LABELLED_WORKERS = 32
_LONGEST_NAME = 36  # largest number of characters of a run's name in a legend
_LINE_STYLES = ("-", "--", ":", "-.")
_LOG_SPREAD = 8.0  # factor between the runs' costs above which the cost axis is logarithmic
#: Parts of a worker's time: (key in summary.json, name in the legend).
TIME_PARTS = (
    ("compute_seconds", "compute"),
    ("encode_seconds", "encode"),
    ("send_seconds", "send"),
    ("wait_seconds", "wait"),
)


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colors of a light or dark theme; color-blind readers can distinguish ``series`` colors."""

    background: str
    text: str
    muted: str
    grid: str
    series: tuple[str, ...]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        background="#ffffff",
        text="#1c2330",
        muted="#667085",
        grid="#e8eaf0",
        series=("#1f6fd6", "#e07a00", "#00926b", "#b5409a", "#c9382b", "#4aa8d8", "#8a6d00"),
    ),
    "dark": Theme(
        background="#171b22",
        text="#e8ebf1",
        muted="#98a2b3",
        grid="#2a303b",
        series=("#5b9dff", "#ffa340", "#2cc295", "#dd7cc6", "#ff7b6e", "#7fd0f5", "#d9bd4a"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of a metric in one run, and the cost (seconds, bytes or updates) until each value."""

    name: str
    costs: Sequence[float]
    values: Sequence[float]

    def without_free_points(self) -> Curve:
        """Return the curve without points of cost 0, which a logarithmic axis cannot show."""
        points = [(c, v) for c, v in zip(self.costs, self.values, strict=True) if c > 0]
        return Curve(self.name, [cost for cost, _ in points], [value for _, value in points])


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Label and unit with which a picture shows a metric."""

    label: str
    unit: str = ""
    size: float = 1.0  # value of the metric in one unit, for example 0.01 for percent

    @classmethod
    def of(cls, metric: str) -> Quantity:
        """Return the label and unit of a metric; metrics from 0 to 1 are shown in percent."""
        words = _plain(metric.replace("_", " ").strip() or metric)
        return cls(f"Test {words}", "%", 0.01) if is_share(metric) else cls(f"Test {words}")

    def written(self, value: float) -> str:
        """Return a metric's value as text with the unit of the metric."""
        return f"{value:.1f} {self.unit}" if self.unit else f"{value:.4g}"


@dataclasses.dataclass(frozen=True)
class Axis:
    """The axis of a picture that shows a cost: label, and units as (name, size), smallest first."""

    label: str
    units: tuple[tuple[str, float], ...]

    def unit_for(self, largest: float) -> tuple[str, float]:
        """Return the largest unit in which the value ``largest`` is 10 or more, else the smallest
        unit.
        """
        fitting = [unit for unit in self.units if largest >= 10 * unit[1]]
        return fitting[-1] if fitting else self.units[0]


SECONDS = Axis("Training time", (("s", 1.0), ("min", 60.0), ("h", 3600.0)))
BYTES = Axis("Traffic, up and down", (("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))
UPDATES = Axis("Updates applied", (("", 1.0),))


def metric_figure(curves: Sequence[Curve], axis: Axis, quantity: Quantity, theme: Theme) -> bytes:
    """Draw a test metric against a cost (time, bytes or updates), one line per run.

    If a picture shows a single curve, its last value is written next to the curve's end. For
    several curves of a metric, the picture has a legend above the axes.
    """
    figure, axes = empty_axes(theme, width_inches=5.2, height_inches=3.5)
    logarithmic = _spread([max(curve.costs, default=0) for curve in curves]) > _LOG_SPREAD
    drawn = [curve.without_free_points() if logarithmic else curve for curve in curves]
    drawn = [curve for curve in drawn if curve.costs]
    if not drawn:
        return to_png(figure, axes, theme, note="The model was never evaluated")
    unit, size = axis.unit_for(max(max(curve.costs) for curve in drawn))
    styles = itertools.cycle(itertools.product(_LINE_STYLES, theme.series))
    for curve, (line_style, colour) in zip(drawn, styles, strict=False):
        xs = [cost / size for cost in curve.costs]
        ys = [value / quantity.size for value in curve.values]
        axes.plot(xs, ys, line_style, color=colour, linewidth=2, label=_plain(curve.name))
        axes.plot(xs[-1], ys[-1], "o", color=colour, markersize=6, clip_on=False)
    notes = [unit] if unit else []
    if logarithmic:
        notes.append("log scale")
        _scale_logarithmically(axes)
    else:
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(f"{axis.label} ({', '.join(notes)})" if notes else axis.label)
    axes.set_ylabel(f"{quantity.label} ({quantity.unit})" if quantity.unit else quantity.label)
    if len(curves) > 1:
        legend_above(axes, theme, num_columns=min(3, len(drawn)))
    else:
        _label_last(axes, (xs[-1], ys[-1]), quantity.written(ys[-1]), theme, ys[-1] < ys[0])
    return to_png(figure, axes, theme)


def staleness_figure(staleness: Histogram, theme: Theme) -> bytes:
    """Draw the staleness histogram of the merged updates, with mean and 95th percentile."""
    figure, axes = empty_axes(theme, width_inches=5.2, height_inches=3.5)
    if not staleness.total:
        return to_png(figure, axes, theme, note="No update was counted")
    bar_width = 1 + staleness.max // _MOST_STALENESS_BARS
    shares: dict[int, float] = {}
    for value, times in staleness.counts.items():
        bin_start = value // bar_width * bar_width
        shares[bin_start] = shares.get(bin_start, 0.0) + 100 * times / staleness.total
    centres = [bin_start + (bar_width - 1) / 2 for bin_start in shares]
    axes.bar(centres, list(shares.values()), width=0.86 * bar_width, color=theme.series[0])
    mean, p95 = staleness.mean, staleness.p95
    for mark, label, style in ((mean, f"mean {mean:.1f}", "-"), (p95, f"p95 {p95}", "--")):
        axes.axvline(mark, linestyle=style, color=theme.series[1], linewidth=1.8, label=label)
    axes.set_xlim(-0.6 * bar_width, max(shares) + bar_width - 0.4)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("Updates applied since the worker read the model")
    axes.set_ylabel("Share of pushes (%)")
    legend_above(axes, theme, num_columns=2)
    return to_png(figure, axes, theme)


def time_figure(workers: Sequence[Mapping[str, Any]], theme: Theme) -> bytes:
    """Draw how each worker spent its time (computing, waiting and so on), one bar per worker.

    Args:
        workers: Entries of ``workers`` in summary.json, one row for each worker.
        theme: Colors of the figure.
    """
    figure, axes = empty_axes(theme, 5.2, height_of_bars(len(workers)))
    if not workers:
        return to_png(figure, axes, theme, note="No worker took part")
    totals = [sum(float(worker[key]) for key, _ in TIME_PARTS) for worker in workers]
    unit, size = SECONDS.unit_for(max(totals))
    bars = [
        (name, [float(worker[key]) / size for worker in workers], colour)
        for (key, name), colour in zip(TIME_PARTS, theme.series, strict=False)
    ]
    stack_bars(axes, [worker["id"] for worker in workers], bars, theme)
    axes.set_xlabel(f"Time spent ({unit})")
    legend_above(axes, theme, num_columns=len(TIME_PARTS))
    return to_png(figure, axes, theme)


def height_of_bars(num_workers: int) -> float:
    """Return the height of a figure with one horizontal bar per worker, in inches."""
    return min(11.0, max(3.5, 1.5 + 0.34 * num_workers))


def stack_bars(
    axes: Any,
    ids: Sequence[Any],
    bars: Sequence[tuple[str, Sequence[float], Any]],
    theme: Theme,
) -> None:
    """Draw one stacked horizontal bar per worker.

    Args:
        axes: Matplotlib axes to draw on.
        ids: Identifiers of the workers, from the top of the figure.
        bars: Parts of the stacked bars: (name, width for every worker, color).
        theme: Colors of the figure.
    """
    from matplotlib.collections import PolyCollection

    positions = range(len(ids))
    starts = [0.0] * len(ids)
    # If there are more bars, they are too thin for separating lines.
    has_edges = len(ids) <= 64 and len(bars) <= 20
    edge: dict[str, Any] = {"edgecolor": theme.background, "linewidth": 0.6 if has_edges else 0}
    for name, widths, colour in bars:
        stops = [start + width for start, width in zip(starts, widths, strict=True)]
        # One matplotlib artist draws a part of all bars. One artist per bar takes half a minute
        # with a thousand workers.
        corners = [
            [(start, row - 0.36), (stop, row - 0.36), (stop, row + 0.36), (start, row + 0.36)]
            for row, start, stop in zip(positions, starts, stops, strict=True)
        ]
        axes.add_collection(PolyCollection(corners, facecolors=[colour], label=name, **edge))
        starts = stops
    every = 1 + (len(ids) - 1) // _MOST_LABELLED_WORKERS
    axes.set_yticks(positions[::every], [f"worker {number}" for number in ids][::every])
    axes.set_ylim(len(ids) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * max(starts, default=0.0) or 1.0)
    axes.grid(axis="y", visible=False)


def empty_axes(theme: Theme, width_inches: float, height_inches: float) -> tuple[Any, Any]:
    """Return a matplotlib figure with one axes object, in the theme's colors."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width_inches, height_inches), _DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor(theme.background)
    axes = figure.add_subplot()
    axes.set_facecolor(theme.background)
    axes.set_axisbelow(True)
    axes.grid(color=theme.grid, linewidth=1)
    axes.tick_params(colors=theme.muted, length=0, labelsize=10, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=theme.text, fontsize=11)
    axes.xaxis.labelpad = axes.yaxis.labelpad = 8
    return figure, axes


def to_png(figure: Any, axes: Any, theme: Theme, note: str = "") -> bytes:
    """Return a matplotlib figure as PNG bytes; axes without data show a note."""
    if note:
        axes.set_axis_off()
        axes.text(0.5, 0.5, note, color=theme.muted, ha="center", va="center", fontsize=11)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    buffer = io.BytesIO()
    # `savefig` would draw the figure twice, the first time only for the layout, and write the bytes
    # of `print_png`. Without the Software tag, the bytes are equal under any version of matplotlib.
    figure.canvas.print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def legend_above(axes: Any, theme: Theme, num_columns: int, **changes: Any) -> None:
    """Put the figure's legend above the axes, left-aligned.

    Args:
        axes: Matplotlib axes of the figure.
        theme: Colors of the figure.
        num_columns: Number of columns of the legend.
        **changes: Settings of matplotlib's legend, in place of the usual ones or in addition.
    """
    usual = {"fontsize": 10, "handlelength": 1.6, "columnspacing": 1.4}
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=num_columns,
        frameon=False,
        labelcolor=theme.text,
        borderaxespad=0.2,
        **(usual | changes),
    )


def _label_last(
    axes: Any, point: tuple[float, float], text: str, theme: Theme, is_below: bool
) -> None:
    """Write a value next to the end of a curve, where the text does not cover the curve."""
    offset = {"textcoords": "offset points", "xytext": (0, -17 if is_below else 9), "ha": "right"}
    axes.annotate(text, point, color=theme.text, fontsize=11, fontweight="bold", **offset)
    axes.margins(y=0.12)


def _scale_logarithmically(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _spread(values: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest positive value; 1 if no value is positive."""
    positive = [value for value in values if value > 0]
    return max(positive) / min(positive) if positive else 1.0


def _plain(name: str) -> str:
    """Shorten and escape a run's name, so that matplotlib shows the name literally.

    In matplotlib, a ``$`` would start a formula, and a leading underscore would hide the label.
    """
    shown = name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
    text = shown.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


#: Largest number of labels for which a figure has a legend and one color per label; more labels use
#: a color scale.
_MOST_LEGEND_LABELS = 20
_LEGEND_COLUMNS = 10

Rows = Sequence[Mapping[str, Any]]


def known_rows(workers: Rows) -> list[Mapping[str, Any]]:
    """Return the rows of the workers that reported the labels of their examples.

    Args:
        workers: Entries of ``workers`` in summary.json, one row for each worker. The ``labels`` of
            a row map each label to the number of examples.

    Raises:
        ValueError: A row's ``labels`` does not map whole numbers to counts.
    """
    known = [worker for worker in workers if "labels" in worker]
    for worker in known:
        _check(worker["labels"])
    return known


def split_figure(workers: Rows, theme: Theme) -> bytes:
    """Draw the number of examples of each label per worker, one stacked bar per worker.

    If the training set is split evenly among workers, all bars of the figure are equal. In the
    figure of the data split, a bar of few colors stands for a worker with few labels. In the figure
    of the data split, a short bar stands for a worker with few examples.
    """
    known = known_rows(workers)
    figure, axes = empty_axes(theme, 5.2, height_of_bars(len(known)))
    if not known:
        return to_png(figure, axes, theme, note="No worker has reported its labels")
    labels = _labels(known)
    colours = _colours(len(labels))
    bars = [
        (str(label), [_count(worker, label) for worker in known], colour)
        for label, colour in zip(labels, colours, strict=True)
    ]
    stack_bars(axes, [worker["id"] for worker in known], bars, theme)
    axes.set_xlim(right=1.03 * max(1, *(sum(worker["labels"].values()) for worker in known)))
    axes.set_xlabel("Training examples")
    axes.locator_params(axis="x", nbins=6)
    if len(labels) > _MOST_LEGEND_LABELS:
        _add_scale(figure, axes, labels, theme)
    else:
        _add_legend(axes, len(labels), theme)
    return to_png(figure, axes, theme)


def split_csv(workers: Rows) -> str:
    """Return the examples per worker and label as CSV: one row per worker, with the sum last."""
    known = known_rows(workers)
    labels = _labels(known)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["worker", *(f"label {label}" for label in labels), "examples"])
    for worker in known:
        counts = [_count(worker, label) for label in labels]
        table.writerow([worker["id"], *counts, sum(counts)])
    return text.getvalue()


def _check(labels: Any) -> None:
    if not isinstance(labels, dict):
        raise ValueError(f"the label counts of a worker are {labels!r:.40}; expected a JSON object")
    for label, count in labels.items():
        if not label.isdecimal() or type(count) is not int or count < 0:
            raise ValueError(f"a worker's label {label!r:.20} cannot have {count!r:.20} examples")


def _labels(workers: Rows) -> list[int]:
    """Return the labels of all workers' examples, in ascending order."""
    return sorted({int(label) for worker in workers for label in worker["labels"]})


def _count(worker: Mapping[str, Any], label: int) -> int:
    return int(worker["labels"].get(str(label), 0))


def _colours(num_labels: int) -> list[Any]:
    """Return one color per label: distinct colors for few labels, otherwise a color scale."""
    import matplotlib

    if num_labels > _MOST_LEGEND_LABELS:
        scale = matplotlib.colormaps["turbo"]
        return [scale(place / (num_labels - 1)) for place in range(num_labels)]
    palette = matplotlib.colormaps["tab10" if num_labels <= 10 else "tab20"]
    return [palette(place) for place in range(num_labels)]


def _add_legend(axes: Any, num_labels: int, theme: Theme) -> None:
    """Put a legend of the training labels above the axes, with up to ten labels per row."""
    legend_above(
        axes,
        theme,
        min(_LEGEND_COLUMNS, num_labels),
        title="label",
        title_fontproperties={"size": 10},
        alignment="left",
        fontsize=9,
        handlelength=0.9,
        handletextpad=0.4,
        columnspacing=0.9,
    )
    axes.get_legend().get_title().set_color(theme.muted)


def _add_scale(figure: Any, axes: Any, labels: Sequence[int], theme: Theme) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    shown = ScalarMappable(Normalize(labels[0], labels[-1]), "turbo")
    bar = figure.colorbar(shown, ax=axes, location="top", fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("label", color=theme.muted)
    bar.ax.tick_params(colors=theme.muted, length=0)

"""The pictures of the drawer: ESync's five figures, in the colours and lines of its paper."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from supervisor import figures
from supervisor.figures import THEMES, Theme
from supervisor.measured import Measured

_THEME: Theme = THEMES["light"]
_BAR_INCHES = 0.3  # height of a bar's row


@dataclasses.dataclass(frozen=True)
class Style:
    """How a method is shown."""

    name: str
    colour: str
    line: str


#: Method -> style; others get the next colour of the theme.
STYLES = {
    "esync": Style("ESync", "#c8108f", "-"),
    "ssgd": Style("SSGD", "#e07a00", ":"),
    "bsp": Style("SSGD", "#e07a00", ":"),
    "asgd": Style("ASGD", "#1f6fd6", "--"),
    "dcasgd": Style("DC-ASGD", "#00926b", "-."),
}
_SPARE_COLOURS = ("#6b4fbb", "#8a6d00", "#c9382b", "#4aa8d8", "#667085")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run with its name and style in the figures."""

    run: Measured
    label: str
    style: Style


@dataclasses.dataclass(frozen=True)
class Bar:
    """One row: parts in a row, and an estimate drawn as a mark."""

    label: str
    parts: tuple[tuple[float, str, float], ...]  # (length, colour, opacity)
    text: str
    mark: float | None = None


def show(runs: Sequence[Measured]) -> list[Shown]:
    """Give every run a name and a style; runs of one method and split are told apart by folder."""
    spare = itertools.cycle(_SPARE_COLOURS)
    others = {
        method: Style(method, next(spare), "-")
        for method in dict.fromkeys(run.method for run in runs)
        if method not in STYLES
    }
    styles = STYLES | others
    kinds = [(styles[run.method].name, run.non_iid) for run in runs]
    shown = []
    for run, (name, non_iid) in zip(runs, kinds, strict=True):
        alone = kinds.count((name, non_iid)) == 1
        shown.append(Shown(run, name if alone else f"{name} ({run.name})", styles[run.method]))
    return shown


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window`` - 1 before it.

    >>> trailing_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    result = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        result.append(sum(part) / len(part))
    return result


def accuracy_picture(
    shown: Sequence[Shown], smooth: int, standalone: float | None, target: float
) -> bytes:
    """Draw accuracy against time: the trailing mean in full, what was measured behind it.

    Args:
        shown: Runs of one kind of split; those without evaluations are left out.
        smooth: Evaluations in the mean.
        standalone: Accuracy of one device alone, for a dashed line.
        target: Of the speedup, for a mark on the axis.
    """
    figure, axes = figures.empty_axes(_THEME, 6.0, 4.0)
    drawn = [each for each in shown if each.run.points]
    if not drawn:
        return figures.to_png(figure, axes, _THEME, note="No run of this kind was evaluated")
    longest = max(each.run.points[-1].seconds for each in drawn)
    unit, size = figures.SECONDS.unit_for(longest)
    for each in drawn:
        xs = [point.seconds / size for point in each.run.points]
        ys = [point.accuracy for point in each.run.points]
        colour = each.style.colour
        axes.plot(xs, ys, "-", color=colour, linewidth=0.9, alpha=0.4)
        smoothed = trailing_mean(ys, smooth)
        line = {"color": colour, "linewidth": 2.2, "label": each.label}
        axes.plot(xs, smoothed, each.style.line, **line)
    note = {"color": _THEME.muted, "fontsize": 9, "va": "bottom"}
    right = longest / size
    axes.axhline(target, color=_THEME.muted, linewidth=0.8, linestyle=(0, (1, 3)))
    axes.text(0.01 * right, target + 0.005, f"target {target:g}", **note)
    if standalone is not None:
        axes.axhline(standalone, color=_THEME.text, linewidth=1.2, linestyle="--")
        axes.text(right, standalone + 0.005, f"one device {standalone:.3f}", ha="right", **note)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"Training time ({unit})")
    axes.set_ylabel("Test accuracy")
    figures.legend_above(axes, _THEME, num_columns=min(4, len(drawn)))
    return figures.to_png(figure, axes, _THEME)


def bar_picture(
    bars: Sequence[Bar],
    label: str,
    legend: Sequence[tuple[float, str]] = (),
    mark: str = "",
    limit: float | None = None,
) -> bytes:
    """Draw one horizontal bar a row.

    Args:
        bars: From the top.
        label: Of the axis.
        legend: Opacity and name of the parts, where there are several.
        mark: What the mark means.
        limit: Where the axis ends.
    """
    rows = max(3, len(bars))
    figure, axes = figures.empty_axes(_THEME, 6.6, min(14.0, 1.3 + _BAR_INCHES * rows))
    if not bars:
        return figures.to_png(figure, axes, _THEME, note="Nothing was measured")
    ends = [sum(length for length, _, _ in bar.parts) for bar in bars]
    reach = [max(end, bar.mark or 0.0) for end, bar in zip(ends, bars, strict=True)]
    longest = limit or max([*reach, 1e-9])
    for row, (bar, right) in enumerate(zip(bars, reach, strict=True)):
        left = 0.0
        for length, colour, opacity in bar.parts:
            axes.barh(row, length, left=left, height=0.68, color=colour, alpha=opacity)
            left += length
        if bar.mark is not None:
            axes.plot(bar.mark, row, "D", color=_THEME.text, markersize=4.5, mfc="white")
        place = {"va": "center", "color": _THEME.text, "fontsize": 9}
        axes.text(right + 0.012 * longest, row, bar.text, **place)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", labelsize=9, labelcolor=_THEME.text)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, longest * (1.0 if limit else 1.16))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)
    _add_bar_legend(figure, legend, mark)
    return figures.to_png(figure, axes, _THEME)


def _add_bar_legend(figure: Any, legend: Sequence[tuple[float, str]], mark: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_THEME.muted, alpha=opacity, label=name) for opacity, name in legend
    ]
    if mark:
        line: dict[str, Any] = {"linestyle": "", "color": _THEME.text, "markersize": 4.5}
        handles.append(Line2D([], [], marker="D", mfc="white", label=mark, **line))
    if handles:
        figure.legend(  # of the figure: long names of rows would push one of the axes out
            handles=handles,
            loc="outside upper left",
            ncols=len(handles),
            frameon=False,
            labelcolor=_THEME.text,
            fontsize=9,
            columnspacing=1.4,
        )

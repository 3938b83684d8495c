"""Draws the five figures of ESync's paper from measured runs.

``python -m thinwire.tools.esync.figures RUN [RUN...] --out DIR`` draws accuracy against time for
IID data, accuracy against time for non-IID data, data throughput, traffic and computing-time ratio.
Each of the five figures of ESync's paper is written as a PNG and a CSV file. The file speedup.csv
has each run's time to a target accuracy and its speedup over SSGD. The argument RUN is a run
directory, or a folder NETWORK/MODE of ESync's log files. Drawing the figures needs no display and
no TensorFlow.

`draw` writes the five figures in the colors and line styles of ESync's paper.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.streams import standard_streams
from thinwire.supervisor.report import figures
from thinwire.supervisor.report.arguments import EXIT_CONFIGURATION, ReportArguments
from thinwire.supervisor.report.figures import THEMES, Theme
from thinwire.tools.esync import runs as measured_runs
from thinwire.tools.esync.runs import EvaluationPoint, MeasuredRun

_THEME: Theme = THEMES["light"]
_BAR_INCHES = 0.3  # height of one row of a bar chart, in inches


@dataclasses.dataclass(frozen=True)
class Style:
    """Name, color and line style of a training method in ESync's figures."""

    name: str
    colour: str
    line: str


#: Training method -> color and line style. A method that is not listed gets the next spare color.
STYLES = {
    "esync": Style("ESync", "#c8108f", "-"),
    "ssgd": Style("SSGD", "#e07a00", ":"),
    "bsp": Style("SSGD", "#e07a00", ":"),
    "asgd": Style("ASGD", "#1f6fd6", "--"),
    "dcasgd": Style("DC-ASGD", "#00926b", "-."),
}
_SPARE_COLOURS = ("#6b4fbb", "#8a6d00", "#c9382b", "#4aa8d8", "#667085")


@dataclasses.dataclass(frozen=True)
class StyledRun:
    """A measured run with its label and line style in ESync's figures."""

    run: MeasuredRun
    label: str
    style: Style


@dataclasses.dataclass(frozen=True)
class Bar:
    """One row of a bar chart: stacked bars, a text, and an estimated value drawn as a mark."""

    label: str
    parts: tuple[tuple[float, str, float], ...]  # (length, color, opacity)
    text: str
    mark: float | None = None


def show(runs: Sequence[MeasuredRun]) -> list[StyledRun]:
    """Return every run with a label and a line style for ESync's figures.

    If several runs have equal methods and equal splits of the data, the label includes the name of
    the run's folder.
    """
    spare = itertools.cycle(_SPARE_COLOURS)
    spare_styles = {
        method: Style(method, next(spare), "-")
        for method in dict.fromkeys(run.method for run in runs)
        if method not in STYLES
    }
    styles = STYLES | spare_styles
    kinds = [(styles[run.method].name, run.non_iid) for run in runs]
    shown = []
    for run, (name, non_iid) in zip(runs, kinds, strict=True):
        is_unique = kinds.count((name, non_iid)) == 1
        shown.append(
            StyledRun(run, name if is_unique else f"{name} ({run.name})", styles[run.method])
        )
    return shown


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of the value and up to ``window`` - 1 values before it.

    >>> trailing_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    result = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        result.append(sum(part) / len(part))
    return result


def accuracy_picture(
    shown: Sequence[StyledRun], smooth: int, standalone: float | None, target: float
) -> bytes:
    """Draw test accuracy against time: the trailing mean, and in paler color the measured values.

    Args:
        shown: Runs with one kind of data split (IID or non-IID). Runs without evaluations are not
            drawn.
        smooth: Number of evaluations in the trailing mean of the accuracy.
        standalone: Accuracy of training on one device, drawn as a dashed line; None for no line.
        target: Target accuracy of the speedup, drawn as a dotted line.
    """
    figure, axes = figures.empty_axes(_THEME, 6.0, 4.0)
    drawn = [styled for styled in shown if styled.run.points]
    if not drawn:
        return figures.to_png(figure, axes, _THEME, note="No run of this kind was evaluated")
    longest = max(styled.run.points[-1].seconds for styled in drawn)
    unit, size = figures.SECONDS.unit_for(longest)
    for styled in drawn:
        xs = [point.seconds / size for point in styled.run.points]
        ys = [point.accuracy for point in styled.run.points]
        colour = styled.style.colour
        axes.plot(xs, ys, "-", color=colour, linewidth=0.9, alpha=0.4)
        smoothed = trailing_mean(ys, smooth)
        line = {"color": colour, "linewidth": 2.2, "label": styled.label}
        axes.plot(xs, smoothed, styled.style.line, **line)
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
    """Draw a chart of horizontal bars, one bar per row (a run or a device).

    Args:
        bars: Rows of the chart, in order from the top.
        label: Label of the horizontal axis.
        legend: (opacity, name) of each stacked part of a bar, for the legend; empty if bars have
            one part.
        mark: Text of the legend for the bars' marks (estimates); empty if the bars have no marks.
        limit: Largest value of the horizontal axis; None for a value that fits the bars.
    """
    rows = max(3, len(bars))
    figure, axes = figures.empty_axes(_THEME, 6.6, min(14.0, 1.3 + _BAR_INCHES * rows))
    if not bars:
        return figures.to_png(figure, axes, _THEME, note="Nothing was measured")
    ends = [sum(length for length, _, _ in bar.parts) for bar in bars]
    reach = [max(end, bar.mark or 0.0) for end, bar in zip(ends, bars, strict=True)]
    longest = limit or max([*reach, 1e-9])
    for row, (bar, right) in enumerate(zip(bars, reach, strict=True)):
        start = 0.0
        for length, colour, opacity in bar.parts:
            axes.barh(row, length, left=start, height=0.68, color=colour, alpha=opacity)
            start += length
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
        # The legend belongs to the figure, because beside long row labels the axes are too narrow
        # for a legend.
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=len(handles),
            frameon=False,
            labelcolor=_THEME.text,
            fontsize=9,
            columnspacing=1.4,
        )


NOT_REACHED = "not reached"
_TRAILING = 3  # number of averaged evaluations in the CSV columns *_mean3
_BASELINE = ("ssgd", "bsp")


def draw(
    paths: Sequence[pathlib.Path],
    out: pathlib.Path,
    target: float = 0.8,
    standalone: float | None = None,
    smooth: int = _TRAILING,
) -> list[list[Any]]:
    """Write all figures and tables of some runs; return the rows of the speedup table.

    Args:
        paths: Run directories, or folders ``NETWORK/MODE`` of ESync's log files.
        out: Folder that receives the figures and tables.
        target: Test accuracy; the speedup compares the times to reach it.
        standalone: Test accuracy of training on one device, drawn as a line; None for no line.
        smooth: Number of evaluations in the trailing mean of the drawn accuracy.

    Raises:
        ConfigurationError: A run's files cannot be read. No figure or table is written.
    """
    shown = show([measured_runs.load(path) for path in paths])
    out.mkdir(parents=True, exist_ok=True)
    for name, non_iid in (("accuracy_iid", False), ("accuracy_non_iid", True)):
        chosen = [styled for styled in shown if styled.run.non_iid is non_iid]
        picture = accuracy_picture(chosen, smooth, standalone, target)
        _write(out, name, picture, _ACCURACY_HEAD, _accuracy_rows(chosen, smooth))
    _write(out, "throughput", _throughput_picture(shown), _THROUGHPUT_HEAD, _throughput_rows(shown))
    _write(out, "traffic", _traffic_picture(shown), _TRAFFIC_HEAD, _traffic_rows(shown))
    _write(out, "computing_ratio", _ratio_picture(shown), _RATIO_HEAD, _ratio_rows(shown))
    rows = speedup_rows(shown, target)
    _write_csv(out / "speedup.csv", SPEEDUP_HEAD, rows)
    return rows


def first_at(points: Sequence[EvaluationPoint], target: float, window: int = 1) -> float | None:
    """Return the time in seconds at which the mean accuracy reached the target; None if never.

    The mean accuracy is over ``window`` evaluations, and a mean over fewer evaluations is ignored.
    The rounding of a sum depends on the Python version, so a mean counts as equal to the target
    within the rounding error.
    """
    means = trailing_mean([point.accuracy for point in points], window)
    for point, mean in list(zip(points, means, strict=True))[window - 1 :]:
        if mean >= target or math.isclose(mean, target, rel_tol=1e-12):
            return point.seconds
    return None


SPEEDUP_HEAD = (
    "run",
    "method",
    "split",
    "target",
    "seconds",
    "speedup",
    "seconds_mean3",
    "speedup_mean3",
)
_ACCURACY_HEAD = ("run", "method", "seconds", "round", "accuracy", "smoothed")
_THROUGHPUT_HEAD = ("run", "method", "split", "samples", "seconds", "samples_per_second")
_TRAFFIC_HEAD = (
    "run",
    "method",
    "split",
    "up_mb_per_second",
    "down_mb_per_second",
    "mb_per_second",
    "traffic_est",
)
_RATIO_HEAD = ("run", "method", "split", "host", "device", "rank", "rounds", "orig", "strict")


def speedup_rows(shown: Sequence[StyledRun], target: float) -> list[list[Any]]:
    """Return a row per run with the time to a target accuracy and the speedup over SSGD."""
    rows = []
    for styled in shown:
        row: list[Any] = [*_who(styled), target]
        for window in (1, _TRAILING):
            seconds = first_at(styled.run.points, target, window)
            base = _baseline(shown, styled.run.non_iid, target, window)
            row += [_known(seconds), _speedup(seconds, base)]
        rows.append(row)
    return rows


def _baseline(
    shown: Sequence[StyledRun], non_iid: bool, target: float, window: int
) -> float | str | None:
    """Return the first SSGD run's time to the target accuracy for a data split, or a text."""
    for styled in shown:
        if styled.run.method in _BASELINE and styled.run.non_iid is non_iid:
            return first_at(styled.run.points, target, window)
    return "no SSGD run"


def _speedup(own: float | None, base: float | str | None) -> str:
    if isinstance(base, str):
        return base
    if own is None:
        return NOT_REACHED
    if base is None:
        return f"SSGD: {NOT_REACHED}"
    return f"{base / own:.2f}" if own > 0 else ""


def _known(value: float | None) -> Any:
    return NOT_REACHED if value is None else round(value, 3)


def _who(each: StyledRun) -> list[Any]:
    return [each.run.name, each.style.name, "non-IID" if each.run.non_iid else "IID"]


def _label(each: StyledRun) -> str:
    return f"{each.label}, non-IID" if each.run.non_iid else each.label


def _accuracy_rows(shown: Sequence[StyledRun], smooth: int) -> list[list[Any]]:
    rows = []
    for styled in shown:
        smoothed = trailing_mean([point.accuracy for point in styled.run.points], smooth)
        for point, mean in zip(styled.run.points, smoothed, strict=True):
            values = (round(point.seconds, 3), point.round, point.accuracy, round(mean, 6))
            rows.append([styled.run.name, styled.style.name, *values])
    return rows


def _throughput_rows(shown: Sequence[StyledRun]) -> list[list[Any]]:
    return [
        [
            *_who(styled),
            sum(device.samples for device in styled.run.devices),
            round(styled.run.seconds, 3),
            round(styled.run.samples_per_second, 3),
        ]
        for styled in shown
    ]


def _throughput_picture(shown: Sequence[StyledRun]) -> bytes:
    rates = [(styled, styled.run.samples_per_second) for styled in shown]
    bars = [
        Bar(_label(styled), ((rate, styled.style.colour, 1.0),), f"{rate:,.0f}")
        for styled, rate in rates
    ]
    return bar_picture(bars, "Data throughput (samples/s, all workers)")


def _rates(each: StyledRun) -> tuple[float | None, float | None]:
    """Return a run's traffic to and from the PS in MB/s; (None, None) if not measured."""
    run = each.run
    if run.bytes_up is None or run.bytes_down is None or not run.seconds:
        return None, None
    return run.bytes_up / 1e6 / run.seconds, run.bytes_down / 1e6 / run.seconds


def _traffic_rows(shown: Sequence[StyledRun]) -> list[list[Any]]:
    rows = []
    for styled in shown:
        up, down = _rates(styled)
        total = None if up is None or down is None else up + down
        values = (up, down, total, styled.run.traffic_est)
        rows.append([*_who(styled), *("" if v is None else round(v, 4) for v in values)])
    return rows


def _traffic_picture(shown: Sequence[StyledRun]) -> bytes:
    bars = []
    for styled in shown:
        up, down = _rates(styled)
        colour, estimate = styled.style.colour, styled.run.traffic_est
        parts = () if up is None or down is None else ((up, colour, 1.0), (down, colour, 0.45))
        measured_sum = sum(length for length, _, _ in parts)
        text = f"{measured_sum:.3g}" if parts else "not measured"
        bars.append(Bar(_label(styled), parts, text, estimate))
    legend = ((1.0, "up, measured"), (0.45, "down, measured"))
    return bar_picture(bars, "Traffic, all workers (MB/s)", legend, "traffic_est (one way, MiB/s)")


def _ratio_rows(shown: Sequence[StyledRun]) -> list[list[Any]]:
    return [
        [
            *_who(styled),
            *(device.host, device.device, device.rank, device.rounds),
            round(device.ratio_orig, 4),
            round(device.ratio_strict, 4),
        ]
        for styled in shown
        for device in styled.run.devices
    ]


def _ratio_picture(shown: Sequence[StyledRun]) -> bytes:
    bars = []
    for styled in shown:
        for device in styled.run.devices:
            strict = min(device.ratio_strict, device.ratio_orig)
            overhead = max(0.0, device.ratio_orig - strict)
            parts = ((strict, styled.style.colour, 1.0), (overhead, styled.style.colour, 0.35))
            text = f"{device.ratio_strict:.2f} / {device.ratio_orig:.2f}"
            bars.append(Bar(f"{_label(styled)}: {device.device}, rank {device.rank}", parts, text))
    legend = ((1.0, "strict: forward, backward, update"), (0.35, "orig: all but the exchange"))
    return bar_picture(bars, "Computing time / elapsed time", legend)


def _write(
    out: pathlib.Path, name: str, picture: bytes, head: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    (out / f"{name}.png").write_bytes(picture)
    _write_csv(out / f"{name}.csv", head, rows)


def _write_csv(path: pathlib.Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    table.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8")


def _standalone(text: str | None) -> float | None:
    """Return the accuracy that --standalone gives, as a number or as a run directory."""
    if text is None:
        return None
    try:
        accuracy = float(text)
    except ValueError:
        return measured_runs.final_accuracy(pathlib.Path(text))
    if not 0 <= accuracy <= 1:
        raise ConfigurationError(f"--standalone={text}: expected an accuracy from 0 to 1.")
    return accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw figures of the runs that the command line names; return the exit code."""
    parser = ReportArguments(prog="python -m thinwire.tools.esync.figures", description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("figures"))
    parser.add_argument(
        "--speedup_target", type=float, default=0.8, help="target accuracy (%(default)s)"
    )
    parser.add_argument("--standalone", help="run directory or accuracy of training on one device")
    parser.add_argument(
        "--smooth",
        type=int,
        default=_TRAILING,
        help="number of evaluations in the drawn mean (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.speedup_target <= 1:
        parser.error(f"--speedup_target={options.speedup_target}: expected above 0 and at most 1")
    if options.smooth < 1:
        parser.error(f"--smooth={options.smooth}: expected a mean over 1 or more evaluations")
    try:
        alone = _standalone(options.standalone)
        rows = draw(options.runs, options.out, options.speedup_target, alone, options.smooth)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return EXIT_CONFIGURATION
    for row in (SPEEDUP_HEAD, *rows):
        sys.stdout.write(" | ".join(str(cell) for cell in row) + "\n")
    sys.stdout.write(f"{options.out}\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

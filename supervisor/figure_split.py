"""How the training set was split: which labels each worker holds, as a picture and as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from supervisor import figures
from supervisor.figures import Theme

#: Up to here every label has a colour of its own in a legend; more get a colour scale.
_MOST_LEGEND_LABELS = 20
_LEGEND_COLUMNS = 10

Rows = Sequence[Mapping[str, Any]]


def known_rows(workers: Rows) -> list[Mapping[str, Any]]:
    """Return the workers that have said which labels they hold.

    Args:
        workers: rows of summary.json; ``labels`` of a row are its examples by label.

    Raises:
        ValueError: labels that are no counts by whole number.
    """
    known = [worker for worker in workers if "labels" in worker]
    for worker in known:
        _check(worker["labels"])
    return known


def split_figure(workers: Rows, theme: Theme) -> bytes:
    """Draw how many examples of each label each worker holds, one stacked bar a worker.

    Equal bars of equal parts are an even split; a bar of few colours is a worker that sees few
    labels, a short bar one that has few examples.
    """
    known = known_rows(workers)
    figure, axes = figures.empty_axes(theme, 5.2, figures.height_of_bars(len(known)))
    if not known:
        return figures.to_png(figure, axes, theme, note="No worker has reported its labels")
    labels = _labels(known)
    colours = _colours(len(labels))
    bars = [
        (str(label), [_count(worker, label) for worker in known], colour)
        for label, colour in zip(labels, colours, strict=True)
    ]
    figures.stack_bars(axes, [worker["id"] for worker in known], bars, theme)
    axes.set_xlim(right=1.03 * max(1, *(sum(worker["labels"].values()) for worker in known)))
    axes.set_xlabel("Training examples")
    axes.locator_params(axis="x", nbins=6)
    if len(labels) > _MOST_LEGEND_LABELS:
        _add_scale(figure, axes, labels, theme)
    else:
        _add_legend(axes, len(labels), theme)
    return figures.to_png(figure, axes, theme)


def split_csv(workers: Rows) -> str:
    """Return the same as a table: a row a worker, a column a label, then their sum."""
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
        raise ValueError(f"the labels of a worker are {labels!r:.40}, expected an object")
    for label, count in labels.items():
        if not label.isdecimal() or type(count) is not int or count < 0:
            raise ValueError(f"a worker has {count!r:.20} examples of label {label!r:.20}")


def _labels(workers: Rows) -> list[int]:
    """Return every label that some worker holds, ascending."""
    return sorted({int(label) for worker in workers for label in worker["labels"]})


def _count(worker: Mapping[str, Any], label: int) -> int:
    return int(worker["labels"].get(str(label), 0))


def _colours(num_labels: int) -> list[Any]:
    """Return a colour of each label: apart from each other if few, else along a scale."""
    import matplotlib

    if num_labels > _MOST_LEGEND_LABELS:
        scale = matplotlib.colormaps["turbo"]
        return [scale(place / (num_labels - 1)) for place in range(num_labels)]
    palette = matplotlib.colormaps["tab10" if num_labels <= 10 else "tab20"]
    return [palette(place) for place in range(num_labels)]


def _add_legend(axes: Any, num_labels: int, theme: Theme) -> None:
    """Put the labels over the axes, narrow enough for ten in a row."""
    axes.legend(
        title="label",
        title_fontproperties={"size": 10},
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(_LEGEND_COLUMNS, num_labels),
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
        borderaxespad=0.2,
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

"""Writer of reports of finished runs: pictures and one self-contained page.

``thinwire report RUN [RUN...] [--output FILE]`` compares runs. A report is made from summary.json
and metrics.jsonl alone, without TensorFlow.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import parse_json
from thinwire.runtime.run.directory import METRICS_FILE, SUMMARY_FILE
from thinwire.runtime.run.files import replace_file
from thinwire.runtime.run.target import ACCURACY, Target, find_name
from thinwire.runtime.telemetry.evaluation import Evaluation, names_in, standing
from thinwire.runtime.telemetry.run_status import SUMMARY_SCHEMA, Histogram, RunStatus
from thinwire.supervisor.metrics_log import STATUS_KIND, evaluations_in, read_lines
from thinwire.supervisor.report import figures, page

#: Largest number of metrics that a report draws.
_MOST_METRICS = 12
_LONGEST_FILE_NAME = 100
_OBJECTS = ("seams", "time_to_accuracy", "staleness", "rejected_pushes", "membership")


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """Content of the files of one run that a report shows."""

    name: str
    summary: dict[str, Any]
    evaluations: list[Evaluation]
    staleness: Histogram

    @property
    def target(self) -> Target | None:
        """Target metric and value of the run; None if the run's summary has no target."""
        target = self.summary.get("target")
        return Target.parse(target["text"]) if target else None


def load_run(run_dir: str | os.PathLike[str]) -> ReportedRun:
    """Read a run's summary.json and metrics.jsonl.

    Raises:
        ConfigurationError: A file of the run is missing or is not in the format that Thinwire
            writes.
    """
    run_dir = pathlib.Path(run_dir)
    for name in (SUMMARY_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise ConfigurationError(
                f"the folder {run_dir} has no file {name}; expected the --run_dir of an ended run "
                "with a Supervisor. Give the folder of that run."
            )
    try:
        summary = parse_json((run_dir / SUMMARY_FILE).read_bytes())
        _check_summary(summary)
        lines, _ = read_lines(run_dir / METRICS_FILE)
        evaluations = standing(evaluations_in(lines))
        staleness = _last_staleness(lines)
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"the folder {run_dir} cannot be read as a run: {error}. Expected {SUMMARY_FILE} and "
            f"{METRICS_FILE} in the format of this version of Thinwire."
        ) from error
    return ReportedRun(run_dir.resolve().name, summary, evaluations, staleness)


def write_report(run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Write the report ``run_dir/report/``: one PNG per picture, index.html and labels.csv.

    Returns:
        Path of index.html.

    Raises:
        ConfigurationError: The run's files are missing or damaged.
    """
    run = load_run(run_dir)
    directory = pathlib.Path(run_dir) / "report"
    directory.mkdir(exist_ok=True)
    curves, pictures = curve_pictures([run]), run_pictures(run)
    for picture in (*curves, *pictures):
        replace_file(directory / f"{picture.name}.png", picture.themes["light"])
    if figures.known_rows(run.summary["workers"]):
        replace_file(directory / "labels.csv", figures.split_csv(run.summary["workers"]))
    path = directory / "index.html"
    replace_file(path, page.run_page(page.RunSection(run.name, run.summary, pictures), curves))
    return path


def write_comparison(
    run_dirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> pathlib.Path:
    """Write one self-contained HTML page that compares several runs.

    Raises:
        ConfigurationError: A run's files are missing or damaged; no page is written.
        FileNotFoundError: The folder for the HTML page does not exist; no picture is drawn.
    """
    path = pathlib.Path(output)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    runs = [load_run(run_dir) for run_dir in run_dirs]
    names = distinct_names(run_dirs)
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    rows = [page.RunSection(run.name, run.summary, run_pictures(run)) for run in runs]
    replace_file(path, page.comparison_page(rows, curve_pictures(runs)))
    return path


def distinct_names(run_dirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a unique name for each folder, from as many last parts of its path as are needed."""
    parts = [pathlib.Path(run_dir).resolve().parts for run_dir in run_dirs]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = [
            str(pathlib.Path(*part[-depth:])) if names.count(name) > 1 else name
            for part, name in zip(parts, names, strict=True)
        ]
    return names


def curve_pictures(runs: Sequence[ReportedRun]) -> list[page.Picture]:
    """Draw the first metric against time, bytes and updates, and all other metrics against updates.

    The picture of a metric shows all runs in which the metric was evaluated.
    """
    first, *further = ordered_metrics(runs)[:_MOST_METRICS] or [ACCURACY]
    pairs = [(first, cost) for cost in _COSTS] + [(name, "updates") for name in further]
    file_names = _file_names([f"{name}_{cost}" for name, cost in pairs])
    return [
        _curve_picture(runs, metric, cost, file_name)
        for (metric, cost), file_name in zip(pairs, file_names, strict=True)
    ]


def ordered_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the metrics of all runs: metrics of targets first, then accuracy, the loss last."""
    names = list(dict.fromkeys(name for run in runs for name in names_in(run.evaluations)))
    goals = {find_name(names, run.target.metric) for run in runs if run.target is not None}
    return sorted(names, key=lambda name: (name not in goals, name != ACCURACY, name == "loss"))


def _curve_picture(
    runs: Sequence[ReportedRun], metric: str, cost: str, file_name: str
) -> page.Picture:
    axis, against, cost_of = _COSTS[cost]
    curves = []
    for run in runs:
        points = [
            (cost_of(evaluation), value)
            for evaluation in run.evaluations
            if (value := evaluation.metrics.get(metric)) is not None
        ]
        curves.append(figures.Curve(run.name, [c for c, _ in points], [v for _, v in points]))
    quantity = figures.Quantity.of(metric)
    drawn = {
        key: figures.metric_figure(curves, axis, quantity, theme)
        for key, theme in figures.THEMES.items()
    }
    title = f"{metric.replace('_', ' ').strip() or metric} {against}"
    return page.Picture(file_name, title[:1].upper() + title[1:], drawn)


def _file_names(names: Sequence[str]) -> list[str]:
    """Return one distinct name for each metric that is a valid file name on every operating
    system.
    """
    safe: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".-")[:_LONGEST_FILE_NAME]
        number = sum(other_name.partition("~")[0] == stem for other_name in safe)
        safe.append(f"{stem}~{number + 1}" if number else stem)
    return safe


def run_pictures(run: ReportedRun) -> list[page.Picture]:
    """Draw the pictures of one run: staleness of updates, workers' time, workers' labels."""
    themes = figures.THEMES.items()
    delays = {key: figures.staleness_figure(run.staleness, theme) for key, theme in themes}
    times = {key: figures.time_figure(run.summary["workers"], theme) for key, theme in themes}
    pictures = [
        page.Picture("staleness", "Staleness of the updates", delays),
        page.Picture("worker_time", "Where each worker's time went", times),
    ]
    if rows := figures.known_rows(run.summary["workers"]):
        split = {key: figures.split_figure(rows, theme) for key, theme in themes}
        pictures.append(page.Picture("labels", "Examples of each worker by label", split))
    return pictures


#: Name of a cost (such as time) -> (axis of a picture, words in its title, function that returns an
#: evaluation's cost).
_COSTS: Mapping[str, tuple[figures.Axis, str, Callable[[Evaluation], float]]] = {
    "seconds": (figures.SECONDS, "against time", lambda each: each.seconds),
    "bytes": (figures.BYTES, "against traffic", lambda each: each.bytes_up + each.bytes_down),
    "updates": (figures.UPDATES, "against updates", lambda each: each.version),
}


def _check_summary(summary: Any) -> None:
    """Check the summary entries that a report uses; raise ValueError for a bad entry."""
    if not isinstance(summary, dict) or summary.get("schema") != SUMMARY_SCHEMA:
        raise ValueError(f"the file {SUMMARY_FILE} is not a summary of schema {SUMMARY_SCHEMA}")
    for key in _OBJECTS:
        if not isinstance(summary.get(key), dict):
            raise ValueError(f"the file {SUMMARY_FILE} has no JSON object {key!r}")
    workers = summary.get("workers")
    if not isinstance(workers, list) or not all(isinstance(row, dict) for row in workers):
        raise ValueError(f"the file {SUMMARY_FILE} has no list of workers")
    for row in workers:
        for key in ("id", *(key for key, _ in figures.TIME_PARTS)):
            value = row.get(key)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{SUMMARY_FILE} has value {value!r:.40} for {key} of a worker")
    figures.known_rows(workers)
    target = summary.get("target")
    if target is not None:
        if not isinstance(target, dict) or not isinstance(target.get("text"), str):
            raise ValueError(f"the file {SUMMARY_FILE} has no text that describes the run's target")
        Target.parse(target["text"])


def _last_staleness(lines: Sequence[dict[str, Any]]) -> Histogram:
    """Return the staleness histogram of the newest status; an empty histogram without a status."""
    for line in reversed(lines):
        if line.get("kind") == STATUS_KIND:
            status = {name: value for name, value in line.items() if name != "kind"}
            return RunStatus.from_dict(status).staleness
    return Histogram()

"""Reports of finished runs: pictures and one self-contained page.

``thinwire report RUN [RUN...] [--output FILE]`` compares runs.
TensorFlow is not needed: everything comes from summary.json and metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from thinwire.ops.persistence.documents import parse_json
from thinwire.ops.run.directory import METRICS_FILE, SUMMARY_FILE
from thinwire.ops.telemetry.run_status import (
    SUMMARY_SCHEMA,
    Evaluation,
    Histogram,
    RunStatus,
    standing,
)
from thinwire.ops.types import ConfigurationError
from thinwire.supervisor.metrics_log import STATUS_KIND, evaluations_in, read_lines
from thinwire.supervisor.report import figures, page

_OBJECTS = ("seams", "time_to_accuracy", "staleness", "rejected_pushes", "membership")


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """The files of one run that a report shows."""

    name: str
    summary: dict[str, Any]
    evaluations: list[Evaluation]
    staleness: Histogram


def load_run(run_dir: str | os.PathLike[str]) -> ReportedRun:
    """Read a run's summary.json and metrics.jsonl.

    Raises:
        ConfigurationError: one is missing or is not what Thinwire writes.
    """
    run_dir = pathlib.Path(run_dir)
    for name in (SUMMARY_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise ConfigurationError(
                f"{run_dir} has no {name}; expected the --run_dir of a run with a Supervisor that "
                "has ended. Give that folder."
            )
    try:
        summary = parse_json((run_dir / SUMMARY_FILE).read_bytes())
        _check_summary(summary)
        lines, _ = read_lines(run_dir / METRICS_FILE)
        evaluations = standing(evaluations_in(lines))
        staleness = _last_staleness(lines)
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{run_dir} cannot be read as a run: {error}. Expected {SUMMARY_FILE} and "
            f"{METRICS_FILE} as this version of Thinwire writes them."
        ) from error
    return ReportedRun(run_dir.resolve().name, summary, evaluations, staleness)


def write_report(run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Make ``run_dir/report/``: a PNG per picture, index.html with all of them, labels.csv.

    Returns:
        The page's path.

    Raises:
        ConfigurationError: the run's files are missing or damaged.
    """
    run = load_run(run_dir)
    directory = pathlib.Path(run_dir) / "report"
    directory.mkdir(exist_ok=True)
    curves, pictures = curve_pictures([run]), run_pictures(run)
    for picture in (*curves, *pictures):
        (directory / f"{picture.name}.png").write_bytes(picture.themes["light"])
    if figures.known_rows(run.summary["workers"]):
        _write(directory / "labels.csv", figures.split_csv(run.summary["workers"]))
    path = directory / "index.html"
    _write(path, page.run_page(page.RunSection(run.name, run.summary, pictures), curves))
    return path


def write_comparison(
    run_dirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> pathlib.Path:
    """Write one self-contained page that compares runs.

    Raises:
        ConfigurationError: a run's files are missing or damaged; nothing is written then.
    """
    runs = [load_run(run_dir) for run_dir in run_dirs]
    names = distinct_names(run_dirs)
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    rows = [page.RunSection(run.name, run.summary, run_pictures(run)) for run in runs]
    _write(pathlib.Path(output), page.comparison_page(rows, curve_pictures(runs)))
    return pathlib.Path(output)


def distinct_names(run_dirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the folders' names, with as much of the path in front as makes them differ."""
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
    """Draw accuracy against time, updates and bytes, all runs in each."""
    costs = {
        "accuracy_seconds": (figures.SECONDS, "Accuracy against time", _seconds),
        "accuracy_bytes": (figures.BYTES, "Accuracy against traffic", _bytes),
        "accuracy_updates": (figures.UPDATES, "Accuracy against updates", _updates),
    }
    pictures = []
    for name, (axis, title, cost_of) in costs.items():
        curves = [
            figures.Curve(
                run.name,
                [cost_of(evaluation) for evaluation in run.evaluations],
                [evaluation.accuracy for evaluation in run.evaluations],
            )
            for run in runs
        ]
        drawn = {
            key: figures.accuracy_figure(curves, axis, theme)
            for key, theme in figures.THEMES.items()
        }
        pictures.append(page.Picture(name, title, drawn))
    return pictures


def run_pictures(run: ReportedRun) -> list[page.Picture]:
    """Draw what belongs to one run alone."""
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


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.seconds


def _bytes(evaluation: Evaluation) -> float:
    return evaluation.bytes_up + evaluation.bytes_down


def _updates(evaluation: Evaluation) -> float:
    return evaluation.version


def _check_summary(summary: Any) -> None:
    """Check what the pictures and tables rely on; raises ValueError."""
    if not isinstance(summary, dict) or summary.get("schema") != SUMMARY_SCHEMA:
        raise ValueError(f"{SUMMARY_FILE} is not a summary of schema {SUMMARY_SCHEMA}")
    for key in _OBJECTS:
        if not isinstance(summary.get(key), dict):
            raise ValueError(f"{SUMMARY_FILE} has no object {key!r}")
    workers = summary.get("workers")
    if not isinstance(workers, list) or not all(isinstance(row, dict) for row in workers):
        raise ValueError(f"{SUMMARY_FILE} has no list of workers")
    for row in workers:
        for key in ("id", *(key for key, _ in figures.TIME_PARTS)):
            value = row.get(key)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{SUMMARY_FILE} has {key} {value!r:.40} of a worker")
    figures.known_rows(workers)


def _last_staleness(lines: Sequence[dict[str, Any]]) -> Histogram:
    """Return the staleness of the newest status; empty without one."""
    for line in reversed(lines):
        if line.get("kind") == STATUS_KIND:
            status = {name: value for name, value in line.items() if name != "kind"}
            return RunStatus.from_dict(status).staleness
    return Histogram()


def _write(path: pathlib.Path, text: str) -> None:
    """Write a page whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

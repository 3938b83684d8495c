"""The picture and table of label shares per worker, built from a run directory alone."""

import csv
import io
import json

import pytest

from tests.supervisor.samples import make_worker, write_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.supervisor.report import figures
from thinwire.supervisor.report.writer import load_run, write_report

LIGHT = figures.THEMES["light"]
LABELS = ({0: 600, 1: 400}, {1: 200, 2: 800})


def rows_of(num_workers, num_labels):
    """Workers that hold more and more of ever other labels."""
    return [
        {"id": number, "labels": {str(label): number for label in range(number % num_labels + 1)}}
        for number in range(1, num_workers + 1)
    ]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    workers = [make_worker(n, 2000, state="done", labels=LABELS[n - 1]) for n in (1, 2)]
    workers.append(make_worker(3, 2000, state="left"))  # died before its first report
    return write_run(tmp_path_factory.mktemp("runs") / "skewed", workers=workers)


def test_labels_survive_the_wire_and_reach_the_summary(run_dir):
    worker = WorkerMetrics(1, labels=LABELS[0])
    assert WorkerMetrics.from_json(worker.to_json()) == worker
    rows = json.loads((run_dir / "summary.json").read_text())["workers"]
    assert [row.get("labels") for row in rows] == [{"0": 600, "1": 400}, {"1": 200, "2": 800}, None]


def test_the_report_shows_the_split_and_writes_the_table(run_dir):
    page = write_report(run_dir)
    assert (page.parent / "labels.png").stat().st_size > 5_000
    assert "Examples of each worker by label" in page.read_text()
    table = list(csv.reader(io.StringIO((page.parent / "labels.csv").read_text())))
    assert table == [
        ["worker", "label 0", "label 1", "label 2", "examples"],
        ["1", "600", "400", "0", "1000"],
        ["2", "0", "200", "800", "1000"],
    ]


@pytest.mark.parametrize(
    "labels", [3, {"0": -1}, {"0": 0.5}, {"x": 1}, {"-1": 1}, {"0": None}, {"0": True}]
)
def test_labels_that_are_no_counts_are_refused(run_dir, tmp_path, labels):
    copy = write_run(tmp_path / "run")
    summary = json.loads((copy / "summary.json").read_text())
    summary["workers"][0]["labels"] = labels
    (copy / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigurationError, match="label"):
        load_run(copy)


# Garbage left by other tests must not fail this test.
@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("num_workers", "num_labels"), [(1, 10), (2, 2), (100, 20), (3, 200)])
@pytest.mark.parametrize("theme", figures.THEMES.values(), ids=figures.THEMES)
def test_pictures_of_any_size(num_workers, num_labels, theme):
    png = figures.split_figure(rows_of(num_workers, num_labels), theme)
    assert png.startswith(b"\x89PNG") and len(png) > 5_000


def test_extremes(recwarn):
    assert figures.split_figure([], LIGHT).startswith(b"\x89PNG")
    assert figures.split_csv([]) == "worker,examples\n"
    hollow = [{"id": 1, "labels": {"0": 0}}, {"id": 2, "labels": {}}]
    assert figures.split_figure(hollow, LIGHT).startswith(b"\x89PNG")
    huge = [{"id": 1, "labels": {str(10**6 * n): 10**9 for n in range(30)}}]
    assert figures.split_figure(huge, LIGHT).startswith(b"\x89PNG")
    assert not recwarn.list

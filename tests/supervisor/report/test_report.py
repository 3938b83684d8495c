"""Reports: valid pictures, self-contained pages, clear errors."""

import dataclasses
import html.parser
import io
import json
import subprocess
import sys

import pytest

from tests.supervisor.samples import DATAGRAMS, make_evaluation, write_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.target import Target
from thinwire.runtime.telemetry.run_status import Histogram
from thinwire.supervisor.report import figures, page
from thinwire.supervisor.report.__main__ import main
from thinwire.supervisor.report.writer import (
    distinct_names,
    load_run,
    write_comparison,
    write_report,
)

LIGHT = figures.THEMES["light"]
SHARE = figures.Quantity.of("accuracy")
METRICS = {"../odd name ": 1.0, "loss": 3e-5, "mae": 0.25}
WORKER = {
    "id": 1,
    "compute_seconds": 3.0,
    "encode_seconds": 0,
    "send_seconds": 0.1,
    "wait_seconds": 1,
}


class Reader(html.parser.HTMLParser):
    """Collects a page's references and its text."""

    def __init__(self, text):
        super().__init__()
        self.links, self.tags, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "srcset", "href")]

    def handle_data(self, data):
        self.text.append(data.strip())


def size_of(png):
    from matplotlib.image import imread

    height, width, _ = imread(io.BytesIO(png)).shape
    return width, height


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "adacomp")


@pytest.fixture(scope="module")
def written(run_dir):
    """The page of the run."""
    return write_report(run_dir)


def test_report_has_a_picture_of_everything(written):
    path = written
    pictures = {picture.stem: picture.read_bytes() for picture in path.parent.glob("*.png")}
    expected = "accuracy_bytes accuracy_seconds accuracy_updates loss_updates staleness worker_time"
    assert " ".join(sorted(pictures)) == expected  # the label shares are unknown
    assert not (path.parent / "labels.csv").exists()
    assert all(min(size_of(picture)) > 400 for picture in pictures.values())
    reader = Reader(path.read_text(encoding="utf-8"))
    assert len(reader.links) == 12
    assert all(link.startswith("data:image/png") for link in reader.links)
    for shown in ("84.5 %", "187×", "78.0 MB", "40.0 s", "worker 4", "topk"):
        assert shown in reader.text


def test_metrics_of_any_name_have_curves(tmp_path):
    run_dir = write_run(tmp_path / "run", metrics=METRICS, target=Target.parse("val_mae<=0.4"))
    path = write_report(run_dir)
    names = {picture.stem for picture in path.parent.glob("*.png")}
    costs = {f"mae_{cost}" for cost in ("seconds", "bytes", "updates")}
    others = {"odd-name-_updates", "loss_updates"}
    assert names == costs | others | {"staleness", "worker_time"}
    text = Reader(path.read_text(encoding="utf-8")).text
    assert text.count("Mae against traffic") == 1 and text.count("Loss against updates") == 1
    assert "test mae at the end" in text and "0.25" in text
    assert text[text.index("to val_mae<=0.4") - 1] == "0.0 s"  # by the first evaluation
    assert "accuracy" not in " ".join(text).lower()


def test_comparison_is_one_file_with_every_run(run_dir, tmp_path):
    nasty = write_run(tmp_path / '<script>&"$x_', best=0.9, bytes_up=10**10)
    path = write_comparison([run_dir, nasty], tmp_path / "page.html")
    reader = Reader(path.read_text(encoding="utf-8"))
    assert "script" not in reader.tags
    assert reader.text.count('<script>&"$x_') >= 3
    assert all(link.startswith("data:") for link in reader.links)
    assert reader.text.count("Accuracy against traffic") == 1
    assert reader.text.count("Staleness of the updates") == 2


def test_the_report_shows_what_became_of_the_datagrams(written, tmp_path):
    run = load_run(write_run(tmp_path / "dgt", policies={"dgt": DATAGRAMS}))
    shown = page.run_page(page.RunSection(run.name, run.summary, []), [])
    text = [cell for cell in Reader(shown).text if cell]
    assert text.count("Datagrams") == 1
    row = text[text.index("channel 1") :]
    assert row[1:8] == ["2,499", "1,201", "1.77 MB", "1,200", "1,100", "60", "40"]
    whole = text[text.index("all") :]
    assert whole[1:8] == ["160", "0.500", "93.2 %", "95.0 %", "1.25 steps", "60", "40"]
    assert "duplicate 7 · unknown session 2" in text and text.count("fell back") == 1
    without = Reader(written.read_text(encoding="utf-8")).text
    assert "Datagrams" not in without


def test_a_comparison_with_datagrams_has_two_more_columns(run_dir):
    run = page.RunSection("reliable", load_run(run_dir).summary, [])
    other = page.RunSection("parted", run.summary | {"dgt": DATAGRAMS}, [])
    text = page.comparison_page([run, other], [])
    assert "<th>fresh</th><th>fill</th>" in text
    assert "<td>93.2 %</td><td>95.0 %</td>" in text and "<td>–</td><td>–</td>" in text
    assert "<th>fresh</th>" not in page.comparison_page([run], [])


@pytest.mark.parametrize(
    "block", [3, [], {}, {"channels": 1, "workers": [2], "dropped": []}, {"fresh": "<b>"}]
)
def test_damaged_figures_of_datagrams_are_dashes(run_dir, block):
    run = page.RunSection("odd", load_run(run_dir).summary | {"dgt": block}, [])
    assert "<b>" not in page.run_page(run, []).partition("<h2>Workers")[2]
    assert page.comparison_page([run], [])


def test_the_best_value_of_a_column_is_marked(run_dir):
    run = page.RunSection("worse", load_run(run_dir).summary, [])
    metrics = run.summary["metrics"] | {"accuracy": {"last": 0.9, "min": 0.1, "max": 0.9}}
    better = page.RunSection("better", run.summary | {"metrics": metrics}, [])
    text = page.comparison_page([run, better], [])
    assert '<td class="best">90.0 %</td>' in text and "<td>84.5 %</td>" in text
    assert '<td class="best">' not in page.comparison_page([run], [])


def test_a_run_that_never_evaluated_still_has_a_report(tmp_path):
    run_dir = write_run(tmp_path / "blind", workers=[], staleness=Histogram(), stop_reason=None)
    (run_dir / "metrics.jsonl").write_text("")
    summary = json.loads((run_dir / "summary.json").read_text())
    summary |= {"test_accuracy": None, "best_test_accuracy": None, "compression_up": None}
    summary |= {"metrics": {}}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert write_report(run_dir).is_file()
    assert main([str(run_dir), "--output", str(tmp_path / "page.html")]) == 0


def test_a_torn_last_line_is_left_out(run_dir, tmp_path):
    torn = write_run(tmp_path / "torn")
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"kind":"eval","ver')
    assert dataclasses.replace(load_run(torn), name="adacomp") == load_run(run_dir)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", None, "summary.json"),
        ("metrics.jsonl", None, "metrics.jsonl"),
        ("summary.json", "{", "cannot be read as a run"),
        ("summary.json", '{"schema": 2}', "schema 1"),
        ("summary.json", '{"schema": 1}', "'seams'"),
        ("metrics.jsonl", '{"kind":"eval","version":1}\n', "Evaluation lacks"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, capsys, name, text, message):
    run_dir = write_run(tmp_path / "run")
    (run_dir / name).unlink()
    if text is not None:
        (run_dir / name).write_text(text)
    assert main([str(run_dir), "--output", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(ConfigurationError, match="run"):
        write_report(run_dir)


@pytest.mark.parametrize("workers", [[{"id": 1}], ["x"], 3, [WORKER | {"wait_seconds": -1}]])
def test_ill_typed_workers_are_refused(tmp_path, workers):
    run_dir = write_run(tmp_path / "run")
    summary = json.loads((run_dir / "summary.json").read_text()) | {"workers": workers}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigurationError, match="worker"):
        load_run(run_dir)


def test_bad_arguments_and_outputs(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "to_png", None)  # no picture is drawn for nothing
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 1
    assert main([str(run_dir), "--output", str(tmp_path / "missing" / "page.html")]) == 2
    assert "missing" in capsys.readouterr().err


def test_names_grow_until_they_differ():
    assert distinct_names(["/a/run"]) == ["run"]
    assert distinct_names(["/a/run", "/b/run", "/c/other"]) == ["a/run", "b/run", "other"]
    assert distinct_names(["/a/run", "/a/run"]) == ["/a/run", "/a/run"]


def test_figures_take_extremes():
    crowd = [WORKER | {"id": number} for number in range(500)]
    assert size_of(figures.time_figure(crowd, LIGHT))
    assert size_of(figures.staleness_figure(Histogram({0: 1, 10**6: 3}), LIGHT))
    assert size_of(figures.staleness_figure(Histogram({0: 7}), LIGHT))
    free = figures.Curve("at the start", [0], [0.1])
    curves = [free, figures.Curve("_small", [0, 10], [0.1, 0.5])]
    curves.append(figures.Curve("x" * 200, [0, 10_000], [0.1, 0.9]))
    assert size_of(figures.metric_figure(curves, figures.BYTES, SHARE, LIGHT))
    assert size_of(figures.metric_figure([free], figures.SECONDS, SHARE, LIGHT))
    assert size_of(figures.metric_figure([], figures.SECONDS, SHARE, LIGHT))


def test_reports_do_not_need_tensorflow():
    code = "import sys, thinwire.supervisor.report.writer; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_report_has_no_evaluations_that_a_restart_has_undone(tmp_path):
    run_dir = write_run(tmp_path / "run")
    versions = (200, 400, 600, 300, 500)
    lines = [{"kind": "eval", **make_evaluation(version).to_dict()} for version in versions]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert [each.version for each in load_run(run_dir).evaluations] == [200, 300, 500]


def test_bars_of_a_worker_stand_one_behind_the_other_on_its_row():
    _, axes = figures.empty_axes(LIGHT, 4, 3)
    parts = [("compute", [1, 2], "red"), ("wait", [3, 4], "blue")]
    figures.stack_bars(axes, [5, 7], parts, LIGHT)
    corners = [
        [[tuple(corner) for corner in path.vertices[:4]] for path in part.get_paths()]
        for part in axes.collections
    ]
    ranges = [[(0, 1), (0, 2)], [(1, 4), (2, 6)]]
    assert corners == [
        [
            [(start, row - 0.36), (stop, row - 0.36), (stop, row + 0.36), (start, row + 0.36)]
            for row, (start, stop) in enumerate(part)
        ]
        for part in ranges
    ]


def test_a_scale_reaches_from_the_first_label_to_the_last(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "to_png", lambda figure, *given, **more: drawn.append(figure))
    workers = [WORKER | {"labels": {str(label): 1 for label in range(100, 160)}}]
    figures.split_figure(workers, LIGHT)
    assert drawn[0].axes[-1].get_xlim() == (100, 159)


@pytest.mark.parametrize("cost", [0.5, 1.0])
def test_a_logarithmic_axis_has_all_points_but_those_at_zero(cost):
    curve = figures.Curve("a", [0, cost, 7.0], [0.1, 0.2, 0.3]).without_free_points()
    assert (curve.costs, curve.values) == ([cost, 7.0], [0.2, 0.3])

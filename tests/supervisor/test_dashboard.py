"""The dashboard's text, without a terminal."""

import io
import logging as standard_logging

import pytest
from absl import logging
from rich.console import Console

from tests.supervisor.samples import DATAGRAMS, make_evaluation, make_status, make_worker
from thinwire.supervisor.dashboard import (
    Dashboard,
    Progress,
    RateMeter,
    format_bytes,
    format_duration,
    format_metric,
    plain_line,
    progress_line,
    render,
    worker_table,
)


def drawn(renderable, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def test_progress_line_looks_like_keras():
    line = progress_line(Progress(make_status(800), make_evaluation(800), 50.0))
    assert line == (
        " 800/2000 ━━━━━━━━──────────── 16s ETA 24s - accuracy: 0.7485 - test loss: 0.5785"
        " - loss: 1.3493 - 50.0 updates/s"
    )


def test_progress_line_has_metrics_of_any_name():
    metrics = {"loss": 0.5, "mae": 0.25, "a": 1e-5, "b": None, "c": 1.0, "d": 2.0}
    line = progress_line(Progress(make_status(800), make_evaluation(800, metrics=metrics)))
    assert " - mae: 0.2500 - a: 1.00e-05 - b: not finite - c: 1.0000 - test loss: 0.5000 - " in line


def test_progress_line_before_anything_is_known():
    status = make_status(0, workers=[])
    assert progress_line(Progress(status)) == "   0/2000 " + "─" * 20 + " 0s"


def test_progress_line_at_the_end_and_without_a_limit():
    done = progress_line(Progress(make_status(2000, stop_reason="iter_max"), None, 50.0))
    assert "━" * 20 in done and "40s (iter_max)" in done and "ETA" not in done
    endless = progress_line(Progress(make_status(800, iter_max=0), None, 50.0))
    assert endless.startswith("800 16s - ")
    assert progress_line(Progress(make_status(2100))).count("━") == 20


def test_plain_line_says_who_works_and_what_it_cost():
    workers = [make_worker(1, 400), make_worker(2, 400, state="left")]
    line = plain_line(Progress(make_status(800, workers=workers), make_evaluation(800), 50.0))
    assert line.startswith("update 800/2000 - 16s ETA 24s - accuracy: 0.7485")
    assert line.endswith("up 7.20 MB - down 24.0 MB - workers: 1 left, 1 training")
    assert plain_line(Progress(make_status(0, workers=[]))).endswith("workers: none")


@pytest.mark.parametrize(("terms", "words"), [(1, "1 quarantine -"), (2, "2 quarantines -")])
def test_plain_line_says_whom_guards_have_refused(terms, words):
    guards = {"refused": {"outlier": {"3": 4, "12": 1}}, "quarantines": {"3": terms}}
    line = plain_line(Progress(make_status(policies={"guards": guards})))
    assert f"refused: 5 outlier of worker 3, 12, {words}" in line


def test_table_shows_each_worker():
    suspect = make_worker(2, 800, state="suspect", loss=None)
    text = drawn(render(Progress(make_status(workers=[make_worker(1, 800), suspect]))))
    assert "2 of 4 workers" in text and "suspect" in text
    (row,) = [line for line in text.splitlines() if " training " in line]
    assert " ".join(row.split()) == "1 training 200 0 12.5 1.3493 1.80 MB 6.00 MB 4s"


def test_where_there_are_datagrams_their_ratios_are_shown():
    status = make_status(policies={"dgt": DATAGRAMS})
    assert " - fresh 0.93 - up 7.20 MB - " in plain_line(Progress(status))
    lines = drawn(render(Progress(status))).splitlines()
    assert lines[1].split()[-3:] == ["waited", "fresh", "fill"]
    rows = {line.split()[0]: line.split()[-2:] for line in lines[2:6]}
    assert rows == {
        "1": ["0.91", "0.97"],
        "2": ["0.92", "0.97"],
        "3": ["0.93", "0.97"],
        "4": ["-", "-"],
    }


def test_where_there_are_none_there_is_no_column():
    assert "fresh" not in plain_line(Progress(make_status()))
    assert "fresh" not in drawn(render(Progress(make_status())))


@pytest.mark.parametrize("block", [{"pushes": 0}, {"workers": 3, "fresh": None}, {"workers": [1]}])
def test_figures_that_are_not_known_are_a_dash(block):
    status = make_status(policies={"dgt": block})
    assert " - fresh - - up " in plain_line(Progress(status))
    assert drawn(render(Progress(status))).splitlines()[2].split()[-2:] == ["-", "-"]


def test_a_narrow_terminal_and_a_crowd_still_fit():
    workers = [make_worker(1 + number % 4, 8) for number in range(1000)]
    text = drawn(render(Progress(make_status(workers=workers))), width=40)
    assert "and 968 more" in text
    assert max(map(len, text.splitlines())) <= 40


def test_markup_in_a_name_stays_text():
    assert "[red]x" in drawn(render(Progress(make_status(method="[red]x"))))


def test_rate_is_recent_and_survives_a_restart():
    meter = RateMeter()
    assert meter.rate(make_status(0)) is None
    assert meter.rate(make_status(100, seconds=10.0)) == 10
    for version in range(200, 3000, 100):
        rate = meter.rate(make_status(version, seconds=10 + (version - 100) / 100))
    assert rate == pytest.approx(100)
    assert meter.rate(make_status(2900, seconds=38.0)) == pytest.approx(100)
    assert meter.rate(make_status(500, seconds=20.0)) == 25
    assert meter.rate(make_status(600, seconds=21.0)) == 100


def test_without_a_terminal_it_writes_plain_lines():
    lines = []
    with Dashboard(write=lines.append, live=False) as dashboard:
        dashboard.update(make_status(100))
        dashboard.update(make_status(200), make_evaluation(200))
    assert [line.split(" - ")[0] for line in lines] == ["update 100/2000", "update 200/2000"]


def test_on_a_terminal_it_draws():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    handler = logging.get_absl_handler()
    before = handler.level
    with Dashboard(live=True, console=console) as dashboard:
        assert console.file.getvalue() == ""  # the cursor stays while no run is found
        dashboard.update(make_status(100))
        assert handler.level >= standard_logging.WARNING  # lines would tear the picture
    dashboard.close()
    assert "training" in console.file.getvalue()
    assert handler.level == before  # so that the end of the run is shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (9000, "9.00 kB"), (999_900, "1.00 MB"), (5e15, "5000 TB")],
)
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.3125, "0.3125"),
        (0.0, "0.0000"),
        (1e-3, "0.0010"),
        (2e-5, "2.00e-05"),
        (None, "not finite"),
        (9999.0, "9999.0000"),
        (1e4, "1.00e+04"),
        (-3.5e30, "-3.50e+30"),
    ],
)
def test_a_huge_loss_is_shown_by_its_power_of_ten(loss, text):
    assert format_metric(loss) == text


def test_the_workers_table_is_aligned_and_cut():
    workers = [make_worker(number, 800) for number in range(1, 41)]
    table = worker_table(make_status(800, workers=workers))
    assert len(table) == 34 and table[-1] == "... and 8 more"
    assert len({len(line) for line in table[:-1]}) == 1
    assert worker_table(make_status(0, workers=[])) == []


def test_no_rate_spans_updates_that_were_undone():
    """The run's seconds may have increased meanwhile."""
    meter = RateMeter()
    meter.rate(make_status(900, seconds=9.0))
    meter.rate(make_status(1000, seconds=10.0))
    assert meter.rate(make_status(700, seconds=14.0)) == 50
    assert meter.rate(make_status(710, seconds=15.0)) == 10

"""The five figures from any subset of runs; speedups by hand; missing values are reported."""

import csv

import pytest

from tests.supervisor.measured_samples import write_measured
from thinwire.ops.types import ConfigurationError
from thinwire.tools.esync import figures
from thinwire.tools.esync import runs as measured_runs
from thinwire.tools.esync.figures import first_at
from thinwire.tools.esync.runs import EvaluationPoint

FIGURES = ("accuracy_iid", "accuracy_non_iid", "throughput", "traffic", "computing_ratio")


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def points(*accuracies):
    return [EvaluationPoint(10.0 * at, at, accuracy) for at, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize("methods", [[], ["ssgd"], ["ssgd", "asgd", "dcasgd", "esync", "adacomp"]])
def test_five_figures_of_any_subset(tmp_path, methods):
    methods = methods or ["esync"]
    runs = [
        write_measured(tmp_path / f"{method}-{part}", method, partition=part)
        for method in methods
        for part in (("iid", "class") if len(methods) > 1 else ("iid",))
    ]
    figures.draw(runs, tmp_path / "out", standalone=0.926)
    for name in FIGURES:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "out" / f"{name}.csv").exists()
    assert len(table(tmp_path / "out" / "throughput.csv")) == len(runs)


def test_the_numbers_by_hand(tmp_path):
    figures.draw([write_measured(tmp_path / "run")], tmp_path / "out")
    out = tmp_path / "out"
    (rate,) = table(out / "throughput.csv")
    assert float(rate["samples_per_second"]) == pytest.approx(2 * 10 * 96 / 20)
    (traffic,) = table(out / "traffic.csv")
    assert float(traffic["up_mb_per_second"]) == pytest.approx(2.0)
    assert float(traffic["mb_per_second"]) == pytest.approx(5.0)
    assert float(traffic["traffic_est"]) == pytest.approx(20 * 1.0 / 20)  # a model of 1 MiB
    ratio = table(out / "computing_ratio.csv")[1]
    assert (ratio["rank"], ratio["rounds"]) == ("1", "10")
    assert float(ratio["orig"]) == pytest.approx(1 - 10 * 0.5 / 20)
    assert float(ratio["strict"]) == pytest.approx(10 * 1.2 / 20)
    accuracy = table(out / "accuracy_iid.csv")
    assert [(row["seconds"], row["round"], row["accuracy"]) for row in accuracy] == [
        ("0.0", "0", "0.1"),
        ("10.0", "5", "0.5"),
        ("20.0", "10", "0.9"),
    ]
    assert float(accuracy[-1]["smoothed"]) == pytest.approx(0.5)


def test_the_estimate_is_that_of_esync_for_its_own_network(tmp_path):
    run = measured_runs.load(write_measured(tmp_path / "run", num_parameters=11_175_370))
    pushes_per_second = 20 / 20
    assert run.traffic_est == pytest.approx(42.63 * pushes_per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("accuracies", "window", "expected"),
    [
        ((0.1, 0.9, 0.5), 1, 10.0),
        ((0.1, 0.9, 0.5), 3, None),
        ((0.9, 0.9), 3, None),  # a mean of fewer than three does not count
        ((0.9, 0.7, 0.8), 3, 20.0),
        ((0.8,), 1, 0.0),
        ((), 1, None),
    ],
)
def test_when_a_target_is_reached(accuracies, window, expected):
    assert first_at(points(*accuracies), 0.8, window) == expected


def test_speedup_against_ssgd_of_the_same_split(tmp_path):
    climb = (0.1, 0.75, 0.85, 0.85, 0.85)
    runs = [
        write_measured(tmp_path / "slow", "ssgd", climb, seconds_a_round=8.0),
        write_measured(tmp_path / "fast", "esync", climb),
        write_measured(tmp_path / "low", "asgd", (0.1, 0.2)),
        write_measured(tmp_path / "skewed", "esync", climb, partition="class"),
        write_measured(tmp_path / "rough", "dcasgd", (0.1, 0.85, 0.1)),
    ]
    figures.draw(runs, tmp_path / "out")
    rows = {row["run"]: row for row in table(tmp_path / "out" / "speedup.csv")}
    assert rows["fast"]["speedup"] == rows["fast"]["speedup_mean3"] == "4.00"
    assert rows["slow"]["speedup"] == "1.00"
    assert rows["fast"]["seconds"] == "20.0"
    assert rows["fast"]["seconds_mean3"] == "30.0"
    assert rows["low"]["speedup"] == rows["low"]["seconds"] == "not reached"
    assert rows["skewed"]["speedup"] == "no SSGD run"
    assert (rows["rough"]["speedup"], rows["rough"]["speedup_mean3"]) == ("8.00", "not reached")


def test_an_ssgd_run_that_never_got_there_gives_no_number(tmp_path):
    runs = [write_measured(tmp_path / "a", "ssgd", (0.1, 0.2)), write_measured(tmp_path / "b")]
    figures.draw(runs, tmp_path / "out")
    assert table(tmp_path / "out" / "speedup.csv")[1]["speedup"] == "SSGD: not reached"


def test_the_split_may_stand_in_a_flags_file_alone(tmp_path):
    run = write_measured(tmp_path / "run", partition=None)
    with pytest.raises(ConfigurationError, match="--partition"):
        measured_runs.load(run)
    (run / "flags-ps-0.txt").write_text("--seed=1\n--partition=dirichlet\n--quiet\n")
    assert measured_runs.load(run).non_iid


def test_the_command_line(tmp_path, capsys):
    run = write_measured(tmp_path / "run")
    out = tmp_path / "out"
    assert figures.main([str(run), "--out", str(out), "--standalone", str(run)]) == 0
    assert "no SSGD run" in capsys.readouterr().out
    assert figures.main([str(tmp_path), "--out", str(out)]) == 2
    assert figures.main([str(run), "--out", str(out), "--standalone", "7"]) == 2
    assert figures.main([str(run), "--out", str(out), "--standalone", str(tmp_path)]) == 2
    assert figures.main([str(run), "--out", str(out), "--speedup_target=1", "--smooth=1"]) == 0
    for bad in (["--speedup_target=0"], ["--speedup_target=1.1"], ["--smooth=0"]):
        with pytest.raises(SystemExit) as stop:
            figures.main([str(run), *bad])
        assert stop.value.code == 1

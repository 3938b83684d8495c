"""--type_node=Simulator as a user runs it: files, exit codes, the same bits twice."""

import json
import os
import tempfile

import pytest

from tests.forked import MAIN, forker

SMALL = (
    "--type_node=Simulator",
    "--network=lenet",
    "--dataset=synthetic",
    "--nb_workers=3",
    "--batch_size=10",
    "--iter_max=30",
    "--link_mbps=10",
    "--sim_step_seconds=lognormal:0.2,0.5",
    "--quiet",
)


def simulate(folder, *flags, code=0):
    command = [str(MAIN), *SMALL, f"--run_dir={folder}", *flags]
    with tempfile.TemporaryFile() as output:
        done = forker().start(command, output, dict(os.environ)).wait(100)
        output.seek(0)
        said = output.read().decode()
    assert done == code, said[-3000:]
    return said


@pytest.mark.product
@pytest.mark.processes
def test_a_simulated_run_leaves_what_a_real_one_does_and_the_same_twice(tmp_path):
    for name in ("one", "two"):
        simulate(tmp_path / name, "--eval_interval_updates=10")
    one, two = tmp_path / "one", tmp_path / "two"
    summary = json.loads((one / "summary.json").read_text())
    assert (summary["updates"], summary["stop_reason"]) == (30, "iter_max")
    assert summary["updates_per_second"] == pytest.approx(30 / summary["seconds"])
    assert summary["simulator"]["step_seconds"] == "lognormal:0.2,0.5"
    assert all(worker["compute_seconds"] > 0 for worker in summary["workers"])
    assert (one / "best.keras").exists()
    assert (one / "report" / "index.html").exists()
    for name in ("summary.json", "metrics.jsonl", "measure/worker-1.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    started = (one / "metrics.jsonl").stat().st_mtime_ns
    simulate(one, "--eval_interval_updates=10")  # is finished, and reports that
    assert (one / "metrics.jsonl").stat().st_mtime_ns == started


LONG = pytest.mark.product  # a process for each


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--sim_step_seconds=0",), "seconds is 0"),
        pytest.param(("--sim_failures=9@1",), "1..3 (--nb_workers)", marks=LONG),
        pytest.param(("--sim_server_seconds=1,2",), "--sim_server_seconds has 2", marks=LONG),
        pytest.param(("--sim_server_mbps=-1",), "--sim_server_mbps=-1", marks=LONG),
        pytest.param(("--sim_server_mbps=x",), "--sim_server_mbps: expected numbers", marks=LONG),
        (
            ("--sim_step_seconds=", "--step_seconds=0.2", "--slowdown=2"),
            "--slowdown multiplies --sim_step_seconds",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_at_once(tmp_path, flags, complaint):
    assert complaint in simulate(tmp_path, *flags, code=2)


def test_a_real_run_is_not_written_over(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    assert "holds a run of real processes" in simulate(tmp_path, code=2)

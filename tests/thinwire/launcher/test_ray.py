"""The Ray launcher: refused without Ray; with it, a real cluster in actors of this machine."""

import importlib.util
import signal
import sys

import pytest

from tests.thinwire.launcher.test_evaluator_processes import Validating
from tests.thinwire.launcher.test_run_processes import commands
from tests.thinwire.launcher.test_ssh import wait_for_none
from thinwire.launcher import ray
from thinwire.ops.types import ConfigurationError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no ray: install this project's extra `ray`"
)
pytestmark = pytest.mark.timeout(240)


def test_without_ray_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--launcher=ray needs .* not installed"):
        ray._connect()


@pytest.mark.product
@needs_ray
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.product) for n in (None, signal.SIGKILL))],
)
def test_a_cluster_in_actors(nodes, tmp_path, monkeypatch, number):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes.start(
        "cluster",
        "--type_node=Cluster",
        "--launcher=ray",
        "--ray_address=local",
        f"--sync_dst_dir={tmp_path / 'code'}",
        "--nb_workers=2",
        "--method=asgd",
        "--insecure",
        f"--iter_max={60 if number is None else 1_000_000}",
    )
    if number is not None:
        wait_for_pushes(nodes)
        nodes.kill("cluster", number)
    if number != signal.SIGKILL:
        assert nodes.wait("cluster", 120) == (0 if number is None else 130)
        assert nodes.summary()["stop_reason"] == ("interrupted" if number else "iter_max")
    wait_for_none(nodes.run_dir)


def wait_for_pushes(nodes):
    import time

    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (nodes.run_dir / "metrics.jsonl").exists():
        time.sleep(0.2)
    assert (nodes.run_dir / "metrics.jsonl").exists(), nodes.output("cluster")


class RayScript(Validating):
    """One `thinwire run` on Ray of a script that validates."""

    def __init__(self, folder, *arguments):
        on_ray = ("--launcher=ray", "--ray_address=local", "--insecure", "--nb_workers=2")
        super().__init__(folder, *on_ray, *arguments)


@pytest.mark.product
@needs_ray
def test_a_script_in_actors_is_evaluated_and_its_lines_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with commands(RayScript, tmp_path) as start:
        run = start("toy.py", "fast", "3")
        assert run.end() == 0, run.output()
        one, two = run.histories()
        assert set(one) == {"loss", "mae", "val_loss", "val_mae"}
        assert one["val_loss"] == two["val_loss"]
        assert run.evaluations()[-1]["final"]
        assert "thinwire-completed" not in run.output()
        for worker in (1, 2):
            assert f"[worker {worker}] epoch 2" in run.output()
            assert "epoch 2" in (tmp_path / "run" / "logs" / f"worker-{worker}.out").read_text()

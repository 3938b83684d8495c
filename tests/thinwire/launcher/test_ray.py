"""The Ray launcher on real clusters that lose a node; without Ray it reports an error."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.chaos.process_replay import Witness
from tests.checkpoint_files import entries
from tests.nodes import MAIN
from tests.object_storage import environment_of, s3_server
from tests.ray_nodes import ray_nodes
from tests.thinwire.launcher.commands import commands
from tests.thinwire.launcher.test_evaluator_processes import Validating
from tests.thinwire.launcher.test_ssh import wait_for_none
from tests.waiting import wait_until
from thinwire.launcher import ray
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.fsspec_objects import open_objects

pytestmark = [pytest.mark.timeout(300), pytest.mark.engines]


def test_without_ray_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--launcher=ray needs .* not installed"):
        ray._import_ray()


@pytest.fixture(scope="module")
def two_nodes():
    with ray_nodes(2) as cluster:
        yield cluster


def on(cluster):
    return ("--launcher=ray", f"--ray_address={cluster.address}", "--insecure")


@pytest.mark.processes
def test_a_script_on_two_nodes_is_evaluated_and_its_lines_are_named(two_nodes, tmp_path):
    with commands(Validating, tmp_path) as start:
        run = start(*on(two_nodes), "--nb_workers=2", "toy.py", "fast", "3")
        assert run.end() == 0, run.output()
        one, two = run.histories()
        assert set(one) == {"loss", "mae", "val_loss", "val_mae"}
        assert one["val_loss"] == two["val_loss"]
        assert run.evaluations()[-1]["final"]
        assert "thinwire-completed" not in run.output()
        for worker in (1, 2):
            assert f"[worker {worker}] Epoch 3/3" in run.output()
            assert "Epoch 3/3" in (tmp_path / "run" / "logs" / f"worker-{worker}.out").read_text()


@pytest.mark.product
@pytest.mark.parametrize("number", [signal.SIGINT, None, signal.SIGKILL])
def test_a_cluster_in_actors(nodes, two_nodes, number):
    nodes.start(
        "cluster",
        "--type_node=Cluster",
        *on(two_nodes),
        "--nb_workers=2",
        "--method=asgd",
        f"--iter_max={60 if number is None else 1_000_000}",
    )
    if number is not None:
        figures = nodes.run_dir / "metrics.jsonl"
        wait_for(nodes, lambda: figures.exists() and figures.read_text().count("\n") > 3)
        nodes.kill("cluster", number)
    if number != signal.SIGKILL:
        assert nodes.wait("cluster", 120) == (0 if number is None else 130)
        assert nodes.summary()["stop_reason"] == ("interrupted" if number else "iter_max")
    wait_for_none(nodes.run_dir)


#: Code in a notebook's kernel; other processes cannot import its functions.
CELLS = """
import numpy as np
ROWS = 64

def train(epochs):
    import keras
    import thinwire
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model = thinwire.distribute(model)
    return model.fit(x, x.sum(1), batch_size=16, epochs=epochs, verbose=0).history["loss"]

import sys, thinwire
run = thinwire.run(train, (3,), launcher="ray", ray_address=sys.argv[1], insecure=True)
print(run.summary["updates"], run.value[-1] < run.value[0])
"""


@pytest.mark.product
def test_a_notebooks_function_in_actors(two_nodes, tmp_path):
    command = [sys.executable, "-c", CELLS, two_nodes.address]
    environment = os.environ | {"PYTHONPATH": str(MAIN.parent), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "12 True"


S3_SCRIPT_FLAGS = (
    "--method=bsp",
    "--checkpoint_interval_seconds=0.5",
    "--report_dir=s3://bucket/r",
)


@pytest.mark.product
def test_checkpoints_and_records_of_actors_lie_elsewhere(nodes):
    """Ray's own processes have the credentials from where Ray was started."""
    with s3_server() as environment, environment_of(environment), ray_nodes(2) as cluster:
        flags = ("--checkpoint_dir=s3://bucket/c", *S3_SCRIPT_FLAGS, "--nb_workers=2")
        run = ("--type_node=Cluster", *on(cluster), *flags)
        nodes.start("cluster", *run, "--iter_max=60")
        assert nodes.wait("cluster", 150) == 0, nodes.output("cluster")
        assert json.loads(open_objects("s3://bucket/r", "x").get("summary.json"))["updates"] == 60
        nodes.run_dir = nodes.folder / "elsewhere"
        nodes.start("more", *run, "--iter_max=90")
        assert nodes.wait("more", 150) == 0, nodes.output("more")
        found = Checkpoints(open_objects("s3://bucket/c/ps-0", "x")).load_latest()
        assert found is not None and found[0] == 90
        assert json.loads(open_objects("s3://bucket/r", "x").get("summary.json"))["updates"] == 90


def wait_for(nodes, condition, seconds=120):
    wait_until(condition, seconds, lambda: nodes.output("cluster"))


#: A run that loses its nodes.
LOST = (
    *("--nb_workers=4", "--nb_ps=2", "--restart_ps=3", "--restart_workers=3"),
    *("--checkpoint_interval_seconds=1", "--lease_seconds=5"),
)


@pytest.mark.product
def test_a_lost_node_with_a_ps_and_a_worker_is_replaced(nodes):
    with ray_nodes(3) as cluster:
        own = (*LOST, "--method=asgd", "--journal=on", "--keep_checkpoints=4")
        slow = ("--link_delay_ms=100", "--iter_max=600")
        nodes.start("cluster", "--type_node=Cluster", *on(cluster), *own, *slow)
        checkpoints = nodes.run_dir / "checkpoints"
        wait_for(nodes, lambda: len(list(checkpoints.glob("ps-*/log/*.json"))) >= 6)
        lost = cluster.lose()
        assert nodes.wait("cluster", 200) == 0, nodes.output("cluster")
        assert len(lost) >= 2
        wait_for_none(nodes.run_dir)
    summary, written = nodes.summary(), nodes.output("cluster")
    assert (summary["updates"], summary["stop_reason"]) == (600, "iter_max")
    assert summary["membership"]["lost_updates"] == 0, "every acknowledged one is there"
    for word in lost:
        role, number = word.removeprefix("--id_").split("=")
        assert f"{role}-{number} now runs on machine" in written
    for shard in range(2):
        witness = Witness(nodes.run_dir, shard)
        copy = witness.copy(nodes.folder / f"copy-{shard}")
        entries(copy)[-1].unlink()  # of the end, which no journal continues
        witness.check_living(copy)


SCRIPT = """
import sys, time
import keras, numpy as np
import thinwire

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
model = thinwire.distribute(model)
model.fit(x, x[:, :1], batch_size=16, epochs=10_000, verbose=0, callbacks=[Slow()])
print("trained in", sys.argv[1])
"""


@pytest.mark.product
def test_a_submitted_job_survives_the_same(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run_dir = tmp_path / "run"
    with ray_nodes(3, dashboard=True) as cluster:
        own = ("--launcher=ray", "--insecure", *LOST, "--iter_max=150", f"--run_dir={run_dir}")
        log = open(tmp_path / "job.log", "w")  # noqa: SIM115 - closed below
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
                *(f"--address={cluster.jobs_address}", f"--working-dir={tmp_path}", "--"),
                *(sys.executable, str(MAIN), "run", *own, "train.py", "a job"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        )
        try:
            wait_for_file(run_dir, tmp_path / "job.log")
            lost = cluster.lose()
            assert job.wait(200) == 0, (tmp_path / "job.log").read_text()[-3000:]
            assert lost
        finally:
            job.kill()
            job.wait()
            log.close()
        wait_for_none(run_dir)
    written = (tmp_path / "job.log").read_text()
    assert "(iter_max): 150 updates" in written
    assert "[worker 1] trained in a job" in written


def wait_for_file(run_dir: pathlib.Path, log: pathlib.Path, seconds: float = 120) -> None:
    """Wait until both PS have more than the first checkpoint."""
    pattern = "checkpoints/ps-{}/log/*[2-9].json"
    wait_until(
        lambda: all(list(run_dir.glob(pattern.format(shard))) for shard in range(2)),
        seconds,
        lambda: log.read_text()[-3000:],
        0.2,
    )

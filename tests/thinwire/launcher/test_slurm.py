"""`srun thinwire run` over Slurm's own daemons, with two nodes on this machine."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.nodes import MAIN
from tests.thinwire.launcher.slurmds import HOSTS, MISSING, Slurm
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
SCRIPT = """
import os
import sys

import keras
import numpy as np

import thinwire

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model = thinwire.distribute(model)
model.fit(x, x.sum(1), batch_size=32, epochs=int(sys.argv[1]), verbose=0)
print("worker", thinwire.worker_id(), "of", thinwire.num_workers(), os.environ["SLURMD_NODENAME"])
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    started = Slurm(tmp_path_factory.mktemp("slurm") / "slurm")
    yield started
    started.stop()


class Step:
    """One step of two tasks, each on a separate node, with one shard each."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        (folder / "train.py").write_text(SCRIPT)

    def start(self, epochs, *flags):
        command = (
            *("srun", "-N2", "-n2", f"--chdir={self.folder}"),
            *(sys.executable, str(MAIN), "run"),
            *("--nb_ps=2", "--insecure", "--seed=3", *flags, "train.py", str(epochs)),
        )
        return self.slurm.start(*command, CUDA_VISIBLE_DEVICES="-1")

    def summary(self):
        return json.loads((self.folder / "runs" / "train" / "summary.json").read_text())

    def running(self):
        """Return the processes that were started in the script's folder."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == str(self.folder):
                    found.append((entry / "cmdline").read_text())
        return found


@pytest.fixture
def step(slurm, tmp_path):
    return Step(slurm, tmp_path)


def test_all_roles_come_out_of_the_job(step):
    process = step.start(2)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    for number, host in enumerate(HOSTS, start=1):
        assert f"[worker {number}] worker {number} of 2 {host}" in output
    assert output.count("report: ") == 1
    summary = step.summary()
    assert (summary["updates"], summary["nb_workers"], summary["nb_ps"]) == (4, 2, 2)
    assert [worker["pushes"] for worker in summary["workers"]] == [4, 4]
    assert not (step.folder / "runs" / "train" / "settings").exists()


@pytest.mark.product
def test_a_cancelled_job_resumes(step):
    process = step.start(5000)
    document = step.folder / "runs" / "train" / "metrics.jsonl"
    wait_until(lambda: document.exists() and '"updates"' in document.read_text(), 90)
    subprocess.run(["scancel", "--user=root"], env=step.slurm.environment, check=True)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "the same command resumes" in output and not step.running()
    before = step.summary()
    assert before["stop_reason"] == "interrupted"  # though Slurm signals workers, too
    more = before["updates"] + 20
    process = step.start(5000, f"--iter_max={more}")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert step.summary()["updates"] == more
    process = step.start(5000, f"--iter_max={more}")
    output = process.communicate(timeout=60)[0]
    assert (process.returncode, output.count("this run is finished")) == (0, 2), output
    process = step.start(1, "--overwrite")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert step.summary()["updates"] == 2


@pytest.mark.product
@pytest.mark.parametrize("worker", [1, 2])
def test_a_script_that_fails_early_ends_all_tasks(step, worker):
    text = SCRIPT.replace("x = np", f"1 / (thinwire.worker_id() - {worker})\nx = np")
    (step.folder / "train.py").write_text(text)
    process = step.start(5000)
    output = process.communicate(timeout=120)[0]
    assert process.returncode in (1, 3, 130), output  # srun has the highest of its tasks
    assert output.count("ZeroDivisionError") == 1
    assert not step.running()

"""Sharing real Ray Data; its requirements pandas and pyarrow are installed in a separate folder.

They are no requirement of the tests, because every process that imports Keras would import both.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.object_storage import environment_of
from tests.ray_nodes import ray_nodes

ROOT = pathlib.Path(__file__).resolve().parents[4]
NEEDS = ("pandas==3.1.1", "pyarrow==26.0.1")
TRAINS = """
import keras
import numpy as np
import ray
import thinwire

ray.init(log_to_driver=False)
x = np.random.default_rng(0).normal(size=(1003, 4)).astype("float32")
labels = (x[:, 0] > x[:, 1]).astype("int64")
rows = ray.data.from_items([{"x": a, "label": int(b)} for a, b in zip(x, labels)])
model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")])
model = thinwire.distribute(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(rows, y="label", batch_size=20, epochs=3, verbose=0)
print("accuracy", model.evaluate(x, labels, verbose=0)[1])
"""
SHARES = """
import ray
from tests.thinwire.script.data.places import places
from thinwire.script.data.data import part_of_data

ray.init(log_to_driver=False)
parts = [part_of_data((ray.data.range(23),), place).take_all() for place in places(3)]
rows = [[row["id"] for row in part] for part in parts]
assert [len(part) for part in rows] == [7, 8, 8] and sum(rows, []) == list(range(23)), rows
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of processes that find a node of Ray and what Ray Data needs.

    All processes share the node: a machine under load may take half a minute to start one, and Ray
    gives up then.
    """
    folder = tmp_path_factory.mktemp("ray-data")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--no-deps"]
    subprocess.run([*pip, f"--target={folder}", *NEEDS, "python-dateutil", "six"], check=True)
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    with environment_of(path), ray_nodes(1) as cluster:
        yield {**os.environ, "RAY_ADDRESS": cluster.address}


def _run(arguments, environment, cwd):
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-4000:]
    return output


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_two_workers_train_on_a_data_set_of_ray(environment, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    launch = ["-m", "thinwire", "run", "--nb_workers=2", "--method=bsp", "--run_dir=run"]
    output = _run([*launch, str(script)], environment, tmp_path)
    accuracies = [float(line.split()[-1]) for line in output.splitlines() if "accuracy 0" in line]
    assert len(accuracies) == 2 and min(accuracies) > 0.8, output[-3000:]
    assert "the evaluator has ended" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 3 * 51  # batches of 20 of 1,003 rows, three times


@pytest.mark.engines
@pytest.mark.product
@pytest.mark.timeout(300)
def test_shard_splits_a_data_set_of_ray(environment, tmp_path):
    _run(["-c", SHARES], environment, tmp_path)

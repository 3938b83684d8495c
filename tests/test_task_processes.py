"""Tasks beyond classification with real PS, workers and Supervisor: any metric can end a run."""

import json

import pytest

from tests.nodes import TINY

pytestmark = pytest.mark.timeout(150)

#: Without network and data set: the task has its own.
COMMON = tuple(flag for flag in TINY if not flag.startswith(("--network", "--dataset")))
ADAM = ("--server_optimizer=adam", "--learning_rate=0.003", "--method=asgd")

OWN = """
import keras
import numpy as np


def build_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(loss="mae")
    return model


def load_data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 6))
    y = x @ rng.normal(size=(6, 2)) + 3
    return (x[:480], y[:480]), (x[480:], y[480:])
"""


@pytest.mark.product
@pytest.mark.parametrize(
    ("task", "target", "names"),
    [
        ("regression", "val_rmse<=0.5", {"mae", "rmse", "r2", "loss"}),
        pytest.param(
            "multilabel",
            "f1>=0.8",
            {"f1", "f1_macro", "exact_match", "accuracy", "loss"},
            marks=pytest.mark.product,
        ),
        pytest.param(
            "autoencoder",
            "mae<=0.45",
            {"mae", "rmse", "r2", "loss"},
            marks=pytest.mark.product,
        ),
        pytest.param(
            "tokens",
            "perplexity<=8",
            {"perplexity", "accuracy", "loss"},
            marks=pytest.mark.product,
        ),
    ],
)
def test_a_task_trains_to_its_target(nodes, task, target, names):
    nodes.common = COMMON
    flags = (f"--task={task}", f"--target={target}", "--iter_max=3000")
    nodes.cluster(2, *ADAM, *flags, supervisor=True)
    for name in nodes.processes:
        assert nodes.wait(name, 120) == 0, nodes.output(name)[-3000:]
    summary = nodes.summary()
    assert summary["stop_reason"] == "target" and summary["task"] == task
    assert summary["metrics"].keys() == names
    assert summary["target"]["text"] == target
    assert 0 < summary["target"]["reached"]["updates"] <= summary["updates"] < 3000
    lines = (nodes.run_dir / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if line["kind"] == "eval"]
    assert all(line["metrics"].keys() == names for line in evaluations)
    assert (nodes.run_dir / "best.keras").exists()
    assert (nodes.run_dir / "report" / "loss_updates.png").exists()


@pytest.mark.product
def test_one_s_own_model_of_a_task(nodes, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    nodes.common = COMMON
    flags = (f"--model={tmp_path / 'own.py'}", "--task=regression", "--iter_max=1500")
    nodes.cluster(2, "--method=bsp", *flags, nb_ps=2, supervisor=True)
    for name in nodes.processes:
        assert nodes.wait(name, 120) == 0, nodes.output(name)[-3000:]
    metrics = nodes.summary()["metrics"]
    assert metrics["mae"]["last"] == pytest.approx(metrics["loss"]["last"], rel=1e-5)
    assert metrics["r2"]["last"] > 0.9

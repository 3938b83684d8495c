"""`thinwire run` to a target of the script's own metrics, with records for a user's function."""

import json

import pytest

from tests.thinwire.launcher.commands import Command

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """
import keras, numpy as np
import thinwire

rng = np.random.default_rng(0)
x = rng.normal(size=(640, 8)).astype("float32")
y = x @ rng.normal(size=(8, 1)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
model = thinwire.distribute(model)
valid = x[512:], y[512:]
history = model.fit(x[:512], y[:512], batch_size=16, epochs=200, validation_data=valid, verbose=0)
print("keys", *sorted(history.history))
"""
TRACKING = """
import json, pathlib

def on_metrics(record):
    path = pathlib.Path(record["run_dir"]).parent / "records.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\\n")
    if record["kind"] == "eval":
        raise KeyError("a fault of mine")
"""


def test_a_script_s_metric_ends_the_run(tmp_path):
    (tmp_path / "tracking.py").write_text(TRACKING)
    flags = ("--nb_workers=2", "--method=asgd", "--on_metrics=tracking:on_metrics")
    command = Command(tmp_path, *flags, "--target=val_mae<=0.5", "toy.py", script=SCRIPT)
    assert command.end() == 0, command.output()[-3000:]
    summary = command.summary()
    assert summary["stop_reason"] == "target"
    assert summary["target"]["text"] == "val_mae<=0.5"
    assert summary["target"]["reached"]["updates"] <= summary["updates"] < 200 * 32
    assert summary["metrics"].keys() == {"loss", "mae"} and summary["metrics"]["mae"]["min"] <= 0.5
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert kinds[-1] == "end" and kinds.count("end") == 1 and {"eval", "status"} <= {*kinds}
    assert all(record["run_id"] == records[0]["run_id"] for record in records)
    assert command.output().count("KeyError: 'a fault of mine'") == 1, command.output()[-3000:]
    assert command.output().count("keys loss mae val_loss val_mae") == 2
    report = tmp_path / "run" / "report"
    assert {path.name for path in report.glob("mae_*.png")} == {
        *("mae_bytes.png", "mae_seconds.png", "mae_updates.png"),
    }


def test_a_module_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    command = Command(tmp_path, "--on_metrics=nowhere:function", "toy.py", script=SCRIPT)
    assert command.end() == 2
    assert "there is no module nowhere" in command.output()
    assert not (tmp_path / "run" / "logs" / "ps-0.log").exists()

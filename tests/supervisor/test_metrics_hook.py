"""The user's function for records: its arguments, and that its errors do not end the run."""

import json
import re
import sys
import threading
import types

import pytest

from tests import documents
from tests.supervisor.samples import make_status
from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.ops.types import ConfigurationError
from thinwire.supervisor.metrics_hook import MetricsHook, check, load
from thinwire.supervisor.recorder import Recorder


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("thinwire.supervisor.recorder.write_report", lambda run_dir: None)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("tracking"):
            del sys.modules[name]


def recorder(tmp_path, on_metrics, **settings):
    run = run_of(method("asgd", 2), 2, run_dir=tmp_path / "run", on_metrics=on_metrics, **settings)
    return Recorder(run, None)


def play(made):
    """Record a Supervisor's calls."""
    made.status(make_status(100))
    made.record(make_status(100), {"val_mae": 0.5, "loss": float("nan")}, [100])
    made.finish(make_status(120, stop_reason="iter_max"))


def test_it_gets_every_record_in_order(tmp_path):
    (tmp_path / "tracking_all.py").write_text(
        "records = []\ndef on_metrics(record):\n    records.append(record)\n"
    )
    play(recorder(tmp_path, "tracking_all:on_metrics"))
    records = sys.modules["tracking_all"].records
    assert [record["kind"] for record in records] == ["status", "eval", "status", "end"]
    assert {(record["run_id"], record["run_dir"]) for record in records} == {
        ("a1b2c3", str(tmp_path / "run"))
    }
    status, evaluation, _, end = records
    assert status["version"] == 100 and status["workers"][0]["id"] == 1
    assert evaluation["metrics"] == {"val_mae": 0.5, "loss": None}
    assert (evaluation["version"], evaluation["samples"]) == (100, 1000)
    assert end["stop_reason"] == "iter_max" and end["metrics"]["val_mae"]["last"] == 0.5


@pytest.mark.parametrize("fault", ["raise KeyError('lost')", "raise SystemExit(3)", "1 / 0"])
def test_its_faults_are_logged_once_and_the_run_goes_on(tmp_path, fault, caplog):
    (tmp_path / "tracking_bad.py").write_text(f"def on_metrics(record):\n    {fault}\n")
    play(recorder(tmp_path, "tracking_bad:on_metrics"))
    assert caplog.text.count("raised an error for a record of kind 'status'") == 1
    assert caplog.text.count("Traceback") == 1
    assert "raised an error for 4 records" in caplog.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 120


def test_a_function_that_never_returns_does_not_hold_the_end(caplog):
    stuck = threading.Event()
    hook = MetricsHook("--on_metrics=x:y", lambda record: stuck.wait(60), {})
    for number in range(1005):
        hook.put({"kind": "status", "number": number})
    hook.close(0.05)
    stuck.set()
    assert "has not returned within 0.05 s" in caplog.text
    assert caplog.text.count("is slow") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tracking_missing:f", "no module tracking_missing; expected"),
        ("tracking.missing.too:f", "no module"),
        ("tracking_odd:f", "has no function f"),
        ("tracking_odd:number", "has no function number"),
        ("tracking_broken:f", "importing tracking_broken failed .ZeroDivisionError"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_starts(tmp_path, text, message):
    (tmp_path / "tracking_odd.py").write_text("number = 3\n")
    (tmp_path / "tracking_broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError, match=message):
        recorder(tmp_path, text)
    assert not (tmp_path / "run").exists()


def test_the_module_may_lie_beside_the_script(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "tracking_beside.py").write_text("class Log:\n    put = print\n")
    with pytest.raises(ConfigurationError, match="tracking_beside.py"):
        check("tracking_beside:Log.put")
    assert load("tracking_beside:Log.put", [tmp_path / "scripts"]) is print


def example(package):
    """Return the example of docs/reference/operations.md for a package."""
    text = (documents.ROOT / "docs" / "reference/operations.md").read_text(encoding="utf-8")
    (found,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.S)
        if f"import {package}" in block
    )
    return found


def test_the_example_for_wandb(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((metrics, step)),
        summary=types.SimpleNamespace(update=calls.append),
        finish=lambda: calls.append("finish"),
    )
    fake = types.SimpleNamespace(init=lambda project: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "tracking_wandb.py").write_text(example("wandb"))
    play(recorder(tmp_path, "tracking_wandb:on_metrics"))
    assert calls[0] == ({"val_mae": 0.5, "loss": None}, 100)
    assert calls[1]["bytes_up"] == 9_000 * 120 and calls[2] == "finish"


@pytest.mark.product
def test_the_example_for_mlflow_writes_its_file_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    (tmp_path / "tracking_mlflow.py").write_text(example("mlflow"))
    play(recorder(tmp_path, "tracking_mlflow:on_metrics"))
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics["val_mae"] == 0.5 and "loss" not in run.data.metrics
    assert run.data.metrics["updates_per_second"] > 0
    assert run.data.params["method"] == "adacomp" and run.info.status == "FINISHED"
    (point,) = mlflow.MlflowClient().get_metric_history(run.info.run_id, "val_mae")
    assert point.step == 100
    assert list((tmp_path / "mlruns").rglob("metrics/val_mae"))

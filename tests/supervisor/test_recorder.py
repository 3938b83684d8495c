"""Records of a run: which model is the best, when a target is reached, targets nobody measures."""

import types

import numpy as np
import pytest

from tests.supervisor.samples import make_status
from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.ops.run.target import Target
from thinwire.supervisor.recorder import Recorder

WEIGHTS = np.zeros(3, np.float32)


@pytest.fixture
def opened(tmp_path):
    """Return what opens the records of a run to a target, and the saves of its best model."""
    made = []

    def open_records(metrics, target=None, goal="rmse<=0"):
        scored = iter(metrics)
        saves = []
        scorer = types.SimpleNamespace(
            goal=Target.parse(goal), score=lambda *unused: next(scored), save=saves.append
        )
        settings = {"target": Target.parse(target) if target else None}
        run = run_of(method("asgd", 2), 2, run_dir=tmp_path / "run", **settings)
        made.append(Recorder(run, scorer))
        return made[-1], saves

    yield open_records
    for each in made:
        each.close()


def evaluate(recorder, count):
    """Evaluate so many versions; return of which the target was reached."""
    reached = []
    for version in range(1, count + 1):
        recorder.evaluate(make_status(version), WEIGHTS, [version], final=False)
        if recorder.has_reached_target():
            reached.append(version)
    return reached


def test_the_best_model_is_kept_by_the_task_s_metric(opened):
    values = [float("nan"), 0.5, 0.7, 0.4, 0.4]
    recorder, saves = opened([{"rmse": value, "loss": 1.0} for value in values])
    assert evaluate(recorder, 5) == []
    assert [path.name for path in saves] == ["best.keras"] * 2


def test_the_target_s_metric_comes_first(opened, caplog):
    caplog.set_level("INFO", logger="absl")
    scores = [{"rmse": 1.0 - n / 10, "mae": value} for n, value in enumerate((0.5, 0.6, 0.3))]
    recorder, saves = opened(scores, target="val_mae<=0.3")
    assert evaluate(recorder, 3) == [3]
    assert len(saves) == 2  # 0.5 and 0.3, though each rmse was better than the one before
    assert "val_mae is 0.3000: the target val_mae<=0.3 is reached" in caplog.text


def test_a_target_that_nobody_measures_is_warned_of_once(opened, caplog):
    recorder, _ = opened([{"rmse": 0.5, "loss": 0.1}] * 4, target="f1>=0.9")
    assert evaluate(recorder, 4) == []
    assert caplog.text.count("--target=f1>=0.9: the evaluations have no f1") == 1
    assert "they have rmse, loss" in caplog.text


def test_metrics_from_elsewhere_join_those_of_the_same_version(opened):
    recorder, _ = opened([{"rmse": 0.5}], target="f1>=0.9")
    recorder.evaluate(make_status(1), WEIGHTS, [1], final=False)
    recorder.record(make_status(1), {"f1": 0.95}, [1])
    assert recorder.has_reached_target()
    assert recorder.latest.metrics == {"rmse": 0.5, "f1": 0.95}

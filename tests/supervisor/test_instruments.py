"""A Supervisor's metrics about the run and its evaluations."""

import math

from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.run_status import RunStatus
from thinwire.supervisor.instruments import collect

STATUS = RunStatus("run", "bsp", {}, 2, 1, 10, 1, 100, version=30, bytes_up=5, bytes_down=6)


def evaluation(version, accuracy, loss=0.5):
    return Evaluation(version, 10, 1.0, {"accuracy": accuracy, "loss": loss}, 0, 0)


def values(told):
    return {m.name: {" ".join(labels): v for labels, v in m.values.items()} for m in told}


def test_before_anything_is_known():
    found = values(collect(None, []))
    assert found["evaluations"] == {"": 0}
    assert math.isnan(found["test_accuracy"][""]) and math.isnan(found["test_loss"][""])
    assert "run_updates" not in found


def test_the_newest_and_the_best_evaluation():
    found = values(collect(STATUS, [evaluation(10, 0.9), evaluation(20, 0.8, None)]))
    assert found["test_accuracy"] == {"": 0.8} and found["best_test_accuracy"] == {"": 0.9}
    assert math.isnan(found["test_loss"][""])
    assert found["test_metric"]["accuracy"] == 0.8 and math.isnan(found["test_metric"]["loss"])
    assert found["evaluated_version"] == {"": 20}
    assert found["run_updates"] == {"": 30}
    assert found["run_bytes"] == {"up": 5, "down": 6}

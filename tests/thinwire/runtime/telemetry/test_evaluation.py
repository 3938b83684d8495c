"""Evaluations with any metrics: counts, records of older versions, the best value."""

import dataclasses
import json
import math

import pytest

from thinwire.runtime.telemetry.evaluation import (
    Evaluation,
    best_of,
    is_larger_better,
    latest,
    latest_until,
    ranges,
    ranges_in,
    standing,
)


def evaluation(version, /, **metrics):
    return Evaluation(version, 10 * version, version / 10, metrics, 0, 0, [version])


def test_evaluations_undone_by_a_restart_do_not_count():
    made = [evaluation(v, mae=0.5, old=1.0) for v in (10, 20, 30)]
    made += [evaluation(20, mae=0.7), evaluation(25, mae=0.6)]
    assert [(each.version, each.metrics["mae"]) for each in standing(made)] == [
        *((10, 0.5), (20, 0.7), (25, 0.6))
    ]
    assert "old" not in standing(made)[1].metrics


def test_metrics_of_one_version_are_merged():
    made = [evaluation(10, mae=0.5), evaluation(10, f1=0.3), evaluation(10, mae=0.4)]
    (merged,) = standing(made)
    assert merged.metrics == {"mae": 0.4, "f1": 0.3}
    assert latest(made) == merged
    final = dataclasses.replace(made[0], final=True)
    assert standing([final, made[1]])[0].final
    assert latest([]) is None


def test_evaluations_of_a_former_run_are_not_shown():
    former, ours = evaluation(40, loss=0.1), evaluation(2, loss=0.2)
    assert latest_until(3, []) is None
    assert latest_until(3, [former]) is None
    assert latest_until(3, [former, ours]) is ours


def test_a_value_that_is_not_finite_is_null():
    text = evaluation(1, loss=math.nan, mae=math.inf, version=2.0).to_json()
    assert json.loads(text)["metrics"] == {"loss": None, "mae": None, "version": 2.0}
    assert Evaluation.from_json(text).metrics["loss"] is None


@pytest.mark.parametrize("metrics", [{"x": "high"}, [], {"x": {}}, {"a\x1b": 1.0}, {"x": True}])
def test_hostile_metrics_are_refused(metrics):
    with pytest.raises(ValueError, match="metrics"):
        Evaluation.from_dict(evaluation(1).to_dict() | {"metrics": metrics})


def test_ranges_by_hand():
    made = [evaluation(1, a=2.0, b=None), evaluation(2, a=1.0), evaluation(3, a=1.5, b=None)]
    assert ranges(made) == {
        "a": {"last": 1.5, "min": 1.0, "max": 2.0},
        "b": {"last": None, "min": None, "max": None},
    }
    assert ranges_in({"metrics": ranges(made)}) == ranges(made)


def test_ranges_of_a_damaged_summary():
    odd = ranges_in({"metrics": {"accuracy": {"last": 0.8, "min": "odd", "max": 0.9}}})
    assert odd["accuracy"] == {"last": 0.8, "min": None, "max": 0.9}
    assert best_of("accuracy", odd["accuracy"]) == 0.9
    assert ranges_in({"metrics": None}) == ranges_in({}) == {}
    assert ranges_in({"metrics": {"x": 3}}) == {}


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        *(("accuracy", True), ("val_auc", True), ("f1_score", True), ("r2_score", True)),
        *(("loss", False), ("mae", False), ("mape", False), ("root_mean_squared_error", False)),
        *(("perplexity", False), ("kl_divergence", False), ("something", False)),
    ],
)
def test_which_way_a_metric_improves(name, larger):
    assert is_larger_better(name) is larger

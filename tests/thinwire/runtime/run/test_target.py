"""Targets: any metric, either direction, and resumed runs that have reached their target."""

import types

import pytest

from thinwire.runtime.run.settings import is_finished, limit_of
from thinwire.runtime.run.target import Target, find, is_target


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("val_mae<=0.3", ("val_mae", "<=", 0.3)),
        ("accuracy>=0.9", ("accuracy", ">=", 0.9)),
        (" my metric, of two  <=  -1e-3 ", ("my metric, of two", "<=", -1e-3)),
        ("loss<=2", ("loss", "<=", 2.0)),
    ],
)
def test_texts_and_back(text, parts):
    target = Target.parse(text)
    assert (target.metric, target.sign, target.bound) == parts
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", "accuracy=0.9", "<=3", "mae<0.3", "mae<=", "mae<=x", "mae<=nan", "a<=1>=2"],
)
def test_what_is_no_target(text):
    assert not is_target(text)
    with pytest.raises(ValueError, match="NAME<=NUMBER"):
        Target.parse(text)


def test_the_prefix_of_fit_may_lack_or_be_too_much():
    assert find({"mae": 0.2}, "val_mae") == find({"val_mae": 0.2}, "mae") == 0.2
    assert find({"val_mae": 0.2, "mae": 0.1}, "mae") == 0.1
    assert find({"loss": 0.2}, "mae") is None


def test_reached():
    target = Target.parse("mae<=0.3")
    assert target.is_reached({"mae": 0.3}) and not target.is_reached({"mae": 0.31})
    assert not target.is_reached({"mae": None}) and not target.is_reached({})
    assert (target.stop_reason, Target.of_accuracy(0.9).stop_reason) == (
        *("target", "target_accuracy"),
    )


def run_to(text):
    return types.SimpleNamespace(target=Target.parse(text) if text else None, iter_max=7)


@pytest.mark.parametrize(
    ("now", "earlier", "finished"),
    [
        ("mae<=0.3", "mae<=0.3", True),
        ("mae<=0.3", "mae<=0.2", True),
        ("mae<=0.3", "mae<=0.4", False),
        ("mae<=0.3", "loss<=0.1", False),
        ("mae<=0.3", "mae>=0.1", False),
        ("mae<=0.3", None, False),
        (None, "mae<=0.3", False),
    ],
)
def test_a_run_that_has_reached_a_target_is_finished(now, earlier, finished):
    assert is_finished(run_to(now), "target", earlier) is finished


def test_limits_and_checkpoints_of_older_versions():
    assert limit_of(run_to("mae<=0.3"), "target") == "mae<=0.3"
    assert limit_of(run_to("mae<=0.3"), "target_accuracy") is None
    assert limit_of(run_to("mae<=0.3"), "iter_max") == 7
    assert is_finished(run_to("accuracy>=0.8"), "target_accuracy", 0.8)
    assert not is_finished(run_to("accuracy>=0.8"), "target_accuracy", 0.7)


def test_the_summary_of_a_run_that_has_reached_it():
    summary = {"metrics": {"mae": {"last": 0.5, "min": 0.2, "max": 0.9}}}
    assert Target.parse("val_mae<=0.2").is_reached_in(summary)
    assert not Target.parse("val_mae<=0.1").is_reached_in(summary)
    assert Target.parse("mae>=0.9").is_reached_in(summary)
    assert Target.of_accuracy(0.9).is_reached_in({"best_test_accuracy": 0.91})

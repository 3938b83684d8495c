"""Status documents survive the wire, reject hostile content, and add up to the summary."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.target import Target
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.run_status import (
    Histogram,
    MembershipCounts,
    RunStatus,
    WorkerMetrics,
    summarise,
)

SUMMARY_KEYS = (
    "schema method seams nb_workers nb_ps num_parameters seed updates samples seconds "
    "test_accuracy test_loss best_test_accuracy time_to_accuracy metrics bytes_up bytes_down "
    "bytes_up_per_push bytes_down_per_pull compression_up compression_down "
    "updates_per_second samples_per_second staleness rejected_pushes workers membership "
    "stop_reason groups"
)
SUMMARY_WORKER_KEYS = (
    "id state pushes samples bytes_up bytes_down compute_seconds encode_seconds "
    "send_seconds wait_seconds"
)
WORKER = WorkerMetrics(
    id=1,
    state="training",
    clock=41,
    lag=2,
    pushes=40,
    samples=400,
    local_steps=40,
    bytes_up=2000,
    bytes_down=8000,
    compute_seconds=3.0,
    encode_seconds=0.5,
    send_seconds=0.25,
    wait_seconds=1.0,
    loss=0.7,
    refused=1,
    steps_per_second=9.5,
)
STATUS = RunStatus(
    run_id="r1",
    method="adacomp",
    seams={"codec": "topk", "sync": "asp"},
    nb_workers=1,
    nb_ps=2,
    num_parameters=1000,
    seed=7,
    iter_max=100,
    version=40,
    samples=400,
    seconds=4.0,
    learning_rate=0.02,
    staleness=Histogram({0: 30, 2: 10}),
    rejected_pushes={"non_finite": 1},
    bytes_up=2000,
    bytes_down=8000,
    pushes=40,
    pulls=41,
    membership=MembershipCounts(epochs=1),
    workers=[WORKER],
    policies={"groups": {"sizes": [1], "note": None}},
    stop_reason="iter_max",
)


def evaluation(version, accuracy, **changes):
    values = {"bytes_up": 10 * version, "bytes_down": 20 * version, "versions": [version]}
    metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
    made = Evaluation(version, 10 * version, version / 10, metrics, **values)
    return dataclasses.replace(made, **changes)


def test_a_status_survives_the_wire():
    assert RunStatus.from_json(STATUS.to_json()) == STATUS
    assert RunStatus.from_json(STATUS.to_json().encode()).staleness.counts == {0: 30, 2: 10}


def test_a_diverged_loss_travels_as_null():
    worker = dataclasses.replace(WORKER, loss=math.nan)
    assert WorkerMetrics.from_json(worker.to_json()).loss is None
    with pytest.raises(ValueError, match="wait_seconds.* inf"):
        dataclasses.replace(WORKER, wait_seconds=math.inf).to_json()


def broken(**changes):
    return json.dumps(STATUS.to_dict() | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "RunStatus is"),
        ("{", "Expecting"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "codec|Expecting"),
        (broken(surprise=1), "unknown field 'surprise'"),
        (json.dumps({"run_id": "r"}), "lacks the field 'method'"),
        (broken(version=-1), "version is -1, expected a count"),
        (broken(version=1.5), "version is 1.5, expected a whole number"),
        (broken(version=True), "version is True"),
        (broken(version=10**1000), "version is 3322 bits"),
        (broken(seconds=10**1000), "seconds is 3322 bits"),
        (broken(seconds="4"), "seconds is '4', expected a number"),
        (broken(seconds=math.nan), "NaN"),
        (broken(method="a\x1b[2Jb"), "printable"),
        (broken(method="a" * 2000), "printable"),
        (broken(seams=[]), "seams"),
        (broken(seams={"codec": 1}), r"seams.codec is 1"),
        (broken(staleness={"counts": {"-3": 1}}), "whole number"),
        (broken(staleness={"counts": {"9" * 5000: 1}}), "printable|whole number"),
        (broken(workers=[{"id": 1, "state": "asleep"}]), r"workers\[0\].state is 'asleep'"),
        (broken(workers={"id": 1}), "a list"),
        (broken(policies={"x": {"y": "\x00"}}), "policies.x.y"),
        (broken(policies={"x": 3}), "policies.x"),
        (broken(policies={"x": json.loads("[" * 50 + "]" * 50)}), "deep|an object"),
    ],
)
def test_hostile_documents_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        RunStatus.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(field=st.sampled_from(list(STATUS.to_dict())), value=JSON)
def test_any_mutated_document_is_read_or_refused(field, value):
    try:
        status = RunStatus.from_json(broken(**{field: value}))
    except ValueError:
        return
    assert RunStatus.from_json(status.to_json()) == status


@given(st.lists(st.integers(0, 50), min_size=1))
def test_histogram_agrees_with_numpy(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.max == max(values)
    assert histogram.p95 == np.percentile(values, 95, method="inverted_cdf")


def test_histograms_merge_without_touching_their_parts():
    left, right = Histogram({1: 2}), Histogram({1: 1, 4: 1})
    assert left.merge(right).counts == {1: 3, 4: 1}
    assert left.counts == {1: 2}
    assert Histogram().mean == Histogram().p95 == Histogram().max == 0


def test_summary_has_exactly_the_agreed_keys():
    summary = summarise(STATUS, [evaluation(20, 0.81), evaluation(40, 0.79, final=True)])
    assert " ".join(summary) == SUMMARY_KEYS
    assert " ".join(summary["workers"][0]) == SUMMARY_WORKER_KEYS
    assert list(summary["membership"]) == ["epochs", "left", "returned", "lost_updates"]
    json.dumps(summary, allow_nan=False)


def test_summary_numbers():
    evaluations = [evaluation(20, 0.81), evaluation(40, 0.79, final=True)]
    summary = summarise(STATUS, evaluations, Target.of_accuracy(0.805))
    assert (summary["test_accuracy"], summary["best_test_accuracy"]) == (0.79, 0.81)
    assert summary["compression_up"] == 4000 * 40 / 2000
    assert summary["compression_down"] == 4000 * 41 / 8000
    assert (summary["bytes_up_per_push"], summary["updates_per_second"]) == (50, 10)
    assert summary["staleness"] == {"mean": 0.5, "p95": 2, "max": 2}
    reached = {"seconds": 2, "updates": 20, "samples": 200, "bytes_up": 200, "bytes_down": 400}
    assert summary["time_to_accuracy"]["0.80"] == reached
    assert summary["time_to_accuracy"]["0.805"] == reached
    assert summary["time_to_accuracy"]["0.85"] is None
    assert list(summary["time_to_accuracy"])[:3] == ["0.50", "0.60", "0.70"]


def test_summary_of_a_run_that_never_began():
    empty = RunStatus("r", "asgd", {}, 1, 1, 10, 0, 5)
    summary = summarise(empty, [])
    undefined = "test_accuracy test_loss best_test_accuracy compression_up updates_per_second"
    assert all(summary[key] is None for key in undefined.split(" "))
    assert set(summary["time_to_accuracy"].values()) == {None}


def test_a_policy_may_not_overwrite_the_summary():
    with pytest.raises(ValueError, match="'seconds'"):
        summarise(dataclasses.replace(STATUS, policies={"seconds": {}}), [])


def test_json_files_are_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json_atomically(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_the_best_five_answers_are_reported_where_they_were_counted():
    metrics = [{"accuracy": 0.5, "top5_accuracy": 0.9}, {"accuracy": 0.6, "top5_accuracy": 0.8}]
    made = [evaluation(10, 0.5, metrics=metrics[0]), evaluation(20, 0.6, metrics=metrics[1])]
    summary = summarise(STATUS, made)
    assert summary["test_top5_accuracy"] == 0.8 and summary["best_test_top5_accuracy"] == 0.9
    assert "test_top5_accuracy" not in summarise(STATUS, [evaluation(10, 0.5)])


def test_the_summary_has_any_metric_and_the_target():
    made = [
        evaluation(10, 0, metrics={"mae": 0.9, "loss": 2.0}),
        evaluation(20, 0, metrics={"mae": 0.2, "loss": None}),
        evaluation(30, 0, metrics={"mae": 0.4, "loss": 1.0}),
    ]
    summary = summarise(STATUS, made, Target.parse("val_mae<=0.3"))
    assert summary["metrics"] == {
        "mae": {"last": 0.4, "min": 0.2, "max": 0.9},
        "loss": {"last": 1.0, "min": 1.0, "max": 2.0},
    }
    assert summary["target"]["text"] == "val_mae<=0.3"
    assert summary["target"]["reached"]["updates"] == 20
    assert summary["test_accuracy"] is None and summary["test_loss"] == 1.0
    assert set(summary["time_to_accuracy"].values()) == {None}

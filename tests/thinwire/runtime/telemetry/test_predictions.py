"""An Advisor's predictions and the results: the file, and the block of the summary."""

import dataclasses

import pytest

from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.telemetry import predictions, run_status

PREDICTION = predictions.Prediction(20.0, 160.0, 1000.0, 3000.0)
MEASURED = {
    "updates_per_second": 25.0,
    "samples_per_second": 200.0,
    "bytes_up_per_push": 1000.0,
    "bytes_down_per_pull": None,
}


def advised(*names, proposal=0, **setting):
    setting = {
        "network": "toy",
        "dataset": "toy",
        "batch_size": 8,
        "nb_workers": 2,
        "nb_ps": 1,
        **setting,
    }
    rows = [
        predictions.Predicted(
            [f"--method={name}"], predictions.digest_of(method(name)), PREDICTION, 0.01
        )
        for name in names
    ]
    links = [predictions.WorkerLink(1, 0.1, 20.0, 0.0, 0.002, 7)]
    return predictions.Recommendation(
        predictions.PredictionSetting(**setting),
        ["--nb_workers=2"],
        links,
        160.0,
        0.9,
        rows,
        [predictions.Excluded(["--method=gsp"], "no groups")],
        proposal,
        True,
    )


def status_of(batch=8):
    workers = [run_status.WorkerMetrics(id=n, samples=batch * 5, local_steps=5) for n in (1, 2)]
    return run_status.RunStatus("r", "asgd", {}, 2, 1, 28, 1, 60, workers=workers)


def test_the_file_comes_back_as_it_was(tmp_path):
    found = advised("asgd", "bsp", proposal=1)
    path = tmp_path / predictions.ADVICE_FILE
    write_json_atomically(path, found.to_dict())
    assert predictions.load(path) == found
    run = run_of(method("asgd"), 2, run_dir=tmp_path)
    assert predictions.of_run(run) == (path, found)
    assert predictions.of_run(dataclasses.replace(run, run_dir=tmp_path / "other")) is None
    elsewhere = dataclasses.replace(run, run_dir=tmp_path / "other", advice=str(path))
    assert predictions.of_run(elsewhere) == (path, found)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', None])
def test_what_is_no_advice_is_refused(tmp_path, text):
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"some\.json is not an advice file"):
        predictions.load(path)


def test_a_proposal_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "advice.json"
    write_json_atomically(path, advised("asgd", proposal=3).to_dict())
    with pytest.raises(ConfigurationError, match="proposal 3"):
        predictions.load(path)


def test_prediction_and_outcome_stand_side_by_side():
    run = run_of(method("asgd"), 2)
    block = predictions.outcome(advised("bsp", "asgd"), run, status_of(), MEASURED)
    assert block["flags"] == ["--method=asgd"] and block["proposed"] is False
    assert block["predicted"]["samples_per_second"] == 160.0
    assert block["measured"] == MEASURED
    assert block["off_by"]["samples_per_second"] == pytest.approx(-0.2)
    assert block["off_by"]["bytes_up_per_push"] == 0.0
    assert block["off_by"]["bytes_down_per_pull"] is None
    assert "160 predicted, 200 measured" in predictions.in_words(block)


@pytest.mark.parametrize(
    ("found", "run", "status", "why"),
    [
        (advised("bsp"), run_of(method("asgd"), 2), status_of(), "composition"),
        (advised("asgd", nb_workers=4), run_of(method("asgd"), 2), status_of(), "nb_workers 4"),
        (advised("asgd"), run_of(method("asgd"), 2), status_of(16), "batch_size 8, this run has 1"),
    ],
)
def test_another_run_is_not_compared(found, run, status, why):
    block = predictions.outcome(found, run, status, MEASURED)
    assert block["predicted"] is None and why in block["why"]
    assert "off_by" not in block and why in predictions.in_words(block)


def test_one_setting_makes_another_composition():
    few, many = method("adacomp", compression_rate=0.01), method("adacomp", compression_rate=0.1)
    assert predictions.digest_of(few) == predictions.digest_of(
        method("adacomp", compression_rate=0.01)
    )
    assert predictions.digest_of(few) != predictions.digest_of(many)

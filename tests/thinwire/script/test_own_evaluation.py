"""`thinwire.evaluate`: one worker calls the function, the run records its result."""

import atexit
import types

import pytest

import thinwire
from thinwire.ops.types import ConfigurationError
from thinwire.ps.service.dialogues.evaluations import check_evaluated
from thinwire.script import fit_barriers, identity, interrupts
from thinwire.worker.script import RECORD


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Forget workers that another test has made in this process."""
    monkeypatch.setattr(identity, "_given", [])


@pytest.fixture
def reported(monkeypatch):
    """Return the evaluations of a script that is in a run."""
    found = []
    monkeypatch.setattr(RECORD, "chief", 1)
    monkeypatch.setattr(RECORD, "report", found.append)
    return found


def test_what_a_function_finds_is_recorded(reported):
    assert thinwire.evaluate(lambda: {"score": 1, "fid": 0.5}) == {"score": 1.0, "fid": 0.5}
    assert reported == [{"score": 1.0, "fid": 0.5}]


def test_another_worker_calls_nothing(reported, monkeypatch):
    monkeypatch.setattr(RECORD, "chief", 2)
    assert thinwire.evaluate(lambda: pytest.fail("called")) is None
    assert reported == []


@pytest.mark.parametrize("found", [None, {"score": "high"}, [1.0], {"per class": [1.0, 2.0]}])
def test_what_is_no_dictionary_of_numbers_is_refused(reported, found):
    with pytest.raises(ConfigurationError, match="names and numbers"):
        thinwire.evaluate(lambda: found)
    assert reported == []


def test_without_a_run_it_is_only_called(monkeypatch):
    monkeypatch.setattr(RECORD, "report", None)
    assert thinwire.evaluate(lambda: {"score": 2}) == {"score": 2.0}


def test_a_loop_without_fit_reports_what_a_shard_takes(monkeypatch):
    sent = []
    control = types.SimpleNamespace(report=sent.append, interrupt=lambda: None)
    monkeypatch.setattr(fit_barriers, "Control", lambda *args, **keywords: control)
    monkeypatch.setattr(RECORD, "report", None)
    monkeypatch.setattr(RECORD, "endings", [])
    barriers = fit_barriers.FitBarriers(None, 1, "")
    atexit.unregister(barriers._finish_at_exit)
    interrupts.remove_listener(control.interrupt)
    monkeypatch.setattr(RECORD, "chief", 1)
    thinwire.evaluate(lambda: {"score": 0.5})
    (evaluated,) = sent
    check_evaluated(evaluated, names_versions=False)
    assert not evaluated.answers

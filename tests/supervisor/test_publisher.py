"""Run records at another address: copied completely, continued, never written by two nodes."""

import threading
import types

import numpy as np
import pytest

from tests.supervisor.samples import make_status
from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.persistence.object_store import LocalObjects, StorageError
from thinwire.runtime.persistence.places import discard_records
from thinwire.runtime.run.target import Target
from thinwire.supervisor.publisher import Publisher
from thinwire.supervisor.recorder import Recorder


def names(folder):
    return {name for name in LocalObjects(folder).names() if not name.startswith("supervisor/")}


def recorder_in(folder, address, **changes):
    run = run_of(method("asgd", 2), 2, run_dir=folder, **changes)
    scores = iter([{"rmse": 0.5}, {"rmse": 0.4}])
    scorer = types.SimpleNamespace(
        goal=Target.parse("rmse<=0"),
        score=lambda *unused: next(scores),
        save=lambda path: path.write_bytes(b"model"),
    )
    folder.mkdir(exist_ok=True)
    return Recorder(run, scorer, Publisher(folder, str(address)))


def test_a_supervisor_on_another_machine_continues_the_records(tmp_path):
    address = tmp_path / "reports"
    first = recorder_in(tmp_path / "one", address)
    first.evaluate(make_status(1), np.zeros(3, np.float32), [1], final=False)
    first._publisher.flush()
    assert names(address) == {"metrics.jsonl", "best.keras"}

    second = recorder_in(tmp_path / "two", address)
    assert [each.version for each in second.evaluations] == [1]
    second.evaluate(make_status(2), np.zeros(3, np.float32), [2], final=True)
    second.finish(make_status(2, stop_reason="iter_max"))
    assert {"summary.json", "report/index.html", "metrics.jsonl"} <= names(address)
    for name in names(address):
        assert (address / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    with pytest.raises(Fenced, match="taken over by Supervisor 0"):
        first._publisher.put(["metrics.jsonl"])
        first._publisher.flush()
    with pytest.raises(Fenced):
        first.evaluate(make_status(3), np.zeros(3, np.float32), [3], final=False)
    first.close()


def test_a_run_that_begins_anew_finds_nothing(tmp_path):
    address = tmp_path / "reports"
    old = recorder_in(tmp_path / "one", address)
    old.evaluate(make_status(1), np.zeros(3, np.float32), [1], final=False)
    old._publisher.flush()
    discard_records(str(address), "Cluster 0")
    assert names(address) == set()
    with pytest.raises(Fenced, match="Cluster 0"):
        old._publisher.put(["best.keras"])
        old._publisher.flush()
    assert recorder_in(tmp_path / "two", address).evaluations == []
    old.close()


def test_a_storage_that_was_away_gets_everything_in_the_end(tmp_path, monkeypatch):
    publisher = Publisher(tmp_path, str(tmp_path / "reports"))
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    put = publisher._files.put

    def fail(files):
        raise StorageError("the cable is out")

    publisher._files.put = fail
    publisher.put(["a"])
    with pytest.raises(ConfigurationError, match=f"cable is out.*{tmp_path}"):
        publisher.flush()
    publisher._files.put = put
    publisher.put(["b", "missing"])
    publisher.flush()
    assert names(tmp_path / "reports") == {"a", "b"}


def test_the_newest_content_is_published_where_an_older_one_has_failed(tmp_path, monkeypatch):
    publisher = Publisher(tmp_path, str(tmp_path / "reports"))
    has_begun, is_newer, alone = threading.Event(), threading.Event(), publisher._files.put

    def fail_once(files):
        monkeypatch.setattr(publisher._files, "put", alone)
        has_begun.set()
        assert is_newer.wait(30)
        raise StorageError("away")

    monkeypatch.setattr(publisher._files, "put", fail_once)
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("kept")
    publisher.put(["a", "b"])
    assert has_begun.wait(30)
    (tmp_path / "a").write_text("2")
    publisher.put(["a"])
    is_newer.set()
    publisher.flush()
    assert (tmp_path / "reports" / "a").read_text() == "2"
    assert (tmp_path / "reports" / "b").read_text() == "kept"

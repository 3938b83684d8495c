"""Shard 0 writes the final summary only if no Supervisor has written it."""

import json
import types

import pytest

from thinwire.ps.shard.process import ShardProcess
from thinwire.ps.shard.run_records import RunRecords
from thinwire.runtime.run.finished import has_evaluated_summary

END = {"updates": 7, "stop_reason": "max_seconds", "test_accuracy": 0.9}


def run_in(folder, **changes):
    (folder / "summary.json").write_text(json.dumps(END | changes))
    return types.SimpleNamespace(run_dir=folder)


def test_the_summary_of_this_very_end_is_known(tmp_path):
    assert has_evaluated_summary(run_in(tmp_path), 7, "max_seconds")


@pytest.mark.parametrize(
    "changes", [{"updates": 6}, {"stop_reason": "interrupted"}, {"test_accuracy": None}]
)
def test_another_summary_is_not(tmp_path, changes):
    assert not has_evaluated_summary(run_in(tmp_path, **changes), 7, "max_seconds")


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_what_is_no_summary_is_not(tmp_path, content):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert not has_evaluated_summary(types.SimpleNamespace(run_dir=tmp_path), 7, "max_seconds")


class Core:
    version, stop_reason = 7, "max_seconds"


class Board:
    def status(self):
        raise LookupError("a summary was to be written")


def sum_up_in(folder, **changes):
    """Let shard 0 end while its Supervisor still writes the report."""
    connections = types.SimpleNamespace(was_evaluated=False)
    shard = types.SimpleNamespace(
        server=types.SimpleNamespace(core=Core(), connections=connections),
        _leads=True,
        _records=RunRecords(run_in(folder, **changes)),
        _board=Board(),
    )
    ShardProcess._sum_up(shard)


def test_a_shard_that_ends_before_the_report_is_written_leaves_the_summary_alone(tmp_path):
    sum_up_in(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == END


def test_a_shard_writes_over_an_older_summary(tmp_path):
    with pytest.raises(LookupError):
        sum_up_in(tmp_path, updates=3)

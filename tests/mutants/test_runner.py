"""The runner on a made-up tree: killers, wrong records, and repeated runs."""

import dataclasses
import re

import pytest

from tests.mutants import made_up_tree, report, results, runner
from tests.mutants.made_up_tree import KILLER, LOADED, RULE
from tests.mutants.records import InvalidRecords, Record
from tests.mutants.results import Results
from tests.mutants.runner import UselessKillers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return made_up_tree.make(tmp_path_factory.mktemp("made-up") / "tree")


def record(name, where, old, new, *killers):
    return Record("thinwire.ops.rule", where, old, new, name, "sync", "Harm.", killers or (KILLER,))


BOUND = record("bound", "may_proceed", "lead <= bound", "lead < bound")
RECORDS = (
    BOUND,
    record("endless", "may_proceed", "bound > 1000", "bound < 1000"),
    record(
        *("in-a-child", "describe", '"lead "', '"leap "', "tests/ops/test_rule.py::test_child"),
    ),
    record("by-folder", "may_proceed", "lead <= bound", "lead <= bound + 1"),
    record("by-suite", "sign", "value >= 0", "value >= -1"),
    record("survivor", "sign", "value >= 0", "value > 0"),
    record("unused", "steps", "rounds + 1", "rounds + 2"),
)


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    """Return the results of all records, and the file with them."""
    past = Results(tmp_path_factory.mktemp("results") / "results.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "PATIENCE_SECONDS", 6.0)
        return runner.run(RECORDS, past, 2, root, LOADED), past


def test_each_mutant_dies_where_it_must(found):
    assert {result.name: (result.stage, result.killer) for result in found[0]} == {
        "bound": (results.KILLERS, KILLER),
        "endless": (results.KILLERS, "timeout"),
        "in-a-child": (results.KILLERS, "tests/ops/test_rule.py::test_child"),
        "by-folder": (results.FOLDER_TESTS, "tests/ops/test_rule.py::test_beyond"),
        "by-suite": (results.SUITE, "tests/elsewhere/test_others.py::test_sign"),
        "survivor": (results.SURVIVED, ""),
        "unused": (results.SURVIVED, ""),
    }


def test_survivors_and_useless_killers_are_failures(found):
    failures = report.failures(RECORDS, found[0])
    assert [failure.split()[0].strip(":") for failure in failures] == [
        *("by-folder", "by-suite", "survivor", "unused"),
    ]
    assert "SURVIVED. Harm." in failures[2]
    lines = report.of_records(RECORDS, found[0]).splitlines()
    assert lines[1].split()[:6] == ["sync", "7", "3", "1", "1", "2"]
    assert lines[-1] == "killed by the time limit: 1"


def test_the_tree_stays_as_it_was(root, found):
    assert (root / "ops" / "rule.py").read_text() == RULE


def test_a_continued_run_does_not_repeat(root, found, monkeypatch):
    past = Results(found[1].path)
    monkeypatch.setattr(runner, "copies", None)  # nothing is left to run
    assert runner.run(RECORDS, past, 2, root, LOADED) == found[0]


def test_a_changed_record_or_killer_is_run_again(root, found):
    keys = {result.key for result in found[0]}
    assert runner.Case.of(BOUND, root).key in keys
    changed = dataclasses.replace(BOUND, new="lead == bound")
    assert runner.Case.of(changed, root).key not in keys
    tests = root / "tests" / "ops" / "test_rule.py"
    text = tests.read_text()
    tests.write_text(text + "\n")
    assert runner.Case.of(BOUND, root).key not in keys
    tests.write_text(text)


def test_a_run_from_the_start_forgets(found, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(found[1].path.read_text() + '{"key": "half a li')
    assert Results(path).get(found[0][0].key) == found[0][0]
    assert Results(path, fresh=True).get(found[0][0].key) is None


@pytest.mark.parametrize(
    ("killer", "reason"),
    [
        ("tests/elsewhere/test_others.py::test_unsteady", "test_unsteady: failed"),
        ("tests/ops/test_rule.py::test_none", "test_none: does not exist"),
    ],
)
def test_a_killer_that_does_not_pass_without_a_mutant_is_named(root, tmp_path, killer, reason):
    useless = dataclasses.replace(BOUND, killers=(KILLER, killer))
    past = Results(tmp_path / "results.jsonl")
    with pytest.raises(UselessKillers, match=reason):
        runner.run([useless], past, 1, root, LOADED)


def test_a_record_that_does_not_apply_fails_the_run(root, tmp_path):
    gone = dataclasses.replace(BOUND, where="may_stop")
    with pytest.raises(InvalidRecords, match=re.escape("bound: thinwire.ops.rule has no may_stop")):
        runner.run([BOUND, gone], Results(tmp_path / "results.jsonl"), 1, root, LOADED)

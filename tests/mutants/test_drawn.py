"""Mutants drawn by a seed: the pool, repeatability, and the runs."""

import ast
import collections
import contextlib

import pytest

from tests.mutants import (
    drawn,
    drawn_run,
    lines,
    made_up_tree,
    operators,
    records,
    results,
    runner,
    selection,
    sources,
)
from tests.mutants.operators import OPERATORS
from tests.mutants.results import Results

SOURCE = '''
"""A module: 1 + 1 < 3."""
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING and 1 < 2:
    import numpy

__all__ = ["step"] * 1


class Rule:
    bound: Literal[1, 2] = 7

    def step(self, lead: Literal[3], text: str) -> Literal[4]:
        logging.info("lead %d", lead + 1)
        if not lead or lead in (self.a, self.b):
            raise ValueError(f"{lead + 1}" + "x", 3)
        self.count += lead - self.bound
        name = "a" + text
        self.rows["ä"] = lead - text  # ä
        self.send(
            lead
        )
        return (lead) <= (self.bound)
'''


def test_mistakes_are_made_in_code_alone():
    found = [
        (mistake.operator, SOURCE[mistake.start : mistake.end], mistake.new)
        for mistake in operators.mistakes(SOURCE)
    ]
    assert found == [
        ("arithmetic", "7", "6"),
        ("arithmetic", "7", "8"),
        ("logic", "not", ""),
        ("logic", "or", "and"),
        ("comparison", "in", "not in"),
        ("dropped", "self.count += lead - self.bound", "pass"),
        ("arithmetic", "-", "+"),
        ("dropped", 'self.rows["ä"] = lead - text', "pass"),
        ("arithmetic", "-", "+"),
        ("dropped", "self.send(\n            lead\n        )", "pass"),
        ("comparison", "<=", "<"),
    ]


def test_every_mistake_compiles_and_is_a_record_s_edit():
    for mistake in operators.mistakes(SOURCE):
        mutated = mistake.made_in(SOURCE)
        compile(mutated, "mutated", "exec")
        where, old, new = operators.statement_of(SOURCE, mistake)
        assert where == ("Rule" if old.startswith("bound") else "Rule.step")
        edit = records.Edit("thinwire.rule", where, old, new)
        made = records.apply(SOURCE, edit)
        assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(mutated))


def test_all_mistakes_of_a_hard_module_compile():
    path = sources.ROOT / "ps" / "core" / "core.py"
    source = path.read_text()
    found = operators.mistakes(source)
    assert len(found) > 100
    for mistake in found:
        compile(mistake.made_in(source), "mutated", "exec")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return made_up_tree.make(tmp_path_factory.mktemp("made-up") / "tree")


def test_the_same_seed_draws_the_same(root):
    every = drawn.draw(100, 1, root)
    assert every == drawn.draw(100, 1, root)
    assert drawn.draw(5, 1, root) == every[:5]
    assert [mutant.name for mutant in every] != [m.name for m in drawn.draw(100, 2, root)]
    assert len({mutant.key for mutant in every}) == len(every)
    operators_drawn = collections.Counter(mutant.mistake.operator for mutant in every)
    assert operators_drawn == {"comparison": 3, "arithmetic": 6}


def test_a_change_elsewhere_draws_the_same(root):
    def texts():
        mutants = drawn.draw(4, 1, root)
        return [operators.statement_of(mutant.source, mutant.mistake) for mutant in mutants]

    before = texts()
    path = root / "ops" / "rule.py"
    path.write_text("# a comment\n\n" + made_up_tree.RULE)
    assert texts() == before
    path.write_text(made_up_tree.RULE)


def test_every_operator_has_mutants_in_the_product():
    mutants = drawn.draw(40, 1)
    assert collections.Counter(mutant.mistake.operator for mutant in mutants) == dict.fromkeys(
        OPERATORS, 10
    )
    assert not any("_pb2" in str(mutant.path) for mutant in mutants)


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
    """Return three mutants of the made-up tree, their results, the file with them, and the map."""
    folder = tmp_path_factory.mktemp("drawn")
    mutants = [m for m in drawn.draw(100, 1, root) if new_code(m) in KILLED_BY]
    past = Results(folder / "drawn.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_run, "_MAP_PROCESSES", 1)
        found = drawn_run.run(
            mutants, past, 1, root=root, folder=folder / "map", loaded=made_up_tree.LOADED
        )
    return mutants, found, past, folder / "map"


def new_code(mutant):
    return operators.statement_of(mutant.source, mutant.mistake)[2]


#: The mutated statement -> its stage, and the test that fails.
KILLED_BY = {
    "return lead < bound": (results.LINES, "tests/ops/test_rule.py::test_bound"),
    "return rounds - 1": (results.LINES, "tests/elsewhere/test_others.py::test_second"),
    "return value > 0": (results.SURVIVED, ""),
}


@pytest.mark.timeout(600)  # the suite of the made-up tree is run several times
def test_drawn_mutants_die_by_tests_that_execute_their_line(ended):
    mutants, found, _, _ = ended
    by_name = {mutant.name: mutant for mutant in mutants}
    assert {new_code(by_name[r.name]): (r.stage, r.killer) for r in found} == KILLED_BY
    summary = drawn_run.summary(mutants, found)
    assert "2 of 3 died: 66.7 %" in summary
    assert "in sign\n  - return value >= 0\n  + return value > 0" in summary


def test_the_map_knows_tests_and_fixtures_by_line(root, ended):
    known, path = lines.Lines(ended[3], root), drawn.files(root)[1]

    def tests_of(code):
        line = made_up_tree.RULE[: made_up_tree.RULE.index(code)].count("\n") + 1
        return {test.rpartition("::")[2] for test in known.tests_at(path, range(line, line + 1))}

    assert path.name == "rule.py"
    assert tests_of("return lead") == {"test_bound", "test_far", "test_beyond"}
    # Executed by a fixture for both of them.
    assert tests_of("return rounds") >= {"test_first", "test_second"}
    assert tests_of('return "lead') == set()  # in a child process
    assert not any(test.endswith("test_unsteady") for test in known.seconds)


def test_a_changed_test_file_is_tried_as_a_whole(root, ended):
    tests = root / "tests" / "ops" / "test_rule.py"
    text = tests.read_text()
    tests.write_text(text + "\n")
    known = lines.Lines(ended[3], root)
    mutant = next(m for m in ended[0] if new_code(m) == "return lead < bound")
    tests.write_text(text)
    assert selection.batches(known, mutant, root)[-1] == ["tests/ops/test_rule.py"]
    names = selection.batches(lines.Lines(ended[3], root), mutant, root)
    assert sorted(name.rpartition("::")[2] for name in names[0]) == [
        *("test_beyond", "test_bound", "test_far"),
    ]


def test_a_continued_run_repeats_survivors_of_other_tests_alone(root, ended, monkeypatch):
    mutants, found, _, folder = ended
    past = Results(ended[2].path)
    monkeypatch.setattr(runner, "copies", None)  # nothing is left to run
    assert drawn_run.run(mutants, past, 1, root=root, folder=folder) == found
    (root / "tests" / "test_new.py").write_text("")
    waiting = []
    monkeypatch.setattr(
        runner, "copies", lambda *_: waiting.append(1) or contextlib.nullcontext([])
    )
    monkeypatch.setattr(drawn_run, "_tried_by_lines", lambda some, *_: waiting.extend(some) or {})
    drawn_run.run(mutants, past, 1, root=root, folder=folder, with_suite=False)
    (root / "tests" / "test_new.py").unlink()
    assert [new_code(mutant) for mutant in waiting[1:]] == ["return value > 0"]


def test_a_known_equivalent_is_not_run(root, ended, monkeypatch, tmp_path):
    edit = records.Equivalent("thinwire.ops.rule", "sign", "value>=0", "value>0", "0 never comes.")
    monkeypatch.setattr(records, "equivalents", lambda: [edit])
    monkeypatch.setattr(runner, "copies", None)
    survivor = [mutant for mutant in ended[0] if new_code(mutant) == "return value > 0"]
    found = drawn_run.run(survivor, Results(tmp_path / "drawn.jsonl"), 1, root=root)
    assert [result.stage for result in found] == [results.EQUIVALENT]
    assert "0 of 0 died" in drawn_run.summary(survivor, found)


def test_without_a_map_the_folder_and_importing_tests_are_tried(root, ended):
    mutant = ended[0][0]
    batches = selection.batches_without_map(mutant, root)
    assert batches == [["tests/ops/test_rule.py"], ["tests/elsewhere/test_others.py"]]

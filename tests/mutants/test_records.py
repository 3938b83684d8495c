"""All records fit the tree's code, and the check names each wrong record."""

import pathlib

import pytest

from tests.mutants import records, sources
from tests.mutants.records import Edit, InvalidRecords, NotApplicable

SOURCE = '''
"""A module."""
LIMIT = 3


class Rule:
    """A rule."""

    @property
    def bound(self):
        return LIMIT

    @bound.setter
    def bound(self, value):  # set by a flag
        self._bound = max(
            value,
            LIMIT,  # never less
        )

    def may_proceed(self, lead):
        if lead <= self.bound:  # the slowest
            return True
        return lead <= 0


def free(lead):
    return lead <= 0
'''

RECORD = """
[[mutant]]
name = "{name}"
module = "thinwire.rule"
where = "Rule.may_proceed"
old = "lead <= self.bound"
new = "lead < self.bound"
harm = "A worker waits a step too early."
killers = ["tests/test_rule.py::test_bound"]
"""


def edited(where, old, new):
    return records.apply(SOURCE, Edit("thinwire.rule", where, old, new))


def test_every_record_of_this_tree_applies():
    """A refactoring that moves the code of a mutant moves its record too."""
    known = records.read()
    records.check(known)
    assert len(known) >= 100


def test_every_edit_of_a_known_equivalent_applies():
    for edit in records.equivalents():
        records.mutated(edit)


def test_an_edit_is_made_in_its_place_alone():
    mutated = edited("Rule.may_proceed", "lead <= self.bound", "lead < self.bound")
    assert mutated == SOURCE.replace("lead <= self.bound", "lead < self.bound")
    assert edited("free", "lead <= 0", "lead < 0").count("lead <= 0") == 1
    assert "LIMIT = 4" in edited("", "LIMIT = 3", "LIMIT = 4")


def test_layout_comments_and_commas_at_ends_do_not_matter():
    mutated = edited("Rule.bound", "max(value, LIMIT)", "max(value, 0)")
    assert "self._bound = max(value, 0)\n" in mutated
    old = "if lead   <= self.bound:  # another comment\n  return True"
    mutated = edited("Rule.may_proceed", old, "if not lead:\n    return True\n")
    assert "        if not lead:\n            return True\n        return lead <= 0" in mutated


def test_a_line_moved_out_of_its_block_is_a_mutant():
    source = "def step(full):\n    if full:\n        send()\n        count()\n"
    old = "if full:\n    send()\n    count()"
    new = "if full:\n    send()\ncount()"
    mutated = records.apply(source, Edit("thinwire.rule", "step", old, new))
    assert mutated == "def step(full):\n    if full:\n        send()\n    count()\n"


def test_a_dropped_statement_compiles():
    old = "self._bound = max(value, LIMIT)"
    assert "        pass\n" in edited("Rule.bound", old, "pass")


@pytest.mark.parametrize(
    ("where", "old", "new", "reason"),
    [
        ("Rule.may_stop", "lead <= 0", "lead < 0", "has no Rule.may_stop"),
        ("Rule.may_proceed", "lead >= 0", "lead < 0", "is not in thinwire.rule: Rule.may_proceed"),
        ("", "lead <= 0", "lead < 0", "is not in thinwire.rule: module level"),
        ("Rule.may_proceed", "lead <=", "lead <", "2 times"),
        ("free", "lead <= 0", "lead<=0  # the same", "equals `old`"),
        ("free", "lead <= 0", "lead <", "does not compile"),
        ("free", "if a:\n    b\n  c", "d", "cannot be split into tokens"),
    ],
)
def test_an_edit_that_does_not_fit_is_named(where, old, new, reason):
    with pytest.raises(NotApplicable, match=reason):
        edited(where, old, new)


def read(folder: pathlib.Path, text: str, areas=("sync",)):
    (folder / "sync.toml").write_text(text)
    return records.read(folder, areas)


def test_records_are_read(tmp_path):
    known = read(tmp_path, "".join(RECORD.format(name=f"rule-{number}") for number in range(6)))
    assert [record.name for record in known] == [f"rule-{number}" for number in range(6)]
    assert known[0].area == "sync" and known[0].killers == ("tests/test_rule.py::test_bound",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("harm =", "cost ="), "unknown key 'cost'"),
        (('harm = "A worker waits a step too early."', ""), "harm is None"),
        (("rule-0", "Rule 0"), "small letters"),
        (("rule-0", "rule-1"), "rule-1 is the name of 2 records"),
        (('["tests/test_rule.py::test_bound"]', "[]"), "killers is"),
        (("::test_bound", ""), "killers is"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, change, reason):
    first = RECORD.format(name="rule-0").replace(*change)
    others = "".join(RECORD.format(name=f"rule-{number}") for number in range(1, 6))
    with pytest.raises(InvalidRecords, match=reason):
        read(tmp_path, first + others)


def test_an_area_needs_its_records(tmp_path):
    with pytest.raises(InvalidRecords, match="sync has 1 records: at least 6"):
        read(tmp_path, RECORD.format(name="rule"))
    with pytest.raises(InvalidRecords, match=r"sync.toml is no area"):
        read(tmp_path, "", areas=())


def test_a_record_that_no_longer_fits_the_tree_is_named(tmp_path):
    known = read(tmp_path, "".join(RECORD.format(name=f"rule-{number}") for number in range(6)))
    with pytest.raises(InvalidRecords, match="rule-3: there is no module thinwire.rule"):
        records.check(known, tmp_path)
    (tmp_path / "thinwire").mkdir()
    (tmp_path / "thinwire" / "rule.py").write_text(SOURCE)
    with pytest.raises(InvalidRecords, match=r"rule-3: there is no tests/test_rule.py"):
        records.check(known, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_rule.py").touch()
    records.check(known, tmp_path)


def test_a_linked_folder_is_followed():
    assert sources.path_of("thinwire.ops.sync") == sources.ROOT / "ops" / "sync" / "__init__.py"

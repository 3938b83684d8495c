"""Every guarantee of docs/reference/operations.md names existing tests."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference/operations.md"
_LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)")


def rows():
    """(promise, fault, tests) of each line of the table."""
    section = PAGE.read_text().partition("## Guarantees\n")[2].partition("\n## ")[0]
    lines = [line.strip("|\n").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def _functions_of(path):
    """Names of the functions of a file, in any class."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_its_fault_and_tests_that_exist():
    found = rows()
    assert len(found) >= 15
    for promise, fault, tests in found:
        assert promise and fault
        named = _LINK.findall(tests)
        assert named, promise
        assert not _LINK.sub("", tests).replace(",", "").strip(), tests  # nothing but tests
        for name, path in named:
            assert name in _functions_of(path), f"{path} has no {name}, which is to show: {promise}"

"""A function instead of a script: the generated script changes when the function changes."""

import importlib
import pathlib
import sys

import cloudpickle
import pytest

from thinwire.launcher import function

CELL = """
FACTOR = 2
def helper(x):
    return x * FACTOR
def train(rows):
    return [helper(row) for row in range(rows)]
"""


def digest(text=CELL, args=(3,), name="<cell-1>"):
    namespace = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    return function._digest_of(namespace["train"], args)


def test_the_same_cell_evaluated_once_more_is_the_same_function():
    assert digest() == digest(name="<cell-7>") == digest("\n\n" + CELL)


@pytest.mark.parametrize(
    "other",
    [
        {"text": CELL.replace("range(rows)", "range(rows + 1)")},
        {"text": CELL.replace("x * FACTOR", "x + FACTOR")},
        {"text": CELL.replace("FACTOR = 2", "FACTOR = 3")},
        {"args": (4,)},
    ],
    ids=["itself", "what it calls", "a number that it uses", "its arguments"],
)
def test_another_function_is_another_script(other):
    assert digest() != digest(**other)


def test_the_digest_stands_in_the_script(tmp_path):
    first = pathlib.Path(function._write_call(tmp_path, digest, ()))
    before = first.read_text()
    function._write_call(tmp_path, test_another_function_is_another_script, ())
    assert first.read_text() != before and "call(pathlib" in before


def test_a_call_returns_nothing_that_an_earlier_one_has_left(tmp_path):
    function._write_call(tmp_path, digest, ())
    (tmp_path / "result.pkl").write_bytes(cloudpickle.dumps("of the first"))
    assert function._result(tmp_path) == "of the first"
    function._write_call(tmp_path, test_another_function_is_another_script, ())
    assert function._result(tmp_path) is None


def test_a_called_function_finds_the_modules_of_its_caller(tmp_path, monkeypatch):
    modules, called = tmp_path / "modules", tmp_path / "called"
    modules.mkdir()
    (modules / "only_the_caller_has.py").write_text("def leave(path):\n    path.touch()\n")
    with monkeypatch.context() as caller:
        caller.syspath_prepend(modules)
        leave = importlib.import_module("only_the_caller_has").leave
        function._write_call(tmp_path / "call", leave, (called,))
    monkeypatch.delitem(sys.modules, "only_the_caller_has")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(modules)])
    function.call(tmp_path / "call")
    assert called.exists() and sys.path[-1] == str(modules)

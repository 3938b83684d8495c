"""Scripts of users: what they are, three of them in every `make test`, all in `make product`."""

import ast
import sys

import pytest

from tests.forked import forker
from tests.scripts import quality

SCRIPTS = quality.scripts()
THEIRS = {"keras", "numpy", "tensorflow", "thinwire"} | set(sys.stdlib_module_names)
#: The only line a script may add besides the import, for `fit` or for a custom loop.
SECOND_LINES = (
    ["model = thinwire.distribute(model)"],
    ["optimizer = thinwire.distribute(optimizer, model=model)"],
)
NASTY = sorted(path.stem for path in (quality.FOLDER / "nasty").glob("*.py"))
#: Script that must fail -> its exit code, and a part of the user's output.
FAILS = {
    "raises": (1, "RuntimeError: the second worker's disk is full"),
    "returns_early": (1, "worker 2 returned early: its script ended after 1 calls of fit"),
    "never_distributes": (2, "ended without a call of thinwire.distribute()"),
    "never_fits": (2, "ended without an exchange"),
    "lambda_rate": (2, "script's optimizer themselves: --method=dgs"),
    "generator_data": (2, 'Give distribute() shard="off"'),
    "two_models": (2, "expected models that model.fit(...) trains one after the other"),
}
#: Short scripts and their quality alone, for each kind of step: merged on the PS, one by one there,
#: on the workers. The quality is measured over three seeds by `make product`.
SHORT = (
    ("mixed_float16", "dgs", 0.875),
    ("distillation", "asgd", 0.938),
    ("eager_loop", "bsp", 0.847),
)
GENEROUS = 0.05


def _modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_there_are_enough_of_them():
    assert len(SCRIPTS) >= 36


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=str)
def test_two_lines_are_all_that_names_thinwire(path):
    text = path.read_text()
    assert set(_modules(ast.parse(text))) <= THEIRS
    named = [line.strip() for line in text.splitlines() if "thinwire" in line]
    assert named[0] == "import thinwire"
    assert named[1:] in SECOND_LINES


@pytest.mark.processes
@pytest.mark.parametrize(("name", "method", "alone"), SHORT)
def test_a_short_one_distributed(name, method, alone):
    finished = quality.run(
        SCRIPTS[name], ["--seed=1"], method=method, flags=["--seed=1"], python=forker().python
    )
    assert finished.problems(2) == [], finished.output[-3000:]
    assert min(finished.values) >= alone - GENEROUS


@pytest.mark.product
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("method", quality.METHODS)
def test_quality(name, method, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "quality"
    results = quality.Results.read(folder / "results.json")
    for each in (quality.ALONE, method):
        for seed in (1, 2, 3):
            quality.measure(results, name, each, seed, workers=2)
    shown = quality.cell(results, name, method, (1, 2, 3))
    assert not shown.startswith("**"), shown


@pytest.mark.product
@pytest.mark.parametrize("name", NASTY)
def test_what_cannot_work_ends_with_words_that_help(name):
    code, text = FAILS[name]
    finished = quality.run(quality.nasty(name), method="bsp", timeout=110)
    assert (finished.code, finished.timed_out) == (code, False), finished.output[-3000:]
    assert (finished.processes, finished.files) == ((), ())
    assert text in finished.output
    assert finished.output.count("Traceback") == int(name == "raises")


# -- the harness itself -------------------------------------------------------------------------


def _finish(tmp_path, text, **settings):
    script = tmp_path / "script.py"
    script.write_text(text)
    return quality.run(script, **settings)


def test_results_are_read_behind_any_prefix(tmp_path):
    text = """print('worker 2 | {"metric": "r2", "value": 0.5}')"""
    finished = _finish(tmp_path, text)
    assert finished.problems(1) == []
    assert finished.values == [0.5]
    assert finished.problems(2) == ["1 results for 2 workers"]


def test_what_is_left_is_found(tmp_path):
    text = """
import os, subprocess, sys, tempfile
tempfile.mkdtemp(prefix="left-")
open("here", "w").close()
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
command = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.Popen(command, start_new_session=True, **quiet)
os._exit(3)
"""
    finished = _finish(tmp_path, text)
    assert finished.code == 3
    assert len(finished.processes) == 1
    assert "signal.pause" in finished.processes[0]
    assert len(finished.files) == 2


def test_a_script_without_end_is_killed(tmp_path):
    finished = _finish(tmp_path, "import signal; signal.pause()", timeout=1)
    assert finished.timed_out
    assert "did not end" in finished.problems(1)


def test_the_margin_is_a_point_or_two_standard_errors():
    assert quality.compare([0.9, 0.9], [0.891, 0.891]).is_as_good
    assert not quality.compare([0.9, 0.9], [0.889, 0.889]).is_as_good
    assert quality.compare([0.9, 0.9, 0.9], [0.95, 0.8, 0.85]).is_as_good  # 2 x 0.044
    assert not quality.compare([0.9, 0.9, 0.9], [0.80, 0.79, 0.81]).is_as_good


def test_the_table_shows_failures(tmp_path):
    results = quality.Results.read(tmp_path / "results.json")
    good = {"metric": "accuracy", "values": [0.9], "seconds": 1.0, "problems": []}
    for seed in (1, 2):
        results.add("callbacks", quality.ALONE, seed, good)
        results.add("callbacks", "bsp", seed, good | {"values": [0.7, 0.7]})
        results.add("callbacks", "asgd", seed, good | {"problems": ["exit code 1"]})
    again = quality.Results.read(results.path)
    lines = quality.table(again, ("asgd", "bsp", "dgs"), (1, 2)).splitlines()
    (row,) = [line for line in lines if "[callbacks]" in line]
    assert "| 0.900 | **fails**: exit code 1 | **0.700** (needs -0.010) | - |" in row

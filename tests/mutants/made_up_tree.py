"""A made-up tree with a package, its tests and a suite, for tests of the runners."""

import pathlib
import subprocess

from tests.mutants import sources

RULE = """
def may_proceed(lead, bound):
    while bound > 1000:  # no bound is that large
        pass
    return lead <= bound


def describe(lead):
    return "lead " + str(lead)


def sign(value):
    return value >= 0


def steps(rounds):
    return rounds + 1
"""
TESTS = {
    "ops/test_rule.py": """
import subprocess, sys
from thinwire.ops import rule
def test_bound():
    assert rule.may_proceed(2, 2)
def test_far():
    assert not rule.may_proceed(1001, 2)
def test_beyond():
    assert not rule.may_proceed(3, 2)
def test_child():
    code = "from thinwire.ops import rule; assert rule.describe(1) == 'lead 1', rule.__file__"
    subprocess.run([sys.executable, "-I", "-c", code], cwd="/", env={}, check=True)
""",
    "elsewhere/test_others.py": """
import pytest
from thinwire.ops import rule
def test_unsteady():
    assert rule.__file__ == "/elsewhere"
def test_sign():
    assert rule.sign(-1) is False
@pytest.fixture(scope="module")
def stepped():
    return rule.steps(1)
def test_first(stepped):
    assert stepped > 0
def test_second(stepped):
    assert stepped in (1, 2, 3)
""",
}
PYPROJECT = '[tool.pytest.ini_options]\nmarkers = ["product", "engines", "processes"]\n'
MAKEFILE = "test:\n\t.venv/bin/python -m pytest -q tests\n"
#: Modules that run in a copy; all other modules of the package run in the tool's process.
TOOL = (
    *("__init__.py", "outcomes.py", "fork_server.py", "lines_plugin.py"),
    *("drawn.py", "operators.py", "results.py", "sources.py", "tokens.py"),
)
LOADED = ("pytest", "hypothesis", "_hypothesis_pytestplugin", "pytest_timeout")
KILLER = "tests/ops/test_rule.py::test_bound"


def make(folder: pathlib.Path) -> pathlib.Path:
    """Write the tree, in which one test of the suite always fails, and return the tree."""
    files = {f"tests/{name}": text for name, text in TESTS.items()}
    tool = sources.ROOT / "tests" / "mutants"
    files |= {f"tests/mutants/{name}": (tool / name).read_text() for name in TOOL}
    files |= {"thinwire/__init__.py": "", "ops/__init__.py": "", "ops/rule.py": RULE}
    files |= {"tests/__init__.py": "", "pyproject.toml": PYPROJECT, "Makefile": MAKEFILE}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "thinwire" / "ops").symlink_to("../ops")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder

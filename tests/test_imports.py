"""Imports between modules: no cycles, and one identity for each module."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
#: The folders at the top that are linked into the package: not importable by these names.
BARE_NAMES = ("cluster", "data", "models", "ops", "proto", "ps", "supervisor", "worker")


def circles(imports):
    """Return the strongly connected components of more than one module, by Tarjan's algorithm.

    Args:
        imports: module -> the modules that it imports.
    """
    number, lowest, path, found = {}, {}, [], []

    def visit(module):
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(imports[module]):
            if other not in number:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            component = path[path.index(module) :]
            del path[path.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return found


def test_a_circle_is_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(imports) == [["b", "c"]]
    assert circles(imports | {"d": {"a"}}) == [["a", "b", "c", "d"]]


@pytest.fixture(scope="module")
def graph():
    # Imports inside functions and under TYPE_CHECKING count too.
    return grimp.build_graph("thinwire", exclude_type_checking_imports=False, cache_dir=None)


def test_no_module_imports_itself_by_way_of_others(graph):
    """Types and imports inside functions included: a circle is one thing in two files."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    left = circles(imports)
    assert not left, "\n".join(" <-> ".join(circle) for circle in left)


def test_every_package_is_in_the_graph(graph):
    assert {f"thinwire.{name}" for name in ("ops", "ps", "worker", "proto", "data")} <= (
        graph.modules
    )


def test_the_program_has_one_identity():
    """A module imported by two names would be two: two ConfigurationErrors, two registries."""
    code = (
        "import sys, thinwire.cli.commands\n"
        "doubles = sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:]))\n"
        "assert not doubles, doubles\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *BARE_NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", BARE_NAMES)
def test_the_linter_bans_the_bare_names(name):
    settings = (ROOT / "pyproject.toml").read_text()
    assert '"TID251"' in settings and f'"{name}".msg' in settings


def test_the_package_has_its_names_and_no_others():
    import thinwire

    assert {"Staleness", "Traffic", "Version"} <= set(vars(thinwire.callbacks))
    assert callable(thinwire.worker_id)
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'absent'"):
        _ = thinwire.absent

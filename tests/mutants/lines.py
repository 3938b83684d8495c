"""The map of lines to tests: the in-process tests that execute a line, and their times.

It is made once, by running the in-process tests under coverage.py, and is kept in runs/mutants.
Where a file has changed since, its lines are unknown, and all changed test files are tried.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import coverage

from tests.mutants import drawn, lines_plugin, results, sources
from tests.mutants.calls import Calls

FOLDER = results.FOLDER / "map"
IN_PROCESS = "not processes and not product and not engines"
#: Tracing makes the tests two to three times slower than `make test`; other work may run meanwhile.
_LIMIT_SECONDS = 4 * 3600.0
_TESTS = "tests.json"
#: Exit codes of pytest after it has run all tests, with or without failures.
_ENDED = (0, 1)
#: They are never tried on a mutant: see calls.py.
OWN_TESTS = "tests/mutants/"


class NoMap(RuntimeError):
    """The tests could not be run to make a map."""


class Lines:
    """A map that was made before."""

    def __init__(self, folder: pathlib.Path = FOLDER, root: pathlib.Path = sources.ROOT) -> None:
        self._data = coverage.CoverageData(str(folder / lines_plugin.FILE))
        self._data.read()
        document = json.loads((folder / _TESTS).read_text())
        now, then = _digests(root), document["digests"]
        self._changed = {name for name in now | then if now.get(name) != then.get(name)}
        #: Seconds of each test, without tests that failed under coverage.py and without tests of
        #: changed files.
        self.seconds: dict[str, float] = {}
        self._of_file: dict[str, list[str]] = {}
        for test, seconds in document["seconds"].items():
            file = test.partition("::")[0]
            if file not in self._changed and not file.startswith(OWN_TESTS):
                self.seconds[test] = seconds
                self._of_file.setdefault(file, []).append(test)
        self._by_line: dict[str, dict[int, list[str]]] = {}

    @property
    def changed_tests(self) -> list[str]:
        """The test files that are new, or have changed since the map was made."""
        return sorted(
            name
            for name in self._changed
            if pathlib.Path(name).name.startswith("test_") and not name.startswith(OWN_TESTS)
        )

    def tests_at(self, path: pathlib.Path, numbers: range) -> set[str]:
        """Return the tests that execute one of the lines of a file; none if it has changed."""
        name = str(path)
        if name in self._changed:
            return set()
        if name not in self._by_line:
            self._by_line = {name: self._data.contexts_by_lineno(name)}  # mutants come by file
        contexts = {
            context for number in numbers for context in self._by_line[name].get(number, ())
        }
        tests = {test for context in contexts for test in self._of_file.get(context, ())}
        return tests | (contexts & self.seconds.keys())


def make(calls: Calls, processes: int, folder: pathlib.Path = FOLDER) -> None:
    """Run the in-process tests in a copy, and write the map.

    Raises:
        NoMap: The tests did not run to their end.
    """
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    digests = _digests(calls.copy.folder)
    outcome = calls.command(
        *(str(calls.copy.python), "-m", "pytest", "-q", "-m", IN_PROCESS),
        *("-n", str(processes), "--dist", "loadfile"),
        *("-p", "tests.mutants.lines_plugin"),
        environment={lines_plugin.FOLDER_VARIABLE: str(made)},
        limit_seconds=_LIMIT_SECONDS,
    )
    if outcome.stopped or not outcome.endings or outcome.code not in _ENDED:
        raise NoMap(f"no map of lines: {outcome.killer}\n{outcome.output[-3000:]}")
    whole = coverage.Coverage(data_file=str(made / lines_plugin.FILE), config_file=False)
    whole.combine([str(made)], strict=True)
    whole.save()
    seconds = {end.test: end.seconds for end in outcome.endings if end.outcome == "passed"}
    for test in outcome.failed:
        seconds.pop(test, None)
    document = {"seconds": seconds, "failed": outcome.failed, "digests": digests}
    (made / _TESTS).write_text(json.dumps(document, indent=0))
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def _digests(root: pathlib.Path) -> dict[str, str]:
    """Return the digest of every file of the product and of the tests."""
    tests = (path.relative_to(root) for path in (root / "tests").rglob("*.py"))
    return {
        str(path): results.digest_of_files([root / path]) for path in (*drawn.files(root), *tests)
    }

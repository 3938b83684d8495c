"""A pytest plugin that writes each test's outcome to the file named by FILE_VARIABLE.

    pytest -p tests.mutants.outcomes

Each line is a JSON object. The last one has the place from which the package was imported, so that
the reader can check that the tests ran on the mutated code.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

FILE_VARIABLE = "THINWIRE_MUTANT_OUTCOMES"


class Outcomes:
    """Writes a line for each failure when it happens, and for each test when it has ended."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (the process ends with it)
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    def _write(self, **entry: object) -> None:
        self._file.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=report.nodeid, outcome="uncollected", seconds=0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed or (report.skipped and self._outcomes.get(name) != "failed"):
            self._outcomes[name] = report.outcome
        if report.failed:
            self._write(id=name, outcome="failed", seconds=self._seconds[name])
        if report.when == "teardown":
            outcome = self._outcomes.pop(name, "passed")
            self._write(id=name, outcome=outcome, seconds=self._seconds.pop(name))

    def pytest_sessionfinish(self) -> None:
        package = sys.modules.get("thinwire")
        if package is not None:
            self._write(package=package.__file__)


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes in this process only, not in workers of pytest-xdist or nested pytest runs."""
    path = os.environ.pop(FILE_VARIABLE, None)
    if path is not None:
        config.pluginmanager.register(Outcomes(path), "mutant_outcomes")

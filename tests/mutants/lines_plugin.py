"""A pytest plugin that records which test executes which line of the product.

    THINWIRE_MUTANT_LINES=FOLDER pytest -p tests.mutants.lines_plugin

Each process writes a file of coverage.py to the folder, with a context for each test: its id. What
a fixture executes for several tests of a file has the path of the file as its context.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import coverage
import pytest

from tests.mutants.drawn import FOLDERS

FOLDER_VARIABLE = "THINWIRE_MUTANT_LINES"
FILE = "lines"


class _Recorder:
    def __init__(self, folder: str) -> None:
        self._coverage = coverage.Coverage(
            data_file=os.path.join(folder, FILE),
            data_suffix=True,
            config_file=False,
            include=[f"{folder}/*" for folder in FOLDERS],
        )
        self._coverage.set_option("run:relative_files", True)
        self._coverage.start()
        self._context = ""

    def _switch(self, context: str) -> str:
        """Set the context; return the previous context."""
        former, self._context = self._context, context
        self._coverage.switch_context(context)
        return former

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        former = self._switch(self._context.partition("::")[0])
        try:
            return (yield)
        finally:
            self._switch(former)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Have the recorder, which runs already, follow the tests."""
    if _RECORDER is not None:
        config.pluginmanager.register(_RECORDER, "mutant_lines")


# Modules are executed when the tests are collected: recording begins before that.
_RECORDER = _Recorder(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None

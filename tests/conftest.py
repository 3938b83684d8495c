"""Settings of every test: quiet TensorFlow, no GPU, repeatable hypothesis examples."""

import gc
import hashlib
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# A worker in a thread blocks a TensorFlow thread in a step while it waits for a PS in this process.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")

# Shells start what runs in the background deaf to Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # below, for TensorFlow reads the environment at import
from hypothesis import settings

from tests import schedule
from tests.forked import collect_rarely, share_forker
from tests.iterators import leave_untuned
from tests.waiting import patience

#: Mark -> the fixture that brings it.
_BROUGHT_BY = {"processes": "nodes", "engines": "s3"}

settings.register_profile("repository", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repository")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``--part=DIGEST`` choose a tenth of the tests, another for each commit."""
    parser.addoption("--part", default="", help="digest that chooses a tenth of the tests")


def _is_in_part(item: pytest.Item, digest: str) -> bool:
    """Return whether a test is in the tenth that a digest chooses."""
    name = f"{digest} {item.nodeid}".encode()
    return hashlib.sha256(name).digest()[0] < 256 / 10


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files without a requested test; importing all files takes 10 s."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in _BROUGHT_BY or collection_path.suffix != ".py":
        return None
    has_mark = re.compile(rf"mark\.{mark}|\b{_BROUGHT_BY[mark]}\b")
    return None if has_mark.search(collection_path.read_text()) else True


@pytest.hookimpl(tryfirst=True)  # before -m chooses by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts nodes or a storage, choose a part, and scale the time of each test."""
    if digest := config.option.part:
        others = [item for item in items if not _is_in_part(item, digest)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_in_part(item, digest)]
    usual = float(config.getini("timeout") or 0)
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = patience(mark.args[0] if mark is not None and mark.args else usual)
        if mark is None or mark.args:
            item.add_marker(pytest.mark.timeout(seconds), append=False)
        for mark, fixture in _BROUGHT_BY.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)  # before xdist reports them
def pytest_collection_finish(session: pytest.Session) -> None:
    """Order the tests for xdist's workers; collect garbage rarely; let iterators end at once."""
    if hasattr(session.config, "workerinput"):
        session.items[:] = schedule.interleave(session.items)
    if "tensorflow" in sys.modules:
        leave_untuned()
    collect_rarely()


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let workers of xdist be forks of one process that has TensorFlow."""
    if config.getoption("tx", None) and not config.option.collectonly:
        python = share_forker()
        config.option.tx = [f"popen//python={python}" for _ in config.option.tx]


@pytest.hookimpl(optionalhook=True)  # pytest may run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let ``--dist loadfile`` distribute tests that start nodes one by one."""
    return schedule.Interleaved(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Any:
    """Collect the garbage of a test that made much, before another test runs."""
    result = yield
    if gc.get_count()[0] > 10_000:
        gc.collect(1)
    return result


@pytest.fixture(autouse=True)
def loudness():
    """Undo a test command line's change of absl's log level, which other tests depend on."""
    absl, root = logging.getLogger("absl"), logging.root.manager
    before = absl.level, root.disable
    yield
    absl.setLevel(before[0])
    root.disable = before[1]


@pytest.fixture(autouse=True)
def handlers():
    """Handle signals after a test as before it: a role that ran in this process has its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def nodes(tmp_path):
    """Return what starts real processes of one run in `tmp_path`, and reaps them."""
    from tests.nodes import Nodes

    started = Nodes(tmp_path)
    yield started
    started.reap()

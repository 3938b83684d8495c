"""What holds for every test: quiet TensorFlow, no GPU, repeatable random examples."""

import logging
import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# Workers in threads wait within TensorFlow's steps, one of its threads each, for a PS beside them.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")

# Shells start what runs in the background deaf to Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # below, for TensorFlow reads the environment at import
from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repository")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts nodes, so that no test of them is forgotten."""
    for item in items:
        if "nodes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True)
def loudness():
    """Undo what a test's command line does to absl's log level, which others read the log at."""
    absl, root = logging.getLogger("absl"), logging.root.manager
    before = absl.level, root.disable
    yield
    absl.setLevel(before[0])
    root.disable = before[1]


@pytest.fixture
def nodes(tmp_path):
    """Return what starts real processes of one run in `tmp_path`, and reaps them."""
    from tests.nodes import Nodes

    started = Nodes(tmp_path)
    yield started
    started.reap()

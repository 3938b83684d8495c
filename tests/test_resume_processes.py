"""The same command resumes a run bit for bit: real processes, Ctrl-C during training."""

import signal

import numpy as np
import pytest

from tests.nodes import Nodes
from thinwire.runtime.persistence.checkpoint import Checkpoints

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

UPDATES = 160
#: One worker, a codec that draws random numbers, no checkpoint except at an end.
FLAGS = (
    *("--method=adacomp", "--codec=random_k", "--compression_rate=0.05", "--value_dtype=int8"),
    *(f"--iter_max={UPDATES}", "--lr_schedule=0.5:0.2", "--checkpoint_interval_seconds=600"),
)
NAMES = ("ps", "worker-1")


@pytest.fixture
def runs(tmp_path):
    """An uninterrupted run and one to interrupt; two processes each."""
    started = []
    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
        started.append(Nodes(tmp_path / name))
    yield started
    for nodes in started:
        nodes.reap()


def final_model(nodes):
    step, state = Checkpoints.in_folder(nodes.run_dir / "checkpoints" / "ps-0").load_latest()
    assert step == UPDATES, nodes.output("ps")[-2000:]
    return state["core"]["model"]


def test_an_interrupted_run_ends_at_the_bits_of_one_that_was_not(runs):
    whole, interrupted = runs
    whole.cluster(1, *FLAGS)
    interrupted.cluster(1, *FLAGS, "--slowdown=4")  # so that it is not over before it is seen
    interrupted.watch(lambda status: status.version >= UPDATES // 8)
    for name in NAMES:
        interrupted.kill(name, signal.SIGINT)
    assert [interrupted.wait(name) for name in NAMES] == [130, 130]
    assert UPDATES // 8 <= interrupted.summary()["updates"] < UPDATES
    interrupted.cluster(1, "--slowdown=1")
    for nodes in runs:
        assert [nodes.wait(name) for name in NAMES] == [0, 0], nodes.output("ps")

    expected, resumed = (final_model(nodes) for nodes in runs)
    np.testing.assert_array_equal(resumed["theta"], expected["theta"])
    assert resumed["samples"] == expected["samples"] == 10 * UPDATES

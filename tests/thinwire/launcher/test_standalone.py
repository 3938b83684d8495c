"""Training on one device alone: the end of a run, a resumed run, a diverging loss."""

import json

import keras
import numpy as np
import pytest

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.launcher import standalone
from thinwire.runtime.run.settings import Diverged

SMALL = (
    "--type_node=Standalone",
    "--network=mlp",
    "--dataset=synthetic",
    "--image_size=4",
    "--batch_size=10",
    "--eval_interval_seconds=1000",
    "--server_optimizer=momentum",
    "--quiet",
)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Leave TensorFlow its threads: it takes their number once, and has run in this process."""
    monkeypatch.setattr(standalone, "limit_threads", lambda number: None)


def trained(folder, *flags):
    """Run and return the newest checkpoint's weights and slots, and the summary."""
    with given(*SMALL, f"--run_dir={folder}", *flags):
        run = read_run()
        assert standalone.main(run) == 0
        directory = standalone.checkpoints_of(run.run_dir, standalone._NAME)
    _, state = standalone.Checkpoints.in_folder(directory, keep=1).load_latest()
    return state["trainer"], json.loads((folder / "summary.json").read_text())


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path):
    expected, summary = trained(tmp_path / "whole", "--iter_max=4")
    assert (summary["updates"], summary["stop_reason"]) == (4, "iter_max")
    trained(tmp_path / "parts", "--iter_max=2")
    found, summary = trained(tmp_path / "parts", "--iter_max=4", "--resume")
    assert summary["updates"] == 4
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(Diverged, match=r"at step \d+: the model has diverged"):
        trained(tmp_path, "--iter_max=200", "--learning_rate=1e20")

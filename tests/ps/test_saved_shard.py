"""What a shard finds of itself when it starts again, and whose it must be."""

import numpy as np
import pytest

from cluster.flags import read_run
from ops.routing import books
from ops.types import ConfigurationError, ModelSpec, TensorSpec
from ps.datagram_accounts import Received
from ps.saved_shard import SavedShard
from tests.command_line import given
from tests.harness import SPEC

RECEIVED = Received({2: books.empty(3)}, {"unknown session": 4})


def shard(folder, *flags, spec=SPEC):
    with given("--nb_workers=2", f"--run_dir={folder}", *flags):
        run = read_run()
    return SavedShard(run, "ps-0", spec)


def save(folder, stop_reason=None, *flags):
    saved = shard(folder, *flags)
    saved.open()
    core = {"theta": np.arange(3, dtype=np.float32), "stop_reason": stop_reason}
    saved.put(7, core, "abc", {1: 10, 2: 20}, {(1, 2): "{}"}, RECEIVED)
    saved.flush()


def test_a_new_run_finds_nothing(tmp_path):
    saved = shard(tmp_path)
    assert saved.core is None and saved.finished is None
    assert saved.run_id == "" and saved.reports == {} and saved.bytes_down == {}
    assert saved.datagrams == Received()


def test_everything_comes_back(tmp_path):
    save(tmp_path)
    saved = shard(tmp_path)
    np.testing.assert_array_equal(saved.core["theta"], np.arange(3, dtype=np.float32))
    assert saved.run_id == "abc" and saved.finished is None
    assert saved.bytes_down == {1: 10, 2: 20} and saved.reports == {(1, 2): "{}"}
    assert saved.datagrams == RECEIVED


def test_a_raised_limit_makes_a_finished_run_go_on(tmp_path):
    save(tmp_path, "iter_max", "--iter_max=5")
    assert shard(tmp_path, "--iter_max=5").finished == "iter_max"
    assert shard(tmp_path, "--iter_max=6").finished is None


@pytest.mark.parametrize(
    ("flags", "spec"),
    [(("--seed=9",), SPEC), ((), ModelSpec((TensorSpec("upper", (9, 9)),)))],
    ids=["settings", "model"],
)
def test_another_run_is_refused(tmp_path, flags, spec):
    save(tmp_path)
    with pytest.raises(ConfigurationError, match="holds another run.*seed|upper"):
        shard(tmp_path, *flags, spec=spec)

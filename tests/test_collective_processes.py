"""Real processes of a collective run, in which workers sum their updates among themselves."""

import signal

import numpy as np
import pytest

from tests.nodes import Nodes
from tests.test_life_and_death_processes import all_at_work
from thinwire.runtime.persistence.checkpoint import Checkpoints

pytestmark = pytest.mark.timeout(240)


def final_model(folder, collective):
    """Run three workers for 20 rounds; return the PS's last snapshot."""
    folder.mkdir()
    nodes = Nodes(folder)
    try:
        nodes.cluster(
            3,
            "--method=bsp",
            "--iter_max=20",
            "--server_optimizer=momentum",
            f"--collective={collective}",
        )
        assert [nodes.wait(name, 100) for name in nodes.processes] == [0] * 4
    finally:
        nodes.reap()
    found = Checkpoints.in_folder(nodes.run_dir / "checkpoints" / "ps-0", keep=3).load_latest()
    return found[1]["core"]["model"]


@pytest.mark.product
def test_bsp_by_a_ring_is_bsp_by_the_ps(tmp_path):
    by_ps, by_ring = (final_model(tmp_path / name, name) for name in ("ps", "ring"))
    assert (by_ps["version"], by_ps["samples"]) == (by_ring["version"], by_ring["samples"])
    np.testing.assert_allclose(by_ring["theta"], by_ps["theta"], rtol=0, atol=1e-6)


@pytest.mark.product
def test_a_ring_closes_around_a_killed_worker(nodes):
    nodes.cluster(
        3, "--method=bsp", "--collective=ring", "--collective_sync_every=5", "--iter_max=400"
    )
    nodes.watch(all_at_work)
    nodes.kill("worker-1")
    assert [nodes.wait(name) for name in ("worker-2", "worker-3", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert (summary["updates"], summary["membership"]["left"]) == (400, 1)
    assert nodes.processes["worker-1"].returncode == -signal.SIGKILL
    assert summary["workers"][1]["bytes_up"] > 100 * 4 * 61_706  # the ring's, not reports alone

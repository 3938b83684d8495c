"""Real processes whose workers sum among themselves."""

import signal

import numpy as np
import pytest

from ops.checkpoint import Checkpoints
from tests.test_life_and_death import all_at_work

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]


def final_model(run_dir):
    found = Checkpoints(run_dir / "checkpoints" / "ps-0", keep=3).load_latest()
    return found[1]["core"]["model"]


def test_bsp_by_a_ring_is_bsp_by_the_ps(nodes):
    flags = ("--type_node=Cluster", "--method=bsp", "--nb_workers=3", "--iter_max=20",
             "--server_optimizer=momentum", "--port=0")  # fmt: skip
    models = {}
    for collective in ("ps", "ring"):
        folder = nodes.folder / collective
        nodes.start(collective, *flags, f"--run_dir={folder}", f"--collective={collective}")
        assert nodes.wait(collective, 100) == 0, nodes.output(collective)[-3000:]
        models[collective] = final_model(folder)
    by_ps, by_ring = models["ps"], models["ring"]
    assert (by_ps["version"], by_ps["samples"]) == (by_ring["version"], by_ring["samples"])
    np.testing.assert_allclose(by_ring["theta"], by_ps["theta"], rtol=0, atol=1e-6)


def test_a_ring_closes_around_a_killed_worker(nodes):
    nodes.cluster(3, "--method=bsp", "--collective=ring", "--collective_sync_every=5",
                  "--iter_max=400")  # fmt: skip
    nodes.watch(all_at_work)
    nodes.kill("worker-1")
    assert [nodes.wait(name) for name in ("worker-2", "worker-3", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert (summary["updates"], summary["membership"]["left"]) == (400, 1)
    assert nodes.processes["worker-1"].returncode == -signal.SIGKILL
    assert summary["workers"][1]["bytes_up"] > 100 * 4 * 61_706  # the ring's, not reports alone

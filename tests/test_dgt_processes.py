"""DGT with real processes: UDP on loopback, two shards, lossy emulated links, kill -9."""

import pytest

from tests.nodes import free_port

pytestmark = pytest.mark.timeout(150)


def both_push(status):
    return all(worker.pushes >= 20 for worker in status.workers) and len(status.workers) == 2


@pytest.mark.product
def test_a_worker_and_a_shard_are_killed_and_come_back(nodes):
    nodes.nb_ps, other = 2, free_port()
    hosts = f"127.0.0.1:{nodes.port},127.0.0.1:{other}"
    nodes.common = (
        *nodes.common,
        "--nb_workers=2",
        "--nb_ps=2",
        f"--ps_hosts={hosts}",
        "--method=dgt",
        "--iter_max=1000000",
        "--dgt_k=0.3",
        "--dgt_block_size=1024",
        "--dgt_wait_ms=20",
        "--link_mbps=200",
        "--link_loss=0.02",
        "--link_reorder=0.05",
        "--link_duplicate=0.05",
        "--checkpoint_interval_seconds=0.7",
    )
    for shard in (0, 1):
        nodes.start(f"ps-{shard}", "--type_node=PS", f"--id_ps={shard}", "--linger_seconds=4")
    for worker in (1, 2):
        nodes.worker(worker)
    nodes.watch(both_push)
    nodes.kill("worker-2")
    nodes.watch(lambda status: status.membership.left >= 1)
    nodes.worker(2)
    nodes.watch(lambda status: status.membership.returned >= 1)
    nodes.kill("ps-1")
    nodes.start("ps-1", "--type_node=PS", "--id_ps=1", "--linger_seconds=4")
    pushes = {}
    nodes.watch(lambda status: pushes.update({w.id: w.pushes for w in status.workers}) or True)
    nodes.watch(
        lambda status: all(worker.pushes > pushes[worker.id] + 10 for worker in status.workers),
        halt="max_seconds",
    )
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "ps-0", "ps-1")] == [0] * 4
    summary = nodes.summary()
    assert summary["stop_reason"] == "max_seconds"
    membership = summary["membership"]  # on a busy machine others miss a lease, and return
    assert membership["left"] == membership["returned"] >= 1
    assert summary["dgt"]["arrived"] > 0
    # Updates undone by the shard's end, and the killed worker's push to an open round.
    assert set(summary["rejected_pushes"]) <= {"generation", "left"}
    assert "UDP ports" in nodes.output("ps-1")

"""Real nodes that receive an end signal finish their work, leave, and can be resumed later."""

import os
import pathlib
import re
import signal
import urllib.request

import pytest

from tests.nodes import free_port
from thinwire.proto.grpc import health

pytestmark = pytest.mark.timeout(150)


def all_push(status, count):
    """Whether every worker has pushed so often."""
    return [w.pushes >= count for w in status.workers] == [True] * status.nb_workers


def test_a_worker_and_then_the_ps_are_told_to_end(nodes):
    # With this long lease, a barrier opens only because the worker announces that it leaves.
    nodes.common = (*nodes.common, "--lease_seconds=120")
    nodes.cluster(2, "--method=bsp", "--iter_max=1000000")
    versions = []
    nodes.watch(lambda status: versions.append(status.version) or all_push(status, 5))
    assert health.probe(f"127.0.0.1:{nodes.port}", 10.0) == "SERVING"
    nodes.kill("worker-2", signal.SIGTERM)
    assert nodes.wait("worker-2", 30) == 130
    beyond = max(versions) + 40
    nodes.watch(lambda status: status.version >= beyond and status.workers[1].state == "left")
    nodes.worker(2)
    nodes.watch(lambda status: status.workers[1].state != "left")
    nodes.kill("ps", signal.SIGTERM)
    assert [nodes.wait(name) for name in ("ps", "worker-1", "worker-2")] == [130] * 3
    assert "resumed the run at step" in nodes.output("worker-2")
    summary = nodes.summary()
    assert summary["stop_reason"] == "interrupted"
    assert summary["membership"]["left"] == 0  # no lease expired
    assert summary["rejected_pushes"] == {}


@pytest.mark.product
def test_a_cluster_starts_a_killed_worker_again_and_tells_its_figures(nodes):
    metrics_port = free_port()
    nodes.start(
        "cluster",
        "--type_node=Cluster",
        "--method=adacomp",
        "--nb_workers=2",
        "--iter_max=1000000",
        "--restart_workers=2",
        f"--metrics_port={metrics_port}",
    )
    nodes.watch(lambda status: all_push(status, 20))
    for number, name in enumerate(("thinwire_updates_total", "thinwire_steps_total")):
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port + number}") as told:
            assert re.search(rf"(?m)^{name} [1-9]", told.read().decode())
    kill_worker(nodes, 2)
    nodes.watch(lambda status: status.membership.returned >= 1)
    told = []
    nodes.watch(
        lambda status: told.append(status.workers[1].pushes) or told[-1] > told[0] + 20,
        halt="max_seconds",
    )
    assert nodes.wait("cluster", 90) == 0, nodes.output("cluster")
    assert nodes.summary()["restarted_workers"] == {"2": 1}
    assert "died (code -9); starting it again" in nodes.output("cluster")


def kill_worker(nodes, number):
    """Kill a worker of a Cluster."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        mine = f"--run_dir={nodes.run_dir}".encode() in words
        mine = mine and not words[2].endswith(b"watchdog.py")
        if mine and f"--id_worker={number}".encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"worker {number} does not run")

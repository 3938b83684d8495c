"""Real processes on loopback start in any order, die, return, and end with the right code."""

import signal

import pytest

from tests.nodes import free_port
from thinwire.runtime.run.directory import rounds_of
from thinwire.supervisor.metrics_log import read_rounds

pytestmark = pytest.mark.timeout(150)
#: Cases that in-process tests cover as well; `make product` runs these cases with real processes.
LONG = pytest.mark.product


@pytest.mark.product
def test_three_roles_by_hand_in_any_order(nodes):
    nodes.common = (*nodes.common, "--nb_workers=2", "--method=asgd", "--iter_max=300")
    nodes.supervisor()
    nodes.worker(2)
    nodes.start("ps", "--type_node=PS")
    nodes.worker(1)
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "supervisor", "ps")] == [0] * 4
    summary = nodes.summary()
    assert summary["updates"] == 300
    assert summary["stop_reason"] == "iter_max"
    assert summary["test_accuracy"] is not None
    assert sum(worker["pushes"] for worker in summary["workers"]) == 300
    assert (nodes.run_dir / "best.keras").exists()
    assert (nodes.run_dir / "report" / "index.html").exists()


def all_at_work(status):
    """Every worker's updates are in the model."""
    return [worker.pushes >= 5 for worker in status.workers] == [True] * status.nb_workers


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("bsp", ["--method=bsp", "--iter_max=250"]),
        pytest.param("asp", ["--method=adacomp", "--iter_max=2500"], marks=LONG),
        pytest.param("ssp", ["--method=ssp", "--staleness_bound=2", "--iter_max=2500"], marks=LONG),
        pytest.param("gsp", ["--method=gsp", "--groups=1,2|3", "--iter_max=1500"], marks=LONG),
        pytest.param("esync", ["--method=esync", "--slowdown=1,1,4", "--iter_max=250"], marks=LONG),
    ],
)
def test_a_killed_worker_leaves_and_the_others_finish(nodes, mode, flags):
    nodes.cluster(3, *flags)
    nodes.watch(all_at_work)
    nodes.kill("worker-2")
    assert nodes.wait("worker-1") == 0
    assert nodes.wait("worker-3") == 0
    assert nodes.wait("ps") == 0
    summary = nodes.summary()
    assert summary["updates"] == int(flags[-1].partition("=")[2])
    membership = summary["membership"]  # on a busy machine others miss a lease, and return
    assert membership["left"] - membership["returned"] == 1
    assert nodes.processes["worker-2"].returncode == -signal.SIGKILL


@pytest.mark.product
def test_a_worker_comes_back_and_goes_on(nodes):
    nodes.cluster(2, "--method=bsp", "--iter_max=1000000")
    nodes.watch(all_at_work)
    nodes.kill("worker-2")
    nodes.watch(lambda status: status.membership.left >= 1)
    pushes = {}
    nodes.watch(lambda status: pushes.update({w.id: w.pushes for w in status.workers}) or True)
    nodes.worker(2)
    nodes.watch(lambda status: status.workers[1].pushes > pushes[2] + 5, halt="max_seconds")
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    membership = nodes.summary()["membership"]  # on a busy machine others miss a lease, and return
    assert membership["left"] == membership["returned"] >= 1
    assert nodes.summary()["stop_reason"] == "max_seconds"


@pytest.mark.product
def test_the_supervisor_may_die_and_return(nodes):
    nodes.cluster(2, "--method=adacomp", "--iter_max=1200", supervisor=True)
    nodes.watch(lambda status: status.version >= 100)
    nodes.kill("supervisor")
    nodes.supervisor()
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "ps", "supervisor")] == [0] * 4
    assert nodes.summary()["updates"] == 1200
    for worker in nodes.summary()["workers"]:  # no round is missing and no round is double
        rounds = read_rounds(rounds_of(nodes.run_dir, worker["id"]))
        numbers = [each.num_iters for each in rounds]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) - worker["pushes"] in (0, 1)  # the last one may come after the end


@pytest.mark.product
@pytest.mark.parametrize(
    "method", ["adacomp", pytest.param("bsp", marks=LONG), pytest.param("esync", marks=LONG)]
)
def test_a_killed_ps_goes_on_from_its_last_snapshot(nodes, method):
    nodes.common = (*nodes.common, "--journal=off")
    nodes.cluster(2, f"--method={method}", "--iter_max=900", "--checkpoint_interval_seconds=0.7")
    nodes.watch(lambda status: status.version >= 200 and all_at_work(status))
    nodes.kill("ps")
    nodes.start("ps", "--type_node=PS", "--linger_seconds=4")
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert summary["updates"] == 900
    assert 0 < summary["membership"]["lost_updates"] < 900
    applied = sum(worker["pushes"] for worker in summary["workers"])
    assert applied == (900 if method == "adacomp" else 1800)  # a push per worker and round


@pytest.mark.product
def test_a_shard_that_is_back_at_another_address_is_found_by_all(nodes, tmp_path):
    at = ("--checkpoint_interval_seconds=0.5", f"--checkpoint_dir={tmp_path / 'kept'}")
    nodes.cluster(2, "--method=bsp", "--iter_max=600", *at, nb_ps=2, supervisor=True)
    nodes.watch(lambda status: status.version >= 50 and all_at_work(status))
    nodes.kill("ps-1")
    nodes.run_dir = tmp_path / "another machine"
    hosts = f"--ps_hosts=127.0.0.1:{nodes.port},127.0.0.1:{free_port()}"
    nodes.start("ps-1", "--type_node=PS", "--id_ps=1", hosts)
    nodes.run_dir = tmp_path / "run"
    names = ("worker-1", "worker-2", "ps", "ps-1", "supervisor")
    assert [nodes.wait(name) for name in names] == [0] * 5, nodes.output("supervisor")
    assert nodes.summary()["updates"] == 600


@pytest.mark.product  # ordinary tests cover `thinwire run`
def test_ctrl_c_ends_a_cluster_cleanly_and_the_same_command_resumes(nodes):
    flags = ("--type_node=Cluster", "--method=adacomp", "--nb_workers=1", "--iter_max=700")
    nodes.start("cluster", *flags)
    nodes.watch(lambda status: status.version >= 100 and all_at_work(status))
    nodes.kill("cluster", signal.SIGINT)
    assert nodes.wait("cluster") == 130
    interrupted = nodes.summary()
    assert interrupted["stop_reason"] == "interrupted"
    assert 100 <= interrupted["updates"] < 700
    nodes.start("cluster", *flags)
    assert nodes.wait("cluster") == 0
    assert nodes.summary()["updates"] == 700
    nodes.start("again", *flags)
    assert nodes.wait("again", 10) == 0
    assert "finished" in nodes.output("again")


@pytest.mark.product
def test_two_shards_serve_one_run(nodes):
    nodes.cluster(2, "--method=adacomp", "--iter_max=400", nb_ps=2, supervisor=True)
    assert [nodes.wait(name) for name in nodes.processes] == [0] * 5
    summary = nodes.summary()
    assert summary["updates"] == 400
    assert summary["nb_ps"] == 2
    assert summary["test_accuracy"] is not None


@LONG
def test_emulated_links_and_devices(nodes):
    """A slow device pushes less; a slow link carries exactly its configured rate."""
    nodes.cluster(2, "--method=asgd", "--iter_max=120", "--link_mbps=40,20", "--slowdown=1,8")
    assert [nodes.wait(name) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    first, second = nodes.summary()["workers"]
    assert second["pushes"] < first["pushes"]
    for worker, mbps in ((first, 40), (second, 20)):
        rate = 8e-6 * worker["bytes_up"] / worker["send_seconds"]
        assert 0.7 * mbps < rate < 1.05 * mbps  # a busy machine only makes it slower

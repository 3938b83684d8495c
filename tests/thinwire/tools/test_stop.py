"""`thinwire stop`: ends a run by its launcher or by shard 0, waits, and can be repeated."""

import contextlib
import signal
import subprocess
import sys

import pytest

from tests.chaos.process_cast import wait_until
from tests.nodes import free_ports
from tests.supervisor.samples import write_run
from tests.thinwire.tools.test_status import living, report, server
from tests.threads.offered import offered_run
from thinwire.tools import health, stop

#: A process that holds a launcher's lock until it is interrupted, as a Cluster does.
LAUNCHER = """
import pathlib, signal, sys
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner
lock_of(pathlib.Path(sys.argv[1]), "Cluster", 0).take(LockOwner.here("Cluster", 0))
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextlib.contextmanager
def launcher(folder):
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_launcher_is_interrupted_and_awaited(tmp_path, capsys):
    with launcher(tmp_path) as process:
        assert stop.main([str(tmp_path)]) == 0
        assert process.wait(10) == 130
    out = capsys.readouterr().out
    assert "interrupted Cluster 0, pid" in out and "has ended" in out


def test_one_that_does_not_end_in_time_is_named(tmp_path, capsys):
    with launcher(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        assert stop.main([str(tmp_path), "--seconds=0.3"]) == 3
        assert f"pid {process.pid}" in capsys.readouterr().err
        process.send_signal(signal.SIGCONT)


def test_without_a_launcher_shard_0_ends_the_run(tmp_path, capsys):
    with server(tmp_path) as handle:
        assert stop.main([str(tmp_path)]) == 0
        assert handle.join(timeout_seconds=10) == "interrupted"
    assert "ends the run (interrupted)" in capsys.readouterr().out


def test_an_address_is_enough(tmp_path, capsys):
    with server(tmp_path) as handle:
        assert stop.main([handle.address]) == 0
        assert handle.join(timeout_seconds=10) == "interrupted"
    assert "the run has ended (interrupted)" in capsys.readouterr().out


def test_it_may_be_repeated(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert stop.main([str(folder)]) == 0
    assert "no process of this run" in capsys.readouterr().out


def test_what_is_no_run_or_does_not_answer_is_refused(tmp_path, capsys):
    assert stop.main([str(tmp_path)]) == 2
    assert stop.main(["127.0.0.1:9", "--seconds=0.2"]) == 3
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["Worker", "Supervisor"])
def test_of_a_run_elsewhere_nothing_here_is_interrupted(tmp_path, capsys, monkeypatch, role):
    monkeypatch.setattr(stop.os, "kill", lambda *unused: pytest.fail("not this host's"))
    with living(tmp_path, role, 1):
        monkeypatch.setattr("thinwire.tools.recorded.NodeProcess.is_here", False)
        assert stop.main([str(tmp_path), "--seconds=0.2"]) == 3
    assert "stop it there" in capsys.readouterr().err


def test_real_nodes_are_seen_and_ended(nodes, capsys):
    nodes.cluster(1, "--method=asgd", "--iter_max=1000000")
    nodes.watch(lambda status: status.version > 3)
    code, found = report(capsys, nodes.run_dir)
    assert (code, found["state"], found["source"]) == (0, "running", "shard 0")
    assert found["version"] > 3 and found["workers"][0]["state"] == "training"
    alive = {each["node"] for each in found["processes"] if each["alive"]}
    assert alive == {"ps-0", "worker-1"}
    assert stop.main([str(nodes.run_dir)]) == 0
    assert [nodes.wait(name) for name in ("ps", "worker-1")] == [130] * 2
    capsys.readouterr()
    code, found = report(capsys, nodes.run_dir)
    assert (code, found["state"], found["why"]) == (130, "stopped", "interrupted")


def test_a_shard_without_a_model_is_seen_and_ended_by_its_address(tmp_path, capsys):
    with offered_run(tmp_path) as run:
        run.listen()
        address = f"127.0.0.1:{run.ports[0]}"
        assert report(capsys, address)[1]["state"] == "starting"
        assert health.main([address]) == 1
        assert capsys.readouterr().out == "NOT_SERVING\n"
        assert stop.main([address]) == 0
        assert "the run has ended (interrupted, before a worker" in capsys.readouterr().out
        run.threads[0].join(20)
        assert not run.threads[0].is_alive() and not run.shards and not run.failures


def test_nodes_without_a_model_are_all_ended_by_their_folder(nodes):
    """No node has the model, and the shards would look for each other for a minute."""
    nodes.common = ("--model_from=worker", "--nb_workers=1", "--nb_ps=2", "--method=asgd")
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    for shard in range(2):
        nodes.start(f"ps-{shard}", "--type_node=PS", f"--id_ps={shard}", f"--ps_hosts={hosts}")
    told = "waiting for a worker that sends the model"
    wait_until(lambda: all(told in nodes.output(f"ps-{j}") for j in range(2)), 60, "two shards")
    assert stop.main([str(nodes.run_dir)]) == 0
    assert [nodes.wait(f"ps-{shard}") for shard in range(2)] == [130, 130]

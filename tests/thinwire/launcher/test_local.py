"""A cluster's rules on simulated nodes: which nodes start and end, and the exit code.

The file also tests the launcher of this machine as far as possible without TensorFlow.
"""

import json
import os
import signal
import sys
import threading

import pytest

from tests.command_line import given
from tests.thinwire.launcher.scripted_nodes import (
    ALL,
    ENDLESS,
    STUBBORN,
    FakeLauncher,
    Script,
    pretending,
)
from thinwire.flags import environment as flags_in_environment
from thinwire.flags import launch
from thinwire.flags.run import read_run
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher import local, role
from thinwire.proto.grpc import Unreachable
from thinwire.worker import flags as worker_flags


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    return pretending(monkeypatch, tmp_path)


def test_it_starts_everybody_once_and_ends_with_0(cluster):
    code, launcher = cluster()
    assert code == 0
    assert launcher.nodes.keys() == ALL
    assert not any(process.heard for process in launcher.processes.values())


@pytest.mark.parametrize(
    ("scripts", "code"),
    [
        # A killed worker does not spoil a run that reached its end.
        ({"worker-1": Script(1, -9)}, 0),
        ({"worker-1": Script(1, 4)}, 4),
        ({"supervisor-0": Script(1, -9)}, 0),
        ({"supervisor-0": Script(1, 2), "worker-2": Script(2, 1)}, 2),
    ],
)
def test_the_worst_code_of_a_run_that_reached_its_end(cluster, scripts, code):
    got, launcher = cluster(scripts)
    assert got == code
    assert not launcher.heard("ps-0")


@pytest.mark.parametrize(
    ("scripts", "code"),
    [
        ({"ps-1": Script(2, -9)}, 3),  # a killed PS: the same command resumes
        ({"ps-0": Script(2, 5)}, 5),
        ({"ps-0": Script(2, 2), "worker-1": Script(4, 3)}, 2),  # the cause, not what followed
        ({"worker-1": Script(1, 4), "worker-2": Script(2, 4)}, 4),
        ({"worker-1": Script(1, -9), "worker-2": Script(2, -9)}, 3),
        ({"worker-1": Script(1, -9), "worker-2": Script(2, 5)}, 5),
    ],
)
def test_a_failure_for_good_ends_the_others(cluster, scripts, code):
    got, launcher = cluster(dict.fromkeys(ALL, ENDLESS) | scripts)
    assert got == code
    for name in ALL - scripts.keys():
        assert launcher.heard(name) == [signal.SIGTERM]


def test_one_failed_worker_of_two_ends_nobody(cluster):
    scripts = {"worker-1": Script(1, 2), "worker-2": Script(50), "ps-0": Script(60)}
    _, launcher = cluster(scripts)
    assert launcher.turns >= 50
    assert not launcher.heard("worker-2")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_as_an_interrupt(cluster, number):
    before = signal.getsignal(number)

    def at_turn(turn):
        if turn == 3:
            os.kill(os.getpid(), number)

    code, launcher = cluster(dict.fromkeys(ALL, ENDLESS), at_turn=at_turn)
    assert code == 130
    assert all(process.heard == [signal.SIGINT] for process in launcher.processes.values())
    assert signal.getsignal(number) is before


def test_who_does_not_end_is_killed(cluster):
    def at_turn(turn):
        if turn == 3:
            os.kill(os.getpid(), signal.SIGINT)

    code, launcher = cluster({"worker-2": STUBBORN, "ps-0": ENDLESS}, at_turn=at_turn)
    assert code == 130
    assert launcher.heard("worker-2")[0] == signal.SIGINT
    assert launcher.heard("worker-2")[-1] == signal.SIGKILL
    assert signal.SIGKILL not in launcher.heard("ps-0")


def test_whoever_insists_gets_the_nodes_killed(cluster, monkeypatch):
    monkeypatch.setattr(role, "RULES", role.EndRules(kill_after_seconds=1e9))
    monkeypatch.setattr("thinwire.runtime.run.signals.SAME_REQUEST_SECONDS", -1)

    def at_turn(turn):
        if turn in (3, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    code, launcher = cluster(dict.fromkeys(ALL, STUBBORN), at_turn=at_turn)
    assert code == 130
    for name in ALL:
        assert launcher.heard(name) == [signal.SIGINT, signal.SIGKILL]


def test_workers_that_outlive_their_ps_are_killed_and_do_not_spoil_the_run(cluster):
    code, launcher = cluster({"worker-1": STUBBORN})
    assert code == 0
    assert launcher.heard("worker-1") == [signal.SIGKILL]


def test_what_cannot_be_reached_leaves_nobody_behind(cluster):
    with pytest.raises(Unreachable, match="no such host"):
        cluster(dict.fromkeys(ALL, ENDLESS), settled=Unreachable("no such host"))


def test_the_nodes_command_lines_are_those_of_this_run(cluster, tmp_path):
    flags = (
        "--method=gsp",
        "--groups=1|2",
        "--lr_schedule=0.5:0.1,0.8:0.1",
        "--link_mbps=3,4",
        "--batch_size=17",
        "--seed=5",
        "--port=0",
        "--quiet=false",
    )
    _, launcher = cluster((), *flags)
    with given("--nb_workers=2", "--nb_ps=2", *flags):
        wanted = read_run()
    for node in launcher.nodes.values():
        with given(*node.flags) as values:
            run = read_run()
            assert (run.type_node, run.run_dir) == (node.role, tmp_path)
            assert run.addresses == FakeLauncher.addresses
            assert run.method == wanted.method and run.schedule == wanted.schedule
            assert (run.nb_workers, run.seed, run.overwrite) == (2, 5, False)
            assert run.batch_size == (1000 if node.role == "Supervisor" else 17)
            if node.role == "Worker":
                assert worker_flags.read(2).id_worker == node.number
            elif node.role == "PS":
                assert values.id_ps == node.number


def test_each_node_tells_its_figures_at_a_port_of_its_own(cluster):
    _, launcher = cluster((), "--metrics_port=9400", "--metrics_host=::1", "--log_level=ps=debug")
    ports = {}
    for node in launcher.nodes.values():
        with given(*node.flags) as values:
            run = read_run()
            ports[node.name] = run.metrics_port
            assert (run.metrics_host, values.log_level) == ("::1", ["ps=debug"])
    assert ports == {
        "ps-0": 9400,
        "ps-1": 9401,
        "worker-1": 9402,
        "worker-2": 9403,
        "supervisor-0": 9404,
    }
    _, launcher = cluster()
    assert not any("metrics" in flag for node in launcher.nodes.values() for flag in node.flags)


def test_a_finished_run_starts_nobody_unless_it_is_to_be_overwritten(cluster, tmp_path):
    summary = {"stop_reason": "iter_max", "updates": 10, "seconds": 1, "best_test_accuracy": 0.5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine.txt").write_text("keep")
    code, launcher = cluster((), "--iter_max=10")
    assert (code, launcher.nodes) == (0, {})
    code, launcher = cluster((), "--iter_max=11")  # a raised limit continues the run
    assert (code, launcher.nodes.keys()) == (0, ALL)
    (tmp_path / "checkpoints" / "ps-0").mkdir(parents=True)
    code, launcher = cluster((), "--iter_max=10", "--overwrite")
    assert (code, launcher.nodes.keys()) == (0, ALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "mine.txt"]


def launcher_here(*flags):
    with given("--type_node=Cluster", "--nb_workers=2", *flags):
        return local.LocalLauncher(read_run())


def test_port_0_means_free_ports():
    addresses = launcher_here("--port=0", "--nb_ps=3").addresses
    ports = {int(address.removeprefix("127.0.0.1:")) for address in addresses}
    assert len(ports) == 3 and 0 not in ports
    assert launcher_here("--port=77", "--nb_ps=2").addresses == ("127.0.0.1:77", "127.0.0.1:78")
    assert launcher_here("--ps_hosts=a:1,b:2", "--port=0").addresses == ("a:1", "b:2")


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with given("--type_node=Cluster"):
        assert [role.threads_of(8, workers) for workers in (1, 2, 3, 8, 99, 0)] == (
            [8, 4, 2, 1, 1, 8]
        )
    with given("--worker_threads=3"):
        assert role.threads_of(8, 2) == 3


def test_exit_code_3_is_a_lost_worker_s_unless_the_script_chose_it(monkeypatch, tmp_path):
    pretend = pretending(monkeypatch, tmp_path)
    monkeypatch.setattr(role, "RULES", role.EndRules(True, mendable=(), kill_after_seconds=0.02))
    scripts = {"worker-2": Script(code=3), "worker-1": Script(turns=9)}
    code, launcher = pretend(scripts)
    assert code == 0 and not launcher.heard("worker-1")

    class AtFault(role.Cluster):
        def run(self):
            self.at_fault.add(2)
            return super().run()

    monkeypatch.setattr(role, "Cluster", AtFault)
    code, launcher = pretend({**scripts, "worker-1": ENDLESS, "ps-0": ENDLESS, "ps-1": ENDLESS})
    assert code == 3 and signal.SIGTERM in launcher.heard("worker-1")


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (3, 3), (128, 128), (130, 130), (129, -1), (137, -9), (143, -15), (255, -1)],
)
def test_a_watchdog_s_code_is_read_as_that_of_its_node(code, expected):
    """An interrupted node returns 130: a restart would not help."""
    assert local.exit_code(code) == expected


def test_a_node_has_ended_when_its_last_lines_have_been_taken(monkeypatch):
    has_ended, lines = threading.Event(), []

    class Slow:
        def on_line(self, line, is_error):
            assert has_ended.wait(30)
            lines.append(line)

    code = "for number in range(2000): print(number)"
    process = local.SupervisedProcess([sys.executable, "-c", code], Slow())
    wait = process._process.wait

    def ended(*arguments):
        found = wait(*arguments)
        has_ended.set()
        return found

    monkeypatch.setattr(process._process, "wait", ended)
    assert process.wait() == 0
    assert lines == [str(number) for number in range(2000)]


def test_nodes_have_no_flags_from_the_environment(monkeypatch):
    """Their command lines have them all."""
    for name in role.NOT_INHERITED:
        monkeypatch.setenv(name, "--seed=5")
    monkeypatch.setenv("HOME_OF_MINE", "kept")
    found = role.environment()
    assert not {"TF_CONFIG", flags_in_environment.VARIABLE} & found.keys()
    assert found["HOME_OF_MINE"] == "kept"


def test_a_part_of_a_run_goes_on_while_workers_of_other_parts_may_train(cluster, monkeypatch):
    """Each task of a Slurm step has some of the workers, and knows nothing of the others."""
    part = SlurmStep(0, 0, 0, ("here", "there"), (1, 1), 20000, 1)
    monkeypatch.setattr(launch, "part_here", lambda: part)
    lasting = Script(turns=30, code=0)
    scripts = {"worker-1": Script(2, -9), "ps-0": lasting, "supervisor-0": lasting}
    code, launcher = cluster(scripts)
    assert launcher.nodes.keys() == scripts.keys()
    assert not launcher.heard("ps-0") and code == 0

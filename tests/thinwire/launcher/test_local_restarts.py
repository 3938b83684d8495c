"""Simulated nodes: which nodes a cluster restarts."""

import os
import signal

import pytest

from tests.thinwire.launcher.scripted_nodes import ALL, ENDLESS, Script, pretending

KILLED, CRASHED = Script(2, -9), Script(2, 1)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    return pretending(monkeypatch, tmp_path)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr("thinwire.launcher.role._FIRST_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("lives", "num_lives", "code"),
    [
        ([KILLED, CRASHED, Script(5)], 3, 0),
        ([KILLED, Script(2, 4), Script(5)], 3, 0),  # its previous process still held its id
        ([Script(2, 3), Script(5)], 2, 0),
        ([KILLED] * 9, 4, 0),  # given up; a killed worker does not spoil the run
        ([CRASHED] * 9, 4, 1),
        ([KILLED, None, None, Script(5)], 2, 0),  # a host that is away counts as a death
        ([Script(2, 0)] * 2, 1, 0),
        ([Script(2, 2)] * 2, 1, 2),
        ([Script(2, 4)] * 2, 1, 4),
        ([Script(2, 5)] * 2, 1, 5),
        ([Script(2, 130)] * 2, 1, 130),
    ],
)
def test_a_worker_that_dies_is_started_again(cluster, lives, num_lives, code):
    quiet = {"ps-0": Script(80), "ps-1": Script(80), "worker-1": Script(80)}
    got, launcher = cluster(quiet | {"worker-2": lives}, "--restart_workers=3")
    assert launcher.lives == {"worker-2": num_lives} | dict.fromkeys(ALL - {"worker-2"}, 1)
    assert got == code
    flags = launcher.nodes["worker-2"].flags
    told = [flag for flag in flags if flag.startswith("--num_restarts=")]
    restarts = launcher.nodes["worker-2"].num_restarts
    assert told == ([f"--num_restarts={restarts}"] if restarts else [])
    assert len(flags) == len(set(flags))


@pytest.mark.usefixtures("hasty")
def test_all_workers_may_die_at_once(cluster):
    scripts = {name: [KILLED, Script(5)] for name in ("worker-1", "worker-2")}
    scripts |= {"ps-0": Script(40), "ps-1": Script(40)}
    code, launcher = cluster(scripts, "--restart_workers=1")
    assert code == 0
    assert not launcher.heard("ps-0")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("lives", "num_lives", "code"),
    [
        ([KILLED, Script(5)], 2, 0),
        ([KILLED, Script(2, 2), Script(5)], 3, 0),  # its previous process still held its lock
        ([KILLED, None, Script(5)], 2, 0),
        ([KILLED] * 9, 4, 3),
        ([Script(2, 2)] * 9, 1, 2),
    ],
)
def test_a_ps_that_is_killed_is_started_again(cluster, lives, num_lives, code):
    scripts = dict.fromkeys(ALL, Script(60)) | {"ps-1": lives}
    got, launcher = cluster(scripts, "--restart_ps=3")
    assert (got, launcher.lives["ps-1"]) == (code, num_lives)
    again = launcher.nodes["ps-1"]
    assert ("--resume_only" in again.flags) is (again.num_restarts > 0)
    assert len(again.flags) == len(set(again.flags))
    assert launcher.lives["worker-1"] == 1


def test_a_run_names_those_that_it_has_gone_on_without(cluster, caplog):
    quiet = {"ps-0": Script(20), "ps-1": Script(20), "worker-1": Script(20)}
    for lives, is_named in ((KILLED, True), (Script(5), False)):
        caplog.clear()
        code, _ = cluster(quiet | {"worker-2": lives})
        assert code == 0
        assert ("worker-2 (exit code -9)" in caplog.text) is is_named


def test_nobody_is_started_again_unless_asked_or_when_the_run_is_over(cluster):
    _, launcher = cluster({"worker-1": [KILLED, Script(5)]})
    assert launcher.lives["worker-1"] == 1
    scripts = {"worker-1": [Script(9, -9), Script(5)], "ps-0": Script(2), "ps-1": Script(99, -9)}
    code, launcher = cluster(scripts, "--restart_workers=3")
    assert launcher.lives["worker-1"] == 1
    assert code == 3  # a dead PS ends a cluster


def test_a_signal_ends_the_wait_for_another_start(cluster):
    def at_turn(turn):
        if turn == 4:
            os.kill(os.getpid(), signal.SIGINT)

    scripts = dict.fromkeys(ALL, ENDLESS) | {"worker-2": [KILLED, Script(5)]}
    code, launcher = cluster(scripts, "--restart_workers=3", at_turn=at_turn)
    assert (code, launcher.lives["worker-2"]) == (130, 1)

"""When a dead worker is restarted: growing pauses, and limits that expire with time."""

from types import SimpleNamespace

import pytest

from tests.command_line import given
from thinwire.flags import launch
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher import local
from thinwire.launcher.role import Node, Restarts
from thinwire.ops.types import ConfigurationError


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_pauses_grow_and_end_at_the_limit():
    restarts, pauses = Restarts(8, 1000.0, FakeClock()), []
    while (pause := restarts.pause(1, -9)) is not None:
        pauses.append(pause)
        restarts.started(1)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert restarts.pause(2, -9) == 1  # each worker has its own
    assert restarts.counts == {1: 8}


def test_time_lifts_the_limit():
    clock = FakeClock()
    restarts = Restarts(2, 100.0, clock)
    for now in (0.0, 60.0):
        clock.now = now
        assert restarts.pause(3, -15) is not None
        restarts.started(3)
    clock.now = 99.0
    assert restarts.pause(3, -15) is None
    clock.now = 100.0
    assert restarts.pause(3, -15) == 2  # the one at 60 still counts
    assert restarts.started(3) == 3


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (-9, True),
        (-1, True),
        (1, True),
        (3, True),
        (0, False),
        (2, False),
        (4, False),
        (5, False),
        (130, False),
    ],
)
def test_what_another_start_may_mend(code, again):
    assert (Restarts(1, 10.0, FakeClock()).pause(1, code) is not None) is again
    assert Restarts(0, 10.0, FakeClock()).pause(1, code) is None


def test_a_refusal_is_not_final_for_who_was_here_before():
    restarts = Restarts(3, 10.0, FakeClock())
    restarts.started(1)
    assert restarts.pause(1, 4) == restarts.pause(1, 2) == 2  # its id, or its directory, is held


def test_a_window_without_restarts_is_refused():
    with (
        given("--type_node=Cluster", "--restart_window_seconds=5"),
        pytest.raises(ConfigurationError, match="--restart_window_seconds=5.* without"),
    ):
        launch.check()


def test_only_the_first_start_of_a_node_in_a_step_overwrites(monkeypatch):
    """A restarted worker resumes from its newest checkpoint."""
    started = []
    monkeypatch.setattr(local, "start_here", lambda node, *flags: started.append(flags))
    step = SlurmStep(0, 0, 0, ("here", "there"), (1, 1), 20000, 3)
    monkeypatch.setattr(launch, "step_here", lambda: step)
    with given("--type_node=Cluster", "--insecure"):
        run = SimpleNamespace(addresses=("here:1",), overwrite=True)
        launcher = local.SlurmLauncher(run)
        for restarts in (0, 1):
            for role in ("PS", "Worker"):
                launcher.start(Node(role, role, 1, (), num_restarts=restarts))
    assert ["--overwrite" in flags for flags in started] == [True, True, False, False]
    assert all("--worker_threads=3" in flags for flags in started)

"""kill -9 of a worker inside a round, and its return, in every mode; the summary reports both."""

import numpy as np
import pytest

from tests.thinwire.simulator.toy import simulated
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.types import Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.runtime.telemetry import run_status

GROUPS = ((1, 2), (3,))
LEASE_SECONDS = 2.0
KILLED_AT = 8.35
#: Name -> method, choices, updates until the end.
MODES = {
    "bsp": ("bsp", {}, 25),
    "asgd": ("asgd", {}, 90),
    "adacomp": ("adacomp", {"compression_rate": 0.3}, 90),
    "dcasgd": ("dcasgd", {}, 90),
    "ssp": ("ssp", {"staleness_bound": 1}, 60),
    "gsp": ("gsp", {"groups": GROUPS}, 60),
    "gsp with a bound": ("gsp", {"groups": GROUPS, "staleness_bound": 1}, 45),
    "gsp by speed": ("gsp", {"auto_groups": AutoGroups(12, 3.0)}, 60),
    "gsp by speed with a bound": (
        "gsp",
        {"auto_groups": AutoGroups(12, 3.0), "staleness_bound": 1},
        45,
    ),
    "esync": ("esync", {}, 25),
    "esync, delayed": ("esync", {"esync_query": "delayed"}, 25),
    "local steps": ("bsp", {"overrides": {"pacer": "fixed"}, "local_steps": 3}, 12),
    "local steps, momentum averaged": (
        "asgd",
        {
            "overrides": {"pacer": "fixed"},
            "local_steps": 2,
            "local_optimizer": "momentum",
            "local_opt_state": "average",
        },
        50,
    ),
}


def summary_of(simulation):
    first = simulation.shards[0]
    for worker in simulation.workers:
        first.reports[(pb.ROLE_WORKER, worker.number)] = worker.report()
    sources = first.status_sources(simulation.spec.num_parameters)
    board = StatusReporter(simulation._run, sources)
    return run_status.summarise(board.status(), [])


#: Name -> number of shards, seconds until the return.
RETURNS = {"at once": (2, 0.6), "late": (1, 5.0), "late, 3 shards": (3, 5.0)}


def cases():
    """Return every mode with every return; each mode has two in `make test`."""
    for turn, mode in enumerate(MODES):
        for number, back in enumerate(RETURNS):
            rarely = (number + turn) % len(RETURNS) == 0 and mode not in ("bsp", "asgd")
            marks = [pytest.mark.product] if rarely else []
            yield pytest.param(mode, *RETURNS[back], id=f"{back}-{mode}", marks=marks)


@pytest.mark.parametrize(("mode", "nb_ps", "away"), cases())
def test_a_killed_worker_comes_back(tmp_path, mode, nb_ps, away):
    name, choices, updates = MODES[mode]
    simulation = simulated(
        name,
        3,
        steps="0.5,0.7,1.1",
        links=(Link(0.05, 30),),
        choices=choices,
        nb_ps=nb_ps,
        failures=f"2@{KILLED_AT}-{KILLED_AT + away}",
        lease_seconds=LEASE_SECONDS,
        iter_max=updates,
        run_dir=tmp_path,
    )
    pushes = {}

    def keep(now):
        if now <= KILLED_AT + away:
            pushes["before"] = simulation.shards[0].core.counters.worker(2).pushes

    assert simulation.play(keep, lambda: False) == "iter_max"
    summary = summary_of(simulation)
    assert summary["updates"] == updates
    left = int(away > LEASE_SECONDS)
    assert (summary["membership"]["left"], summary["membership"]["returned"]) == (left, 1)
    assert summary["workers"][1]["pushes"] >= pushes["before"] + 3
    for shard in simulation.shards:
        # A push that had not reached a shard before the death is missing there for ever.
        assert updates - 2 <= shard.core.version <= updates
        assert np.isfinite(shard.core.model.theta).all()


@pytest.mark.parametrize(
    ("killed_at", "pushes"), [(8.0, 7), (8.7, 8)], ids=["computing", "waiting for the others"]
)
def test_what_a_shard_sends_to_a_dead_worker_is_heard_by_nobody(killed_at, pushes):
    """Rounds begin every 1.1 s; worker 1 computes for 0.5 s of each."""
    simulation = simulated(
        "bsp",
        3,
        steps="0.5,0.7,1.1",
        failures=f"1@{killed_at}",
        lease_seconds=LEASE_SECONDS,
        iter_max=25,
    )
    simulation.play(lambda now: None, lambda: False)
    summary = summary_of(simulation)
    assert [worker["pushes"] for worker in summary["workers"]] == [pushes, 25, 25]
    assert summary["membership"]["left"] == 1

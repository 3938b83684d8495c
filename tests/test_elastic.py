"""Workers that join late, leave, stall, die and return; cut networks; restarted shards.

Real servers, clients and streams in one process. Most run only in `make product`; the tests of
cores alone are in tests/ps/core/test_membership.py.
"""

import time

import pytest

from tests.threads.cluster import InProcessCluster
from tests.virtual.toy import method
from tests.waiting import wait_until
from thinwire.proto import moved

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.product
MODES = {
    "bsp": ("bsp", {}),
    "gsp": ("gsp", {"groups": ((1, 2), (3,))}),
    "ssp": ("ssp", {"staleness_bound": 2}),
    "asgd": ("asgd", {}),
    "esync": ("esync", {}),
}
EACH_MODE = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "bsp" else LONG) for mode in MODES]
)
EACH_MODE_LONG = pytest.mark.parametrize("mode", [pytest.param(mode, marks=LONG) for mode in MODES])
PAUSE_SECONDS = 0.005


def cluster(mode, nb_ps=2, **choices):
    name, own = MODES[mode]
    return InProcessCluster(
        method(name, nb_workers=3, **own), nb_ps=nb_ps, iter_max=10**6, **choices
    )


def out(run, count=1):
    wait_until(lambda: run.first.membership.num_left >= count, 60, "somebody to be let go")


def back(run, count=1):
    wait_until(lambda: run.first.membership.num_returned >= count, 60, "a return")


def rounds(worker, more):
    goal = worker.num_rounds + more
    wait_until(lambda: worker.num_rounds >= goal, 60, f"{more} more rounds of {worker.name}")


@EACH_MODE
def test_a_worker_that_reaches_shard_0_alone_is_let_go_and_returns(mode):
    """Shard 0 receives its heartbeats; shard 1 misses it, and all workers would wait there."""
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.wires[2, 1].cut()
        out(run)
        run.wait_for_updates(10)
        run.wires[2, 1].mend()
        back(run)
        rounds(run.workers[1], 5)
        run.stop()


@EACH_MODE_LONG
def test_a_short_cut_costs_nothing_but_time(mode):
    with cluster(mode, lease_seconds=4.0) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.wires[2, 0].cut()
        lease = run.first.membership.leases[2]
        wait_until(lambda: time.monotonic() - lease.last_seen > 1.0, 60, "silence at shard 0")
        run.wires[2, 0].mend()
        rounds(run.workers[1], 5)
        run.wires[2, 1].cut()
        heard = run.shards[1].core.membership._last_seen
        wait_until(lambda: time.monotonic() - heard[2] > 1.0, 60, "silence at shard 1")
        run.wires[2, 1].mend()
        rounds(run.workers[1], 5)
        run.wires[2, 0].reset()
        rounds(run.workers[1], 5)
        assert run.first.membership.num_left == 0
        run.stop()


@EACH_MODE_LONG
def test_a_cut_between_shards_is_outlived(mode):
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.leader_wires[1].cut()
        run.wait_for_updates(10)
        run.wires[2, 0].cut()  # shard 1 does not receive this change
        out(run)
        run.leader_wires[1].mend()
        run.wait_for_updates(10)
        run.wires[2, 0].mend()
        back(run)
        run.wait_for_updates(10)
        run.stop()


@EACH_MODE_LONG
def test_who_stands_still_for_longer_than_a_lease_returns(mode):
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.workers[2].freeze()
        out(run)
        run.wait_for_updates(10)
        run.workers[2].thaw()
        back(run)
        rounds(run.workers[2], 5)
        run.stop()


@EACH_MODE_LONG
def test_an_old_process_wakes_up_after_another_has_taken_its_place(mode):
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        old = run.workers[2]
        old.freeze()
        out(run)
        new = run.worker(3, pause_seconds=PAUSE_SECONDS)
        rounds(new, 3)
        old.thaw()
        wait_until(lambda: not old.is_alive(), 60, "the old process's end")
        assert "held by a live worker" in str(old.error)
        rounds(new, 5)
        run.stop()


@EACH_MODE_LONG
@pytest.mark.parametrize("number", [0, 1])
def test_any_shard_may_restart(mode, number):
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.shards[number].snapshot()
        run.wait_for_updates(5)
        run.shards[number].kill()
        run.shards[number].come_back()
        for worker in run.workers:
            rounds(worker, 5)
        run.stop()


@EACH_MODE
def test_a_shard_that_is_back_at_another_address_is_found_through_shard_0(mode, monkeypatch):
    monkeypatch.setattr(moved, "_announced", {})
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.shards[1].snapshot()
        run.shards[1].kill()
        run.shards[1].come_back(elsewhere=True)
        for worker in run.workers:
            rounds(worker, 5)
        assert set(moved._announced.values()) == {run.shards[1].announced}
        run.stop()


@EACH_MODE_LONG
def test_shard_0_restarts_while_members_wait_there(mode):
    with cluster(mode) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(10)
        run.workers[2].freeze()
        if mode in ("bsp", "ssp"):
            wait_until(run.first.rounds.waiting, 30, "somebody who waits")
        run.shards[0].snapshot()
        run.shards[0].kill()
        run.shards[0].come_back()
        run.workers[2].thaw()
        for worker in run.workers:
            rounds(worker, 5)
        run.stop()


@EACH_MODE_LONG
@pytest.mark.parametrize("with_state", [True, False])
def test_late_comers_leavers_and_returners(mode, with_state):
    with cluster(mode, start_timeout_seconds=0.5) as run:
        first, second = (run.worker(number, pause_seconds=PAUSE_SECONDS) for number in (1, 2))
        rounds(first, 3)
        late = run.worker(3, pause_seconds=PAUSE_SECONDS)
        rounds(late, 5)
        second.part.interrupt()
        wait_until(lambda: not second.is_alive(), 60, "a clean end")
        rounds(late, 5)
        state = second.state() if with_state else None
        again = run.worker(2, state, PAUSE_SECONDS)
        rounds(again, 5)
        assert again.part.core.step > second.part.core.step
        assert run.first.membership.num_returned >= 1
        run.stop()


def test_a_second_process_of_a_live_worker_is_turned_away():
    with cluster("asgd", nb_ps=1, lease_seconds=4.0) as run:
        run.start(PAUSE_SECONDS)
        run.wait_for_updates(5)
        second = run.worker(1)
        wait_until(lambda: not second.is_alive(), 60, "a refusal")
        assert "--id_worker=1 is held by a live worker" in str(second.error)
        rounds(run.workers[0], 3)
        run.stop()


def test_a_shard_that_cannot_write_ends_the_run():
    with cluster("bsp") as run:
        run.start()
        run.wait_for_updates(3)
        run.shards[1].leader.request_end("interrupted")  # rejected: its stream ends
        run.shards[1].leader.request_end("journal_failed")
        wait_until(lambda: run.first.stop_reason == "journal_failed", 30, "the end")

"""The PS core over time: starts, leases, generations, interrupts, ends."""

import numpy as np

from tests.virtual.shard import core_of, join, of, push
from tests.virtual.toy import KERNELS, method
from thinwire.ops.downlink.types import Operation
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import FollowerMembership


def test_synchronous_runs_wait_for_everybody_or_the_start_timeout():
    core = core_of(
        method("bsp"), start_timeout_seconds=30.0, lease=100.0, snapshot_interval_seconds=1e6
    )
    assert of(events.Reply, join(core, 1)) == []
    assert core.next_deadline() == 30.0
    replies = of(events.Reply, core.handle(events.Tick(), 30.0))
    assert [reply.worker for reply in replies] == [1]


def test_asynchronous_runs_start_at_once():
    core = core_of(method("asgd"))
    replies = of(events.Reply, join(core, 1))
    assert replies[0].operation is Operation.FULL


def test_a_live_id_is_refused_naming_the_holder_and_a_suspect_one_is_replaced():
    core = core_of(method("asgd"))
    join(core, 1)
    refusal = of(events.Reject, core.handle(events.Join(1, 77, False, "other"), 1.0))[0]
    assert refusal.reason == "ID_TAKEN"
    assert "peer1" in refusal.message
    core.handle(events.WorkerDisconnected(1, 1), 1.0)
    assert of(events.Welcome, core.handle(events.Join(1, 77, False, "other"), 2.0))
    assert (
        of(events.Reject, core.handle(events.Join(9, 5, False, "x"), 2.0))[0].reason == "ID_RANGE"
    )


def test_exactly_iter_max_updates_then_stop_for_everyone():
    core = core_of(method("asgd"), iter_max=2)
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    actions = push(core, 2, 1, 0)
    assert of(events.RunEnded, actions)[0].reason == "iter_max"
    assert of(events.Reply, actions)[0].stop
    theta = core.model.theta.copy()
    late = of(events.Reply, push(core, 1, 2, 1))
    assert late[0].stop
    assert core.version == 2
    np.testing.assert_array_equal(core.model.theta, theta)


def test_max_seconds_counts_from_the_first_pull():
    core = core_of(method("asgd"), max_seconds=5.0)
    join(core, 1, now=100.0)
    core.handle(events.WorkerAlive(1), 104.0)
    assert core.stop_reason is None
    core.handle(events.Tick(), 105.0)
    assert core.stop_reason == "max_seconds"


def test_a_push_of_an_earlier_generation_is_refused_and_counted():
    core = core_of(method("asgd"), generation=1)
    join(core, 1)
    core.handle(events.Pull(1, 1, 7, 0), 0.0)
    refusal = of(events.Reject, push(core, 1, 1, 7, generation=0))[0]
    assert refusal.reason == "STALE_GENERATION"
    assert core.version == 0
    assert core.counters.lost_updates == 7


def test_a_push_after_the_lease_must_say_hello_again():
    core = core_of(method("asgd"))
    join(core, 1)
    core.handle(events.Tick(), 11.0)
    refusal = of(events.Reject, push(core, 1, 1, 0, now=11.0))[0]
    assert refusal.reason == "NOT_MEMBER"
    actions = core.handle(events.Join(1, 1, True, "peer1"), 12.0)
    assert of(events.Welcome, actions)
    assert of(events.Reply, push(core, 1, 1, 0, now=12.0))
    assert core.version == 1
    assert core.membership.num_returned == 1


def test_a_dropped_push_of_a_round_counts_when_it_is_retried():
    core = core_of(method("bsp"), lease=5.0)
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0, now=1.0)
    core.handle(events.WorkerAlive(2), 5.0)
    core.handle(events.Tick(), 6.5)
    assert core._members[1].last_step == 0
    core.handle(events.Join(1, 1, True, "peer1"), 7.0)
    core.handle(events.WorkerAlive(2), 7.0)
    push(core, 2, 1, 0, now=7.0)
    push(core, 1, 1, 0, now=7.5)
    assert core.version == 1
    assert core.counters.worker(1).pushes == 1
    assert core.counters.rejected == {"left": 1}


def test_an_interrupted_run_takes_in_what_is_on_its_way():
    core = core_of(method("bsp"))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    assert of(events.RunEnded, core.handle(events.Stop("interrupted"), 1.0)) == []
    replies = of(events.Reply, push(core, 2, 1, 0, now=1.0))
    assert {reply.worker for reply in replies} == {1, 2}
    assert all(reply.stop for reply in replies)
    assert core.version == 1
    core.handle(events.Leave(1, 1, "done"), 1.0)
    ended = of(events.RunEnded, core.handle(events.Leave(2, 2, "done"), 1.0))
    assert ended[0].reason == "interrupted"


def test_an_interrupted_run_does_not_wait_for_ever():
    core = core_of(method("asgd"), lease=100.0)
    join(core, 1)
    core.handle(events.Stop("interrupted"), 1.0)
    assert core.next_deadline() == 2.5
    assert of(events.RunEnded, core.handle(events.Tick(), 2.5))


def test_a_script_that_an_interrupt_ends_does_not_make_the_run_a_failed_one():
    """The script reports its end while the shard waits for pushes in flight."""
    core = core_of(method("bsp"))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    assert of(events.RunEnded, core.handle(events.Stop("interrupted"), 1.0)) == []
    ended = of(events.RunEnded, core.handle(events.Stop("script_failed"), 1.5))
    assert ended[0].reason == "interrupted"


def test_whoever_waits_when_its_lease_ends_is_told():
    core = core_of(method("bsp"), lease=5.0)
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0, now=1.0)
    core.handle(events.WorkerAlive(2), 5.0)
    refusal = of(events.Reject, core.handle(events.Tick(), 6.5))[0]
    assert (refusal.worker, refusal.reason, refusal.step) == (1, "NOT_MEMBER", 1)


def test_a_pull_after_the_lease_is_refused():
    core = core_of(method("asgd"), lease=5.0)
    core.handle(events.Join(1, 1, False, "a"), 0.0)
    core.handle(events.Tick(), 6.0)
    assert of(events.Reject, core.handle(events.Pull(1, 1, None, 0), 6.0))[0].step == 0


def test_a_restarted_shard_0_tells_nobody_before_its_start():
    core = core_of(method("bsp"), generation=1)
    assert of(events.NewEpoch, join(core, 2)) == []
    assert of(events.NewEpoch, join(core, 1))[0].epoch.live == (1, 2)


def test_a_following_shard_does_not_end_the_run():
    chosen = method("asgd", nb_workers=1)
    settings = CoreConfig(Budget(2), Schedule(0.1), 1)
    core = PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, FollowerMembership(1))
    core.handle(events.Join(1, 1, True, "a"), 0.0)
    core.handle(events.MembershipEpoch(1, (1,), True), 0.0)
    for step in (1, 2, 3):
        actions = push(core, 1, step, core.version)
        assert of(events.RunEnded, actions) == []
        assert not of(events.Reply, actions)[0].stop
    assert core.version == 2
    assert of(events.RunEnded, core.handle(events.Stop("iter_max"), 1.0))


def test_a_resumed_shard_snapshots_and_stops_by_the_clock_of_all_its_lives():
    chosen = method("asgd", nb_workers=1)
    first = core_of(chosen, max_seconds=60.0)
    join(first, 1)
    first.handle(events.WorkerAlive(1), 49.0)
    push(first, 1, 1, 0, now=50.0)
    second = core_of(chosen, max_seconds=60.0, generation=1)
    second.load_state_dict(first.state_dict())
    second.handle(events.Join(1, 1, True, "a"), 1000.0)
    push(second, 1, 1, 0, now=1000.0)  # a retry is its first word
    assert second.next_deadline() == 1010.0
    second.handle(events.Tick(), 1010.0)
    assert second.stop_reason == "max_seconds"


def test_a_shard_that_stood_still_expels_nobody():
    core = core_of(method("asgd", nb_workers=1))
    join(core, 1)
    core.handle(events.ProcessStalled(50.0), 51.0)
    assert core.membership.state_of(1) == "live"
    core.handle(events.Tick(), core.membership.next_deadline())
    assert core.membership.state_of(1) == "left"


def test_a_takeover_within_the_lease_is_two_epochs_and_forgets_what_waited():
    core = core_of(method("bsp", nb_workers=2))
    for worker in (1, 2):
        join(core, worker)
    push(core, 1, 1, 0)  # waits for worker 2
    core.handle(events.WorkerDisconnected(1, 1), 1.0)
    actions = core.handle(events.Join(1, 77, False, "peer"), 2.0)
    (welcome,) = of(events.Welcome, actions)
    assert welcome.last_step == 0
    assert [each.epoch.live for each in of(events.NewEpoch, actions)] == [(2,), (1, 2)]
    follower = FollowerMembership(2)
    for each in of(events.NewEpoch, actions):
        changes = list(follower.follow(each.epoch, 2.0))
    assert changes == [("join", 1)]

"""The PS core on its own: spec vectors, staleness, idempotence, leases, stops."""

import numpy as np
import pytest

from ops.down_codecs import Operation
from ops.schedule import Budget, Schedule
from ops.types import Update
from ps import events
from ps.core import PsCore
from ps.members import CoreConfig
from ps.membership import Coordinator, Follower
from tests.harness import KERNELS, MiniRun, method


def core_of(chosen, size=4, iter_max=100, lease=10.0, **config):
    nb_workers = sum(len(group) for group in chosen.sync.groups)
    settings = CoreConfig(Budget(iter_max), Schedule(0.1), nb_workers, **config)
    member = Coordinator(nb_workers, lease)
    return PsCore(settings, chosen, np.zeros(size, np.float32), KERNELS, member, chosen.sync)


def join(core, worker, now=0.0, incarnation=None):
    incarnation = incarnation or worker
    actions = core.handle(events.Join(worker, incarnation, False, f"peer{worker}"), now)
    return actions + core.handle(events.Pull(worker, incarnation, None, 0), now)


def push(core, worker, step, base, indices=None, values=None, now=0.0, generation=0, samples=1):
    values = np.ones(len(core.model.theta) if indices is None else len(indices), np.float32) \
        if values is None else np.asarray(values, np.float32)  # fmt: skip
    update = Update(None if indices is None else np.asarray(indices, np.int64), values)
    epoch = core.membership.epoch
    event = events.Push(worker, worker, step, base, generation, epoch, update, samples, 1, 1.0)
    return core.handle(event, now)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def test_adacomp_vectors():
    """AdaComp's damping by hand, eta = 0.1; the fourth push is fresh (no version missed)."""
    core = core_of(method("adacomp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    pushes = [(0, [0, 3]), (0, [0, 2]), (0, [0, 3]), (3, [0, 1]), (1, [0, 2])]
    rates = [[0.1, 0.1], [0.1, 0.1], [0.05, 0.1], [0.1, 0.1], [0.1 / 3, 0.1]]
    steps = dict.fromkeys((1, 2, 3), 0)
    for (base, indices), expected, worker in zip(pushes, rates, [1, 2, 3, 1, 2], strict=True):
        # Bases are as the vectors say, whatever the worker was handed: keep them in the window.
        for member in core.members.values():
            member.base_version = min(member.base_version, base)
        before = core.model.theta.copy()
        steps[worker] += 1
        push(core, worker, steps[worker], base, indices)
        np.testing.assert_allclose(before[indices] - core.model.theta[indices], expected, rtol=1e-5)
    assert core.version == 5


def test_grouping_vector():
    """Grouping-SGD's 1/Y by hand: g0 = {1, 2}, g1 = {3}; rounds g1 g1 g0 g1 g0 g0 g1."""
    core = core_of(method("gsp", nb_workers=3, groups=((1, 2), (3,))))
    for worker in (1, 2, 3):
        join(core, worker)
    steps = dict.fromkeys((1, 2, 3), 0)
    bases = dict.fromkeys((1, 2, 3), 0)
    seen = []
    for group in [(3,), (3,), (1, 2), (3,), (1, 2), (1, 2), (3,)]:
        before = core.model.theta.copy()
        for worker in group:
            steps[worker] += 1
            actions = push(core, worker, steps[worker], bases[worker])
        for reply in of(events.Reply, actions):
            bases[reply.worker] = reply.version
        seen.append(0.1 / float(before[0] - core.model.theta[0]))
    # D = n_g * Y on summed gradients; here members' gradients are all 1, so the mean shows Y.
    np.testing.assert_allclose(seen, [1, 1, 3, 2, 2, 1, 3], rtol=1e-4)
    assert len({tuple(core.model.theta)}) == 1


@pytest.mark.parametrize("weighting", ["none", "inverse"])
def test_inverse_weighting_is_a_switch_in_every_mode(weighting):
    core = core_of(method("asgd", nb_workers=2, overrides={"weighting": weighting}))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    before = core.model.theta.copy()
    push(core, 2, 1, 0)
    expected = 0.05 if weighting == "inverse" else 0.1
    np.testing.assert_allclose(before - core.model.theta, expected, rtol=1e-6)


def test_a_retry_is_answered_and_never_applied_twice():
    core = core_of(method("asgd"))
    join(core, 1)
    first = of(events.Reply, push(core, 1, 1, 0))
    theta = core.model.theta.copy()
    again = of(events.Reply, push(core, 1, 1, 0))
    assert len(first) == len(again) == 1
    assert core.version == 1
    np.testing.assert_array_equal(core.model.theta, theta)
    np.testing.assert_array_equal(again[0].update.values, theta)


def test_a_retry_while_its_round_waits_is_merged_once():
    core = core_of(method("bsp"))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    assert of(events.Reply, push(core, 1, 1, 0)) == []
    replies = of(events.Reply, push(core, 2, 1, 0))
    assert {reply.worker for reply in replies} == {1, 2}
    np.testing.assert_allclose(core.model.theta, -0.1)


def test_the_divisor_is_the_number_of_gradients_merged():
    core = core_of(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    push(core, 1, 1, 0, values=[2] * 4)
    push(core, 2, 1, 0, values=[4] * 4)
    core.handle(events.Lost(3, 3), 1.0)
    for worker in (1, 2):
        core.handle(events.Alive(worker), 9.0)
    replies = of(events.Reply, core.handle(events.Tick(), 10.5))
    assert {reply.worker for reply in replies} == {1, 2}
    np.testing.assert_allclose(core.model.theta, -0.3, rtol=1e-6)
    assert core.membership.num_left == 1


def test_group_members_get_the_same_arrays():
    core = core_of(method("bsp"))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    first, second = of(events.Reply, push(core, 2, 1, 0))
    assert first.update is second.update


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
    refusal = of(events.Refuse, core.handle(events.Join(1, 77, False, "other"), 1.0))[0]
    assert refusal.reason == "ID_TAKEN"
    assert "peer1" in refusal.message
    core.handle(events.Lost(1, 1), 1.0)
    assert of(events.Welcome, core.handle(events.Join(1, 77, False, "other"), 2.0))
    assert (
        of(events.Refuse, core.handle(events.Join(9, 5, False, "x"), 2.0))[0].reason == "ID_RANGE"
    )


def test_exactly_iter_max_updates_then_stop_for_everyone():
    core = core_of(method("asgd"), iter_max=2)
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    actions = push(core, 2, 1, 0)
    assert of(events.Ended, actions)[0].reason == "iter_max"
    assert of(events.Reply, actions)[0].stop
    theta = core.model.theta.copy()
    late = of(events.Reply, push(core, 1, 2, 1))
    assert late[0].stop
    assert core.version == 2
    np.testing.assert_array_equal(core.model.theta, theta)


def test_max_seconds_counts_from_the_first_pull():
    core = core_of(method("asgd"), max_seconds=5.0)
    join(core, 1, now=100.0)
    core.handle(events.Alive(1), 104.0)
    assert core.stop_reason is None
    core.handle(events.Tick(), 105.0)
    assert core.stop_reason == "max_seconds"


def test_a_push_of_an_earlier_generation_is_refused_and_counted():
    core = core_of(method("asgd"), generation=1)
    join(core, 1)
    core.handle(events.Pull(1, 1, 7, 0), 0.0)
    refusal = of(events.Refuse, push(core, 1, 1, 7, generation=0))[0]
    assert refusal.reason == "STALE_GENERATION"
    assert core.version == 0
    assert core.accounts.lost_updates == 7


def test_a_push_after_the_lease_must_say_hello_again():
    core = core_of(method("asgd"))
    join(core, 1)
    core.handle(events.Tick(), 11.0)
    refusal = of(events.Refuse, push(core, 1, 1, 0, now=11.0))[0]
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
    core.handle(events.Alive(2), 5.0)
    core.handle(events.Tick(), 6.5)
    assert core.members[1].last_step == 0
    core.handle(events.Join(1, 1, True, "peer1"), 7.0)
    core.handle(events.Alive(2), 7.0)
    push(core, 2, 1, 0, now=7.0)
    push(core, 1, 1, 0, now=7.5)
    assert core.version == 1
    assert core.accounts.worker(1).pushes == 1
    assert core.accounts.rejected == {"left": 1}


def test_delta_replies_set_exactly_what_changed():
    run = MiniRun(method("adacomp", nb_workers=3, compression_rate=0.1), iter_max=40).run()
    for worker in run.workers.values():
        base = worker.core.versions[0]
        assert base <= 40
    operations = {a.operation for _, a in run.actions if isinstance(a, events.Reply)}
    assert Operation.SET in operations
    last = max(run.workers.values(), key=lambda worker: worker.core.versions[0])
    assert last.core.versions[0] == 40
    np.testing.assert_array_equal(last.core.base, run.theta)


def test_staleness_window_beyond_is_counted_or_rejected():
    for policy, applied in (("count", 4), ("reject", 3)):
        chosen = method("adacomp", nb_workers=2, window=1, beyond_window=policy)
        core = core_of(chosen)
        join(core, 1)
        join(core, 2)
        for step in (1, 2, 3):
            push(core, 1, step, step - 1, [0])
        before = float(core.model.theta[0])
        push(core, 2, 1, 0, [0])
        assert core.version == applied
        if policy == "count":  # one remembered hit and two forgotten ones
            assert before - core.model.theta[0] == pytest.approx(0.1 / 3, rel=1e-5)
        else:
            assert core.accounts.rejected["stale"] == 1


def test_a_push_from_before_its_group_changed_is_sent_again():
    core = core_of(method("bsp", nb_workers=3), lease=5.0, start_timeout_seconds=0.0)
    join(core, 1)
    join(core, 2)
    old = core.membership.epoch
    join(core, 3)
    event = events.Push(1, 1, 1, 0, 0, old, Update(None, np.ones(4, np.float32)), 1, 1, 1.0)
    refusal = of(events.Refuse, core.handle(event, 0.0))[0]
    assert (refusal.reason, refusal.epoch) == ("STALE_EPOCH", core.membership.epoch)
    assert core.members[1].last_step == 0
    push(core, 1, 1, 0)
    assert core.members[1].last_step == 1


def test_a_push_of_a_newer_epoch_waits_for_it():
    chosen = method("bsp", nb_workers=2)
    settings = CoreConfig(Budget(10), Schedule(0.1), 2)
    core = PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, Follower(2), chosen.sync)
    core.handle(events.Join(1, 1, True, "a"), 0.0)
    core.handle(events.Epoch(1, (1,), True), 0.0)
    event = events.Push(1, 1, 1, 0, 0, 2, Update(None, np.ones(4, np.float32)), 1, 1, 1.0)
    assert of(events.Reply, core.handle(event, 0.0)) == []
    core.handle(events.Epoch(2, (1,), True), 0.0)
    core.handle(events.Tick(), 0.0)
    assert core.version == 1


def test_an_interrupted_run_takes_in_what_is_on_its_way():
    core = core_of(method("bsp"))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    assert of(events.Ended, core.handle(events.Stop("interrupted"), 1.0)) == []
    replies = of(events.Reply, push(core, 2, 1, 0, now=1.0))
    assert {reply.worker for reply in replies} == {1, 2}
    assert all(reply.stop for reply in replies)
    assert core.version == 1
    core.handle(events.Leave(1, 1, "done"), 1.0)
    ended = of(events.Ended, core.handle(events.Leave(2, 2, "done"), 1.0))
    assert ended[0].reason == "interrupted"


def test_an_interrupted_run_does_not_wait_for_ever():
    core = core_of(method("asgd"), lease=100.0)
    join(core, 1)
    core.handle(events.Stop("interrupted"), 1.0)
    assert core.next_deadline() == 6.0
    assert of(events.Ended, core.handle(events.Tick(), 6.0))


def test_whoever_waits_when_its_lease_ends_is_told():
    core = core_of(method("bsp"), lease=5.0)
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0, now=1.0)
    core.handle(events.Alive(2), 5.0)
    refusal = of(events.Refuse, core.handle(events.Tick(), 6.5))[0]
    assert (refusal.worker, refusal.reason, refusal.step) == (1, "NOT_MEMBER", 1)


def test_a_pull_after_the_lease_is_refused():
    core = core_of(method("asgd"), lease=5.0)
    core.handle(events.Join(1, 1, False, "a"), 0.0)
    core.handle(events.Tick(), 6.0)
    assert of(events.Refuse, core.handle(events.Pull(1, 1, None, 0), 6.0))[0].step == 0


def test_a_restarted_shard_0_tells_nobody_before_its_start():
    core = core_of(method("bsp"), generation=1)
    assert of(events.NewEpoch, join(core, 2)) == []
    assert of(events.NewEpoch, join(core, 1))[0].epoch.live == (1, 2)


def test_a_following_shard_does_not_end_the_run():
    chosen = method("asgd", nb_workers=1)
    settings = CoreConfig(Budget(2), Schedule(0.1), 1)
    core = PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, Follower(1), chosen.sync)
    core.handle(events.Join(1, 1, True, "a"), 0.0)
    core.handle(events.Epoch(1, (1,), True), 0.0)
    for step in (1, 2, 3):
        actions = push(core, 1, step, core.version)
        assert of(events.Ended, actions) == []
        assert not of(events.Reply, actions)[0].stop
    assert core.version == 2
    assert of(events.Ended, core.handle(events.Stop("iter_max"), 1.0))


def test_a_resumed_shard_snapshots_and_stops_by_the_clock_of_all_its_lives():
    chosen = method("asgd", nb_workers=1)
    first = core_of(chosen, max_seconds=60.0)
    join(first, 1)
    first.handle(events.Alive(1), 49.0)
    push(first, 1, 1, 0, now=50.0)
    second = core_of(chosen, max_seconds=60.0, generation=1)
    second.restore(first.snapshot())
    second.handle(events.Join(1, 1, True, "a"), 1000.0)
    push(second, 1, 1, 0, now=1000.0)  # a retry is its first word
    assert second.next_deadline() == 1010.0
    second.handle(events.Tick(), 1010.0)
    assert second.stop_reason == "max_seconds"


def test_a_shard_that_stood_still_expels_nobody():
    core = core_of(method("asgd", nb_workers=1))
    join(core, 1)
    core.handle(events.Stalled(50.0), 51.0)
    assert core.membership.state_of(1) == "live"
    core.handle(events.Tick(), core.membership.next_deadline())
    assert core.membership.state_of(1) == "left"


def test_a_takeover_within_the_lease_is_two_epochs_and_forgets_what_waited():
    core = core_of(method("bsp", nb_workers=2))
    for worker in (1, 2):
        join(core, worker)
    push(core, 1, 1, 0)  # waits for worker 2
    core.handle(events.Lost(1, 1), 1.0)
    actions = core.handle(events.Join(1, 77, False, "peer"), 2.0)
    (welcome,) = of(events.Welcome, actions)
    assert welcome.last_step == 0
    assert [each.epoch.live for each in of(events.NewEpoch, actions)] == [(2,), (1, 2)]
    follower = Follower(2)
    for each in of(events.NewEpoch, actions):
        changes = list(follower.follow(each.epoch, 2.0))
    assert changes == [("join", 1)]

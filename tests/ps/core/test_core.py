"""The PS core alone: papers' vectors, staleness, retries, rounds, epochs of pushes."""

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.run import MiniRun
from tests.virtual.shard import core_of, join, of, push
from tests.virtual.toy import KERNELS, method
from thinwire.ops.downlink.types import Operation
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import FollowerMembership


def test_adacomp_vectors():
    """AdaComp's damping by hand, eta = 0.1; the fourth push is fresh (no version missed)."""
    core = core_of(method("adacomp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    pushes = [(0, [0, 3]), (0, [0, 2]), (0, [0, 3]), (3, [0, 1]), (1, [0, 2])]
    rates = [[0.1, 0.1], [0.1, 0.1], [0.05, 0.1], [0.1, 0.1], [0.1 / 3, 0.1]]
    steps = dict.fromkeys((1, 2, 3), 0)
    for (base, indices), expected, worker in zip(pushes, rates, [1, 2, 3, 1, 2], strict=True):
        # Bases are given by the vectors, not by the worker's copy: keep them in the window.
        for member in (core._members[each] for each in core.known_workers()):
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
    core.handle(events.WorkerDisconnected(3, 3), 1.0)
    for worker in (1, 2):
        core.handle(events.WorkerAlive(worker), 9.0)
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
        chosen = method("adacomp", nb_workers=2, staleness_window=1, beyond_window=policy)
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
            assert core.counters.rejected["stale"] == 1


def test_a_push_from_before_its_group_changed_is_sent_again():
    core = core_of(method("bsp", nb_workers=3), lease=5.0, start_timeout_seconds=0.0)
    join(core, 1)
    join(core, 2)
    old = core.membership.epoch
    join(core, 3)
    event = push_event(1, 1, 1, 0, 0, old, Update(None, np.ones(4, np.float32)))
    refusal = of(events.Reject, core.handle(event, 0.0))[0]
    assert (refusal.reason, refusal.epoch) == ("STALE_EPOCH", core.membership.epoch)
    assert core._members[1].last_step == 0
    push(core, 1, 1, 0)
    assert core._members[1].last_step == 1


def test_a_push_of_a_newer_epoch_waits_for_it():
    chosen = method("bsp", nb_workers=2)
    settings = CoreConfig(Budget(10), Schedule(0.1), 2)
    core = PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, FollowerMembership(2))
    core.handle(events.Join(1, 1, True, "a"), 0.0)
    core.handle(events.MembershipEpoch(1, (1,), True), 0.0)
    event = push_event(1, 1, 1, 0, 0, 2, Update(None, np.ones(4, np.float32)))
    assert of(events.Reply, core.handle(event, 0.0)) == []
    core.handle(events.MembershipEpoch(2, (1,), True), 0.0)
    core.handle(events.Tick(), 0.0)
    assert core.version == 1


def follower(nb_workers):
    chosen = method("bsp", nb_workers=nb_workers)
    settings = CoreConfig(Budget(10), Schedule(0.1), nb_workers)
    theta, member = np.zeros(4, np.float32), FollowerMembership(nb_workers)
    return PsCore(settings, chosen, theta, KERNELS, member)


def test_a_follower_notifies_those_that_shard_0_has_lost_and_nobody_else():
    """Otherwise an answered worker would finish an exchange at shard 0 that has ended here."""
    core = follower(3)
    for worker in (1, 2, 3):
        core.handle(events.Join(worker, 10 * worker, True, "a"), 0.0)
    core.handle(events.MembershipEpoch(1, (1, 2, 3), True, None, (10, 20, 30)), 0.0)
    core.handle(events.Join(2, 21, True, "a"), 0.0)  # another process of worker 2
    told = core.handle(events.MembershipEpoch(2, (2, 3), True, None, (21, 30)), 0.0)
    refused = [(each.worker, each.incarnation, each.reason) for each in of(events.Reject, told)]
    assert refused == [(1, 10, "NOT_MEMBER")]


def test_a_replayed_shard_refuses_the_pushes_that_the_dead_one_refused():
    """The journaled soft state includes the last change of each group."""
    core = core_of(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    old = core.membership.epoch
    core.handle(events.Leave(3, 3, "done"), 1.0)
    again = core_of(method("bsp", nb_workers=3))
    again.load_state_dict(core.state_dict())
    again.load_state_dict(core.state_dict(soft=True), soft=True)
    update = Update(None, np.ones(4, np.float32))
    for each in (core, again):
        event = push_event(1, 1, 1, 0, 0, old, update)
        assert [refused.reason for refused in of(events.Reject, each.handle(event, 2.0))] == [
            "STALE_EPOCH"
        ]

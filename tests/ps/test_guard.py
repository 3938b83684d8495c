"""A shard's guard: outliers, offences and terms, as the core acts on them and keeps them."""

import json

import numpy as np
import pytest

from ops.guards import LEAST_NORMS, Guards
from ops.schedule import Budget, Schedule
from ops.types import Update
from ps import events
from ps.core import PsCore
from ps.members import CoreConfig
from ps.membership import Coordinator, Follower
from tests.harness import KERNELS, method
from tests.ps.test_core import join, of, push

HUGE = [1e6] * 4


def core_of(chosen, leads=True, **guards):
    nb_workers = sum(len(group) for group in chosen.sync.groups)
    settings = CoreConfig(
        Budget(1000), Schedule(0.1), nb_workers, snapshot_interval_seconds=1e9,
        guards=Guards(**guards),
    )  # fmt: skip
    member = Coordinator(nb_workers, 1e6) if leads else Follower(nb_workers)
    return PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, member, chosen.sync)


def joined(core):
    for worker in range(1, core.config.nb_workers + 1):
        join(core, worker)
    return core


def pull(core, worker, now=0.0):
    return core.handle(events.Pull(worker, worker, None, 0), now)


def reasons(actions):
    return [each.reason for each in of(events.Refuse, actions)]


def test_an_outlier_is_refused_counted_and_told():
    core = joined(core_of(method("asgd"), max_update_norm=3.0))
    actions = push(core, 1, 1, 0, values=HUGE)
    [refusal] = of(events.Refuse, actions)
    assert (refusal.reason, refusal.step, refusal.worker) == ("OUTLIER", 1, 1)
    assert "2e+06" in refusal.message and "--max_update_norm=3" in refusal.message
    assert core.version == 0 and not core.model.theta.any()
    assert core.accounts.rejected == {"outlier": 1}
    assert core.guard.summary()["refused"] == {"outlier": {"1": 1}}


def test_an_update_of_just_the_largest_norm_is_taken():
    core = joined(core_of(method("asgd"), max_update_norm=4.0))
    push(core, 1, 1, 0, values=[2] * 4)
    assert core.version == 1
    assert reasons(push(core, 1, 2, 1, values=[2.001] * 4)) == ["OUTLIER"]


def test_the_refused_worker_gets_the_model_and_goes_on():
    core = joined(core_of(method("asgd"), max_update_norm=3.0))
    push(core, 2, 1, 0)
    push(core, 1, 1, 0, values=HUGE)
    [reply] = of(events.Reply, pull(core, 1))
    assert (reply.step, reply.version) == (0, 1)
    np.testing.assert_array_equal(reply.update.values, core.model.theta)
    push(core, 1, 2, 1)
    assert core.version == 2


def test_a_refused_push_that_is_sent_again_is_refused_again_but_one_offence():
    core = joined(core_of(method("asgd"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    assert reasons(push(core, 1, 1, 0, values=HUGE)) == ["OUTLIER"]
    assert core.accounts.rejected == {"outlier": 1}


def test_a_group_does_not_wait_for_a_refused_push():
    core = joined(core_of(method("bsp", nb_workers=3), max_update_norm=3.0))
    push(core, 1, 1, 0, values=[0.5] * 4)
    assert reasons(push(core, 3, 1, 0, values=HUGE)) == ["OUTLIER"]
    assert of(events.Reply, pull(core, 3)) == []  # its round is not over
    replies = of(events.Reply, push(core, 2, 1, 0, values=[1.5] * 4))
    assert {reply.worker: reply.step for reply in replies} == {1: 1, 2: 1, 3: 0}
    np.testing.assert_allclose(core.model.theta, -0.1)  # the mean of the two that count
    assert core.sync_state["clocks"] == {1: 1, 2: 1, 3: 1}
    assert core.samples == 2


def test_a_round_of_outliers_alone_is_over_without_an_update():
    core = joined(core_of(method("bsp"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    push(core, 2, 1, 0, values=HUGE)
    assert core.version == 0
    for worker in (1, 2):
        assert of(events.Reply, pull(core, worker))
        push(core, worker, 2, 0)
    assert core.version == 1


def test_a_bound_does_not_wait_for_one_who_only_sends_outliers():
    core = joined(core_of(method("ssp", bound=1), max_update_norm=3.0))
    for step in range(1, 6):
        push(core, 1, step, core.version, values=HUGE)
        pull(core, 1)
        assert of(events.Reply, push(core, 2, step, core.version))
    assert core.version == 5


def test_the_median_is_of_what_all_workers_had_applied():
    core = joined(core_of(method("asgd"), update_norm_factor=5.0))
    for step in range(1, LEAST_NORMS + 1):
        push(core, 1 + step % 2, step, core.version)  # norm 2
    assert core.guard.summary()["median_norm"] == 2.0
    assert reasons(push(core, 1, 50, core.version, values=[5.1] * 4)) == ["OUTLIER"]
    assert reasons(push(core, 2, 50, core.version, values=[4.9] * 4)) == []
    assert core.version == LEAST_NORMS + 1


def test_sparse_updates_are_judged_by_what_they_send():
    core = joined(core_of(method("adacomp"), max_update_norm=3.0))
    assert reasons(push(core, 1, 1, 0, [2], [3.1])) == ["OUTLIER"]
    assert reasons(push(core, 2, 1, 0, [1, 2], [2.0, 2.0])) == []
    assert core.version == 1


def test_a_worker_that_leaves_with_a_refused_push_is_not_counted_twice():
    core = joined(core_of(method("bsp"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    core.handle(events.Leave(1, 1, "done"), 1.0)
    assert core.accounts.rejected == {"outlier": 1}


# -- quarantine -------------------------------------------------------------------------------


def quarantining(name="asgd", nb_workers=2, **choices):
    settings = {"max_update_norm": 3.0, "quarantine_after": 2, "quarantine_seconds": 8.0}
    return joined(core_of(method(name, nb_workers=nb_workers), **(settings | choices)))


def offend(core, now, step, worker=1):
    pull(core, worker, now)
    return push(core, worker, step, core.version, values=HUGE, now=now)


def test_who_offends_again_is_put_out_and_may_come_back():
    core = quarantining()
    epoch = core.membership.epoch
    offend(core, 1.0, 1)
    assert core.membership.epoch == epoch
    actions = offend(core, 2.0, 2)
    assert [each.epoch.live for each in of(events.NewEpoch, actions)] == [(2,)]
    assert core.membership.state_of(1) == "left"
    [refusal] = of(events.Refuse, pull(core, 1, 4.0))
    assert (refusal.reason, refusal.retry_after_seconds) == ("QUARANTINED", 6.0)
    hello = events.Join(1, 99, False, "another process")  # the same device
    [refusal] = of(events.Refuse, core.handle(hello, 9.5))
    assert (refusal.reason, refusal.step, refusal.retry_after_seconds) == ("QUARANTINED", 0, 0.5)
    assert of(events.Welcome, core.handle(hello, 10.0))
    assert core.guard.summary()["quarantines"] == {"1": 1}


def test_terms_double():
    core = quarantining()
    now, lengths = 0.0, []
    for term in range(3):
        offend(core, now, 10 * term + 1)
        offend(core, now, 10 * term + 2)
        lengths.append(core.guard.seconds_left(1))
        now += lengths[-1]
        join(core, 1, now)
    assert lengths == [8.0, 16.0, 32.0]
    assert core.guard.summary()["quarantines"] == {"1": 3}


def test_offences_are_forgotten_after_the_window():
    core = quarantining()
    offend(core, 0.0, 1)
    offend(core, 8.0, 2)
    assert core.membership.state_of(1) == "live"
    offend(core, 15.9, 3)
    assert core.membership.state_of(1) == "left"


def test_what_a_reader_refuses_is_an_offence_too():
    core = quarantining(max_update_norm=0.0)
    core.handle(events.Refused(1, "non_finite"), 1.0)
    core.handle(events.Refused(1, "malformed"), 1.0)
    assert core.membership.state_of(1) == "left"
    core.handle(events.Refused(1, "malformed"), 1.0)  # still on its way
    counts = core.guard.summary()
    assert counts["refused"] == {"malformed": {"1": 2}, "non_finite": {"1": 1}}
    assert counts["quarantines"] == {"1": 1}


def test_a_group_goes_on_without_who_was_put_out():
    core = quarantining("bsp", 3, quarantine_after=1)
    push(core, 1, 1, 0)
    push(core, 2, 1, 0)
    replies = of(events.Reply, push(core, 3, 1, 0, values=HUGE))
    assert {reply.worker for reply in replies} == {1, 2}
    assert core.version == 1
    assert core.sync_state["live"] == [1, 2]


def test_following_shards_refuse_but_put_nobody_out():
    core = core_of(method("asgd"), leads=False, max_update_norm=3.0, quarantine_after=1)
    core.handle(events.Join(1, 1, False, "peer"), 0.0)
    core.handle(events.Epoch(1, (1,), True), 0.0)
    assert reasons(push(core, 1, 1, 0, values=HUGE)) == ["OUTLIER"]
    assert core.membership.state_of(1) == "live"
    assert of(events.Reply, pull(core, 1))


def test_at_the_end_of_a_run_everybody_may_hear_of_it():
    core = quarantining(quarantine_after=1)
    offend(core, 0.0, 1)
    core.handle(events.Stop("target_accuracy"), 1.0)
    assert of(events.Welcome, core.handle(events.Join(1, 1, True, "peer"), 2.0))
    [reply] = of(events.Reply, pull(core, 1, 2.0))
    assert reply.stop


# -- durable state ----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0, 3, 17, 25])
def test_a_restored_shard_decides_as_one_that_never_stopped(moment):
    """Bit for bit: the same weights, refusals and guard from any snapshot on."""
    rng = np.random.default_rng(5)
    script = [
        (1 + turn % 2, rng.normal(size=4) * (1000 if turn > 15 and turn % 5 == 0 else 1))
        for turn in range(40)
    ]

    def fresh():
        return core_of(method("asgd"), max_update_norm=100.0, update_norm_factor=6.0,
                       quarantine_after=2, quarantine_seconds=64.0)  # fmt: skip

    def play(core, start, stop):
        refused = []
        for turn in range(start, stop):
            now, (worker, values) = float(turn), script[turn]
            if core.membership.state_of(worker) == "left":
                join(core, worker, now)
            pull(core, worker, now)
            actions = push(core, worker, turn + 1, core.version, values=values, now=now)
            refused += [(turn, reason) for reason in reasons(actions)]
        return refused

    whole, halved = joined(fresh()), joined(fresh())
    expected = play(whole, 0, 40)
    before = play(halved, 0, moment)
    halved.handle(events.Tick(), float(moment))
    saved = json.loads(json.dumps(halved.guard.save()))
    state = halved.snapshot() | {"guard": saved}
    back = fresh()
    back.restore(state)
    assert back.guard.save() == saved
    for worker in halved.membership.leases:
        join(back, worker, float(moment))
    assert before + play(back, moment, 40) == expected
    assert any(reason == "QUARANTINED" or reason == "NOT_MEMBER" for _, reason in expected)
    np.testing.assert_array_equal(back.model.theta, whole.model.theta)
    assert back.guard.save() == whole.guard.save()


def test_a_push_that_waits_at_a_snapshot_is_measured_once():
    core = joined(core_of(method("bsp"), update_norm_factor=6.0))
    push(core, 1, 1, 0)
    back = core_of(method("bsp"), update_norm_factor=6.0)
    back.restore(core.snapshot())
    joined(back)
    for worker in (1, 2):
        push(back, worker, 1, 0)
    assert back.version == 1
    assert back.guard.save()["policy"] == {"norms": [2.0, 2.0]}


def test_a_term_goes_on_where_it_was_on_a_shard_with_another_clock():
    core = quarantining(quarantine_after=1)
    offend(core, 100.0, 1)
    core.handle(events.Join(1, 1, True, "peer"), 103.0)
    back = core_of(method("asgd"), max_update_norm=3.0, quarantine_after=1, quarantine_seconds=8.0)
    back.restore(core.snapshot())
    [refusal] = of(events.Refuse, back.handle(events.Join(1, 1, True, "peer"), 5000.0))
    assert refusal.retry_after_seconds == 5.0
    assert of(events.Welcome, back.handle(events.Join(1, 1, True, "peer"), 5005.0))


def test_a_checkpoint_of_before_there_were_guards_is_taken():
    core = joined(core_of(method("asgd")))
    state = core.snapshot()
    del state["guard"]
    core_of(method("asgd"), max_update_norm=3.0).restore(state)


def test_without_guards_nothing_is_measured():
    core = joined(core_of(method("asgd")))
    push(core, 1, 1, 0, values=HUGE)
    assert core.version == 1
    assert core.guard.summary() == {}


def test_the_norm_is_that_of_the_update():
    core = joined(core_of(method("asgd"), max_update_norm=1e9))
    core.guard.excess(of_values(1, [3, 4]))
    core.guard.applied(1)
    assert core.guard.summary()["median_norm"] == 5.0


def of_values(worker, values):
    update = Update(None, np.array(values, np.float32))
    return events.Push(worker, worker, 1, 0, 0, 1, update, 1, 1, 1.0)

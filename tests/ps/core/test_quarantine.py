"""A worker that offends is quarantined for a term; the guard's state survives its shard."""

import json

import numpy as np
import pytest

from tests.virtual.shard import HUGE, guarded, join, joined, of, pull, push, reasons
from tests.virtual.toy import method
from thinwire.ps.core import events


def guards_of(core):
    """The state of both guards that outlives a restart."""
    state = core.state_dict()
    return {name: state[name] for name in ("guard", "quarantine")}


def quarantining(name="asgd", nb_workers=2, **choices):
    settings = {"max_update_norm": 3.0, "quarantine_after": 2, "quarantine_seconds": 8.0}
    return joined(guarded(method(name, nb_workers=nb_workers), **(settings | choices)))


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
    [refusal] = of(events.Reject, pull(core, 1, 4.0))
    assert (refusal.reason, refusal.retry_after_seconds) == ("QUARANTINED", 6.0)
    hello = events.Join(1, 99, False, "another process")  # the same device
    [refusal] = of(events.Reject, core.handle(hello, 9.5))
    assert (refusal.reason, refusal.step, refusal.retry_after_seconds) == ("QUARANTINED", 0, 0.5)
    assert of(events.Welcome, core.handle(hello, 10.0))
    assert core.guard_summary()["quarantines"] == {"1": 1}


def test_terms_double():
    core = quarantining()
    now, lengths = 0.0, []
    for term in range(3):
        offend(core, now, 10 * term + 1)
        offend(core, now, 10 * term + 2)
        lengths.append(core._quarantine.seconds_left(1))
        now += lengths[-1]
        join(core, 1, now)
    assert lengths == [8.0, 16.0, 32.0]
    assert core.guard_summary()["quarantines"] == {"1": 3}


def test_offences_are_forgotten_after_the_window():
    core = quarantining()
    offend(core, 0.0, 1)
    offend(core, 8.0, 2)
    assert core.membership.state_of(1) == "live"
    offend(core, 15.9, 3)
    assert core.membership.state_of(1) == "left"


def test_what_a_reader_refuses_is_an_offence_too():
    core = quarantining(max_update_norm=0.0)
    core.handle(events.PushRejected(1, "non_finite"), 1.0)
    core.handle(events.PushRejected(1, "malformed"), 1.0)
    assert core.membership.state_of(1) == "left"
    core.handle(events.PushRejected(1, "malformed"), 1.0)  # still on its way
    counts = core.guard_summary()
    assert counts["refused"] == {"malformed": {"1": 2}, "non_finite": {"1": 1}}
    assert counts["quarantines"] == {"1": 1}


def test_a_group_goes_on_without_who_was_put_out():
    core = quarantining("bsp", 3, quarantine_after=1)
    push(core, 1, 1, 0)
    push(core, 2, 1, 0)
    replies = of(events.Reply, push(core, 3, 1, 0, values=HUGE))
    assert {reply.worker for reply in replies} == {1, 2}
    assert core.version == 1
    assert core.rounds.live() == (1, 2)


def test_following_shards_refuse_but_put_nobody_out():
    core = guarded(method("asgd"), leads=False, max_update_norm=3.0, quarantine_after=1)
    core.handle(events.Join(1, 1, False, "peer"), 0.0)
    core.handle(events.MembershipEpoch(1, (1,), True), 0.0)
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


@pytest.mark.parametrize("moment", [0, 3, 17, 25])
def test_a_restored_shard_decides_as_one_that_never_stopped(moment):
    """Bit for bit: the same weights, refusals and guard from any snapshot on."""
    rng = np.random.default_rng(5)
    script = [
        (1 + turn % 2, rng.normal(size=4) * (1000 if turn > 15 and turn % 5 == 0 else 1))
        for turn in range(40)
    ]

    def fresh():
        return guarded(
            method("asgd"),
            max_update_norm=100.0,
            update_norm_factor=6.0,
            quarantine_after=2,
            quarantine_seconds=64.0,
        )

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
    saved = json.loads(json.dumps(guards_of(halved)))
    state = halved.state_dict() | saved
    back = fresh()
    back.load_state_dict(state)
    assert guards_of(back) == saved
    for worker in halved.membership.leases:
        join(back, worker, float(moment))
    assert before + play(back, moment, 40) == expected
    assert any(reason == "QUARANTINED" or reason == "NOT_MEMBER" for _, reason in expected)
    np.testing.assert_array_equal(back.model.theta, whole.model.theta)
    assert guards_of(back) == guards_of(whole)


def test_a_push_that_waits_at_a_snapshot_is_measured_once():
    core = joined(guarded(method("bsp"), update_norm_factor=6.0))
    push(core, 1, 1, 0)
    back = guarded(method("bsp"), update_norm_factor=6.0)
    back.load_state_dict(core.state_dict())
    joined(back)
    for worker in (1, 2):
        push(back, worker, 1, 0)
    assert back.version == 1
    assert guards_of(back)["guard"]["norms"] == [2.0, 2.0]


def test_a_term_goes_on_where_it_was_on_a_shard_with_another_clock():
    core = quarantining(quarantine_after=1)
    offend(core, 100.0, 1)
    core.handle(events.Join(1, 1, True, "peer"), 103.0)
    back = guarded(method("asgd"), max_update_norm=3.0, quarantine_after=1, quarantine_seconds=8.0)
    back.load_state_dict(core.state_dict())
    [refusal] = of(events.Reject, back.handle(events.Join(1, 1, True, "peer"), 5000.0))
    assert refusal.retry_after_seconds == 5.0
    assert of(events.Welcome, back.handle(events.Join(1, 1, True, "peer"), 5005.0))

"""Leases, suspicion, epochs with incarnations, and members that a following shard misses."""

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.shard import core_of, join, of, push
from tests.virtual.toy import KERNELS, method
from thinwire.ops.sync.base import Joiners
from thinwire.ops.types import Update
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.wire.epochs import decode_epoch, encode_epoch

LEASE = 9.0


def following(name="bsp", lease=LEASE, **choices):
    """Return a following shard's core."""
    chosen = method(name, nb_workers=3, **choices)
    settings = core_of(chosen).config
    return PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, FollowerMembership(3, lease))


def hello(core, worker, life, epoch=0, now=0.0):
    return core.handle(events.Join(worker, life, True, f"peer{life}", epoch), now)


def push_of(worker, life, step, epoch, base=0):
    update = Update(None, np.ones(4, np.float32))
    return push_event(worker, life, step, base, 0, epoch, update)


def beating(period=1.0, count=12):
    """Return shard 0 and a worker that sent a heartbeat every second."""
    core = core_of(method("asgd", nb_workers=2), lease=LEASE)
    join(core, 1)
    for beat in range(1, count + 1):
        core.handle(events.WorkerAlive(1), period * beat)
    return core, period * count


# -- suspicion ------------------------------------------------------------------------------


def test_who_is_silent_for_longer_than_usual_is_suspected_and_cleared_again():
    core, now = beating()
    assert core.membership.state_of(1) == "live"
    suspected_at = core.next_deadline()
    assert now + LEASE / 3 <= suspected_at < now + LEASE / 2
    core.handle(events.Tick(), suspected_at)
    assert core.membership.state_of(1) == "suspect"
    core.handle(events.WorkerAlive(1), suspected_at + 0.1)
    assert core.membership.state_of(1) == "live"
    assert core.membership.num_left == 0


def test_who_is_heard_seldom_is_suspected_later():
    core, now = beating(period=4.0)
    core.handle(events.Tick(), now + 6.0)
    assert core.membership.state_of(1) == "live"
    core.handle(events.Tick(), now + 8.5)
    assert core.membership.state_of(1) == "suspect"


def test_suspicion_ends_no_lease():
    core, now = beating()
    core.handle(events.Tick(), now + LEASE - 0.01)
    assert core.membership.admits(1, 1)
    core.handle(events.Tick(), now + LEASE)
    assert core.membership.state_of(1) == "left"


# -- two processes with one id ----------------------------------------------------------------


def test_a_second_process_is_refused_for_good_while_the_first_is_heard():
    core, now = beating()
    (refusal,) = of(events.Reject, core.handle(events.Join(1, 77, False, "other"), now + 1.0))
    assert (refusal.reason, refusal.retry_after_seconds) == ("ID_TAKEN", 0.0)
    assert "another id" in refusal.message


def test_a_second_process_may_ask_again_when_a_silent_first_one_would_be_out():
    core, now = beating()
    asked_at = now + 6.0
    (refusal,) = of(events.Reject, core.handle(events.Join(1, 77, False, "other"), asked_at))
    assert refusal.retry_after_seconds == pytest.approx(LEASE - 6.0)
    assert "silent for 6 s" in refusal.message
    again = asked_at + refusal.retry_after_seconds
    core.handle(events.Tick(), again)
    assert of(events.Welcome, core.handle(events.Join(1, 77, False, "other"), again))
    assert core.membership.incarnation_of(1) == 77


def test_a_silent_first_process_that_speaks_again_keeps_its_id():
    core, now = beating()
    core.handle(events.Join(1, 77, False, "other"), now + 6.0)
    core.handle(events.WorkerAlive(1), now + 7.0)
    (refusal,) = of(events.Reject, core.handle(events.Join(1, 77, False, "other"), now + 9.0))
    assert refusal.retry_after_seconds == 0.0


def test_a_reconnection_keeps_what_was_learnt_and_makes_no_epoch():
    core, now = beating()
    before, epoch = core.membership.leases[1].arrivals, core.membership.epoch
    core.handle(events.WorkerDisconnected(1, 1), now)
    assert core.membership.state_of(1) == "suspect"
    core.handle(events.Join(1, 1, True, "elsewhere"), now + 0.5)
    assert core.membership.state_of(1) == "live"
    assert core.membership.leases[1].arrivals is before
    assert core.membership.epoch == epoch


# -- a released worker is notified -------------------------------------------------------------


def test_who_asks_nothing_is_told_that_its_lease_has_ended():
    core, now = beating()
    (refusal,) = of(events.Reject, core.handle(events.Tick(), now + LEASE))
    assert (refusal.worker, refusal.reason, refusal.step) == (1, "NOT_MEMBER", 0)


def test_who_says_farewell_is_told_nothing():
    core, now = beating()
    assert of(events.Reject, core.handle(events.Leave(1, 1, "done"), now)) == []


# -- following shards ---------------------------------------------------------------------------


def test_epochs_name_lives_and_travel():
    core = core_of(method("gsp", nb_workers=3, groups=((1, 3), (2,))))
    join(core, 1)
    join(core, 2, incarnation=22)
    actions = join(core, 3, incarnation=33)
    (told,) = of(events.NewEpoch, actions)
    assert told.epoch.incarnations == (1, 22, 33)
    assert told.epoch.joiners == (Joiners((1, 3), True),)  # a group of one worker has no joiners
    assert decode_epoch(encode_epoch(told.epoch, core.rounds.groups)) == told.epoch


def test_lives_of_other_workers_than_there_are_are_malformed():
    message = encode_epoch(events.MembershipEpoch(3, (1, 2), True, None, (7, 8)), ((1, 2),))
    message.groups[0].incarnations.pop()
    with pytest.raises(Malformed, match="epoch 3: .*incarnation"):
        decode_epoch(message)


def test_an_entry_of_other_steps_than_members_is_malformed():
    joiner = Joiners((2,), has_entered=True, members=(1, 3), after=(5,))
    epoch = events.MembershipEpoch(3, (1, 2, 3), True, joiners=(joiner,))
    with pytest.raises(Malformed, match="epoch 3: "):
        decode_epoch(encode_epoch(epoch, ((1, 2, 3),)))


def test_who_joins_in_the_middle_of_a_round_enters_in_an_epoch_of_its_own():
    core = core_of(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    core.handle(events.Leave(3, 3, "done"), 0.0)
    push(core, 1, 1, 0)
    (joined,) = of(events.NewEpoch, join(core, 3))
    assert joined.epoch.joiners[-1] == Joiners((3,))
    actions = push(core, 2, 1, 0)
    (entered,) = of(events.NewEpoch, actions)
    assert entered.epoch.number == joined.epoch.number + 1
    assert entered.epoch.joiners == (Joiners((3,), True, (1, 2), (1, 1)),)
    assert {each.epoch for each in of(events.Reply, actions)} == {entered.epoch.number}
    for worker, step in ((1, 2), (2, 2), (3, 1)):
        push(core, worker, step, 1)
    core.handle(events.Leave(2, 2, "done"), 0.0)
    assert core._epoch_of(9).joiners == ()


def test_an_old_life_that_wakes_up_is_refused_by_a_following_shard():
    core = following()
    hello(core, 1, life=10, epoch=1)
    core.handle(events.MembershipEpoch(1, (1,), True, None, (10,)), 0.0)
    hello(core, 1, life=11, epoch=3)  # shard 0 has let another life in
    core.handle(events.MembershipEpoch(3, (1,), True, None, (11,)), 0.0)
    (refusal,) = of(events.Reject, hello(core, 1, life=10, epoch=1))
    assert refusal.reason == "ID_TAKEN"
    assert "peer11" in refusal.message
    (refusal,) = of(events.Reject, core.handle(push_of(1, 10, 5, epoch=3), 0.0))
    assert refusal.reason == "NOT_MEMBER"
    assert core.version == 0


def test_what_an_old_life_left_waiting_is_void_when_another_one_is_named():
    core = following()
    core.handle(events.MembershipEpoch(2, (2,), True, None, (20,)), 0.0)
    hello(core, 1, life=10, epoch=1)  # it left; this shard does not know its next incarnation
    assert of(events.Reply, core.handle(push_of(1, 10, 5, epoch=2), 0.0)) == []
    told = core.handle(events.MembershipEpoch(4, (1, 2), True, None, (11, 20)), 0.0)
    assert [each.reason for each in of(events.Reject, told)] == ["NOT_MEMBER"]
    assert core._members[1].buffered is None
    hello(core, 1, life=11, epoch=4)
    hello(core, 2, life=20, epoch=2)
    core.handle(push_of(1, 11, 6, epoch=4), 0.0)
    core.handle(push_of(2, 20, 1, epoch=4), 0.0)
    assert core.version == 1
    assert core.counters.rejected == {"left": 1}


def test_a_new_life_may_come_before_its_epoch_does():
    core = following()
    hello(core, 1, life=10, epoch=1)
    core.handle(events.MembershipEpoch(1, (1,), True, None, (10,)), 0.0)
    assert of(events.Welcome, hello(core, 1, life=11, epoch=3))
    assert of(events.Reject, core.handle(push_of(1, 11, 1, epoch=3), 0.0)) == []
    assert core.version == 0  # it waits for the epoch that names it


def test_a_shard_0_that_names_no_lives_is_believed():
    core = following()
    hello(core, 1, life=10)
    core.handle(events.MembershipEpoch(1, (1,), True), 0.0)
    core.handle(push_of(1, 10, 1, epoch=1), 0.0)
    assert core.version == 1


def test_a_following_shard_tells_whom_it_misses_again_and_again():
    core = following()
    for worker in (1, 2):
        hello(core, worker, life=10 * worker, epoch=2)
    core.handle(events.MembershipEpoch(2, (1, 2), True, None, (10, 20)), 1.0)
    assert core.next_deadline() == 1.0 + LEASE
    core.handle(events.WorkerAlive(2), 9.0)
    (missed,) = of(events.WorkersUnreachable, core.handle(events.Tick(), 1.0 + LEASE))
    assert missed.members == (events.WorkerIncarnation(1, 10),)
    assert of(events.WorkersUnreachable, core.handle(events.Tick(), 12.0)) == []
    (missed,) = of(events.WorkersUnreachable, core.handle(events.Tick(), 1.0 + 2 * LEASE))
    assert [life.worker for life in missed.members] == [1, 2]


def test_a_following_shard_that_stood_still_misses_nobody():
    core = following()
    hello(core, 1, life=10, epoch=1)
    core.handle(events.MembershipEpoch(1, (1,), True, None, (10,)), 0.0)
    assert of(events.WorkersUnreachable, core.handle(events.ProcessStalled(50.0), 51.0)) == []


def test_who_is_missed_elsewhere_is_let_go_once():
    core = core_of(method("bsp", nb_workers=2), lease=LEASE)
    join(core, 1)
    join(core, 2)
    push(core, 2, 1, 0)
    unheard = events.WorkerUnreachable(events.WorkerIncarnation(1, 1))
    actions = core.handle(unheard, 5.0)
    assert of(events.NewEpoch, actions)[0].epoch.live == (2,)
    assert [reply.worker for reply in of(events.Reply, actions)] == [2]
    assert of(events.NewEpoch, core.handle(unheard, 6.0)) == []
    assert core.membership.num_left == 1


def test_another_life_than_the_missed_one_stays():
    core = core_of(method("asgd"), lease=LEASE)
    join(core, 1)
    core.handle(events.WorkerUnreachable(events.WorkerIncarnation(1, 99)), 1.0)
    assert core.membership.admits(1, 1)


# -- giving up what waits for a round -------------------------------------------------------------


@pytest.mark.parametrize("waits_early", [False, True], ids=["in its round", "before its epoch"])
def test_who_asks_for_the_model_waits_no_longer_with_its_push(waits_early):
    core = following()
    for worker in (1, 2):
        hello(core, worker, life=10 * worker, epoch=1)
    core.handle(events.MembershipEpoch(1, (1, 2), True, None, (10, 20)), 0.0)
    assert of(events.Reply, core.handle(push_of(1, 10, 3, epoch=1 + waits_early), 0.0)) == []
    (reply,) = of(events.Reply, core.handle(events.Pull(1, 10, None, 0), 1.0))
    assert (reply.worker, reply.step) == (1, 0)
    assert core.counters.rejected == {"left": 1}
    core.handle(push_of(2, 20, 1, epoch=1), 2.0)
    assert core.version == 0  # the round waits for another push of worker 1
    core.handle(push_of(1, 10, 4, epoch=1), 3.0)
    assert core.version == 1


def test_coordinator_and_follower_answer_the_same_questions():
    def names(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert names(Coordinator) == names(FollowerMembership)


def test_a_restarted_shard_0_numbers_epochs_beyond_all_that_others_may_know():
    """Its snapshot is of an earlier epoch; following shards ignore epochs that are not newer."""
    before = core_of(method("bsp", nb_workers=3), lease=LEASE)
    join(before, 1)
    kept = before.state_dict()
    for life in range(5):  # after the snapshot
        join(before, 2, incarnation=20 + life)
    after = core_of(method("bsp", nb_workers=3), lease=LEASE, generation=1)
    after.load_state_dict(kept)
    join(after, 1)
    assert after.membership.epoch > before.membership.epoch


def test_a_worker_that_returns_is_not_silent_for_the_time_of_its_former_incarnation():
    shard = FollowerMembership(2, LEASE)
    list(shard.follow(events.MembershipEpoch(1, (1, 2), True, None, (10, 20)), 0.0))
    shard.seen(2, LEASE - 1)
    list(shard.follow(events.MembershipEpoch(2, (1, 2), True, None, (11, 20)), LEASE - 1))
    assert shard.unreachable(LEASE + 1) == []
    silent = shard.unreachable(2 * LEASE - 1)
    assert sorted(each.worker for each in silent) == [1, 2]
    assert [each.incarnation for each in silent if each.worker == 1] == [11]

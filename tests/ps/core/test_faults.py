"""An event that makes the core fail expels its sender; all other workers continue."""

import dataclasses

import numpy as np
import pytest
from absl import logging

from tests.ps.journaled_run import JournaledRun, assert_same, everything
from tests.ps.streams import HONEST, ROGUE, frame
from tests.ps.wire.test_claims import Talk, refusals
from tests.pushes import push_event, with_numbers
from tests.virtual.shard import core_of, guarded, join, joined, of
from tests.virtual.toy import method
from thinwire.ops.types import Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.membership import FollowerMembership
from thinwire.ps.persistence.journal import JournaledCore


class Boom(Exception):
    """An unexpected error."""


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


def break_at(core, wanted, where="handle"):
    """Make one call raise: the first with event `wanted`, or a call of `where` in the core."""
    left, before = [1], type(core)

    def handle(self, *arguments, **named):
        if left and (where != "handle" or wanted(arguments[0])):
            left.clear()
            raise Boom("over this")
        return getattr(before, where)(self, *arguments, **named)

    core.__class__ = type("Broken", (before,), {where: handle})
    return left


def of_rogue(kind):
    return lambda event: isinstance(event, kind) and event.worker == ROGUE


CAUSES = {
    "push": (events.Push, lambda talk: talk.push(ROGUE)),
    "query": (events.Query, lambda talk: talk.query(ROGUE)),
    "pull": (events.Pull, lambda talk: talk.say(ROGUE, frame(pull=pb.Pull()))),
    "leave": (events.Leave, lambda talk: talk.say(ROGUE, frame(leave=pb.Leave(cause="done")))),
    "malformed": (events.PushRejected, lambda talk: talk.push(ROGUE, samples=2**31 - 1)),
}


@pytest.mark.parametrize("name", ["adacomp", "bsp", "esync"])
@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_the_writer_thread_survives_and_puts_the_sender_out(name, cause):
    talk = Talk(name)
    core, epoch = talk.core, talk.core.membership.epoch
    kind, say = CAUSES[cause]
    left = break_at(core, of_rogue(kind))
    talk.push(HONEST)  # waits for the other one, if its rule wants that
    say(talk)
    assert not left
    refusal = [each for each in refusals(talk.streams[ROGUE]) if "Boom: over this" in each.message]
    assert [each.reason for each in refusal] == [pb.REASON_NOT_MEMBER]
    assert "Send Hello again" in refusal[0].message
    assert core.counters.rejected["fault"] == 1 and core.counters.workers[ROGUE].refused >= 1
    assert core.membership.state_of(ROGUE) == "left" and core.membership.epoch > epoch
    assert core.rounds.live() == (HONEST,)
    before = core.version
    talk.push(HONEST)
    assert core.version == before + 1
    assert not refusals(talk.streams[HONEST])
    core.counters.rejected.pop("fault")
    talk.check()  # and the rogue may come back


def test_a_hello_that_fails_is_refused_and_its_stream_ended():
    talk = Talk("asgd")
    break_at(talk.core, of_rogue(events.Join))
    talk.join(ROGUE)
    assert next(each.reason for each in refusals(talk.streams[ROGUE])) == pb.REASON_MALFORMED
    assert talk.streams[ROGUE].closed
    talk.push(HONEST)
    talk.core.counters.rejected.pop("fault")
    talk.check()


def test_with_quarantine_the_sender_stays_out_for_a_term():
    core = joined(guarded(method("asgd"), quarantine_after=5, quarantine_seconds=8.0))
    break_at(core, of_rogue(events.Pull))
    journaled = JournaledCore(core)
    journaled.handle(events.Pull(ROGUE, ROGUE, None, 0), 1.0)
    [refusal] = of(events.Reject, journaled.handle(events.Join(ROGUE, 9, False, "peer"), 2.0))
    assert (refusal.reason, refusal.retry_after_seconds) == ("QUARANTINED", 7.0)


@pytest.mark.parametrize("where", ["_settle", "_release"])
def test_whoever_waits_is_answered_though_a_round_broke_off(where):
    core = core_of(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    journaled, update = JournaledCore(core), np.ones(4, np.float32)

    def push(worker, step):
        like = dataclasses.replace(_push(core, worker, step), update=Update(None, update))
        return of(events.Reply, journaled.handle(like, 1.0))

    assert push(1, 1) == push(2, 1) == []
    break_at(core, None, where)
    answered = {reply.worker for reply in push(3, 1)}
    assert answered == {1, 2}
    assert core.rounds.live() == (1, 2)
    assert push(1, 2) == []
    assert {reply.worker for reply in push(2, 2)} == {1, 2}


def _push(core, worker, step):
    empty = Update(None, np.zeros(4, np.float32))
    return push_event(
        worker, worker, step, core.version, 0, core.membership.epoch, empty, 1, 1, 1.0
    )


def test_a_following_shard_asks_shard_0_to_put_the_sender_out():
    core = guarded(method("bsp"), leads=False)
    assert isinstance(core.membership, FollowerMembership)
    for worker in (1, 2):
        core.handle(events.Join(worker, worker, False, "peer"), 0.0)
    core.handle(events.MembershipEpoch(1, (1, 2), True, None, (1, 2)), 0.0)
    break_at(core, of_rogue(events.Push))
    actions = JournaledCore(core).handle(_push(core, ROGUE, 1), 1.0)
    assert [each.members for each in of(events.WorkersUnreachable, actions)] == [
        (events.WorkerIncarnation(ROGUE, ROGUE),)
    ]
    assert [each.reason for each in of(events.Reject, actions)] == ["NOT_MEMBER"]


def test_what_is_no_workers_doing_is_not_survived():
    core = core_of(method("asgd"))
    break_at(core, lambda event: isinstance(event, events.Tick))
    with pytest.raises(Boom):
        JournaledCore(core).handle(events.Tick(), 1.0)


class Survivor(JournaledRun):
    """Every event goes by a journaled core, which meets one that fails."""

    def feed(self, shard, event):
        core = self.shards[shard]
        if not self.journals:
            return super().feed(shard, event)
        journaled = JournaledCore(core)
        journaled.write_to(self.journals[shard], {})
        journaled.config = core.config
        self.shards[shard] = journaled
        try:
            return self._carry_out(shard, event)
        finally:
            self.shards[shard] = core

    def _carry_out(self, shard, event):
        if isinstance(event, events.Push):
            event = with_numbers(event, loss=float(np.float32(event.head.loss)))
        actions = self.shards[shard].handle(event, self.now)
        core, self.shards[shard] = self.shards[shard], self.shards[shard].core
        for action in actions:
            if isinstance(action, events.Reply) and self.workers[action.worker].alive:
                self.workers[action.worker].take(shard, self.decoded(shard, action))
        self.shards[shard] = core
        return actions


@pytest.mark.parametrize("name", ["adacomp", "bsp"])
def test_a_replay_does_not_try_again_what_has_failed(name, tmp_path):
    chosen = method(name, 3, **({"compression_rate": 0.2} if name == "adacomp" else {}))
    run = Survivor(tmp_path, chosen, iter_max=1000)
    run.join_all()
    for _ in range(10):
        run.turn()
    left = break_at(run.shards[0], of_rogue(events.Push))
    while left:
        assert run.turn()
    run.workers[ROGUE].alive = False
    for _ in range(10):
        run.turn()
    assert run.shards[0].counters.rejected["fault"] == 1
    come, core = run.come_back()  # the core that replays has no reason to fail
    assert come.damage is None and come.num_records == run.journals[0].num_records
    durable, soft = everything(run.shards[0])
    again = everything(core)
    assert_same((durable, soft), again)
    assert core.version == run.shards[0].version


def test_a_record_at_the_end_that_nobody_handled_is_cut_off(tmp_path):
    """The shard died of it, as one without these precautions does."""
    run = JournaledRun(tmp_path, method("adacomp", 2, compression_rate=0.2))
    run.join_all()
    for _ in range(5):
        run.turn()
    before = everything(run.shards[0])
    worker = run.workers[ROGUE]
    run.journals[0].append(events.Pull(ROGUE, worker.incarnation, None, 0), run.now)
    made = run.fresh

    def fresh(*arguments):
        core = made(*arguments)
        break_at(
            core,
            lambda event: (
                event == events.Pull(ROGUE, worker.incarnation, None, 0) and core.version > 0
            ),
        )
        return core

    run.fresh = fresh
    come, core = run.come_back()
    assert "Boom: over this" in come.damage
    assert come.num_records == run.journals[0].num_records - 1
    assert_same(before, everything(core))


def test_the_state_after_a_failure_is_saved_though_nothing_was_applied():
    """The event may have changed a part of it, which no replay repeats."""
    core = joined(core_of(method("asgd")))
    core.handle(events.Stop("interrupted"), 1.0)
    assert core.snapshot_if_new() == []
    for worker in (1, 2):
        actions = core.handle(events.Failed(worker, worker, 1, False, "Boom"), 2.0)
        [saved] = of(events.SaveSnapshot, actions)[:1]
        assert saved.version == core.version == 0
        assert saved.state["counters"]["rejected"]["fault"] == worker


def test_the_journal_has_the_rejection_of_an_event_that_cannot_be_coded(tmp_path):
    """A replay expels the worker too."""
    run = JournaledRun(tmp_path, method("asgd", 2), iter_max=99)
    run.join_all()
    run.turn()
    journaled = JournaledCore(run.shards[0])
    journaled.write_to(run.journals[0], {})
    update = Update(None, np.ones(28, np.float32))
    epoch = run.shards[0].membership.epoch
    bad = push_event(1, 1000, 9, 0, 0, epoch, update, 1, 1, "no number")
    journaled.handle(bad, run.now)
    assert run.shards[0].membership.state_of(1) == "left"
    come, core = run.come_back()
    assert come.damage is None
    for was, now in zip(everything(run.shards[0]), everything(core), strict=True):
        assert_same(was, now)

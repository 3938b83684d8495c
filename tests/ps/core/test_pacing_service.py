"""Requests to a restarted state server before its group has started."""

import pytest

from tests.virtual.run import MiniRun
from tests.virtual.shard import core_of, join, of, push, reasons
from tests.virtual.toy import method
from thinwire.ps.core import events

PATIENCE = 30.0


def ask(core, worker, step, local_steps, now, seconds=0.1):
    event = events.Query(worker, worker, step, local_steps, seconds, 0.0, 0.0)
    return core.handle(event, now)


def told(core, *question):
    [answer] = of(events.Answer, ask(core, *question))
    return answer.ready


def come_back(patience=PATIENCE):
    """A restored shard after three rounds; only the fast worker 1 has sent Hello again."""
    chosen = method("esync")
    before = core_of(chosen)
    for worker in (1, 2):
        join(before, worker)
    for step in (1, 2, 3):
        for worker in (1, 2):
            push(before, worker, step, before.version, now=float(step))
    assert before.version == 3
    core = core_of(chosen, generation=1, start_timeout_seconds=patience, lease=1e6)
    core.load_state_dict(before.state_dict())
    core.handle(events.Join(1, 1, True, "peer1"), 10.0)
    return core


def test_one_question_of_a_worker_that_just_joined_is_answered():
    core = core_of(method("esync"))
    core.handle(events.Join(1, 1, False, "peer"), 0.0)
    assert told(core, 1, 1, 1, 1.0) is False
    assert not core.has_started


def test_a_fast_worker_trains_on_until_the_slow_one_is_back():
    core = come_back()
    assert [told(core, 1, 4, steps, 10.0 + steps) for steps in range(1, 15)] == [False] * 14
    assert join(core, 2, 25.0)
    assert core.has_started
    ask(core, 2, 4, 0, 25.0, seconds=1.0)  # the slow one begins its round
    assert told(core, 1, 4, 15, 25.1) is False
    assert told(core, 1, 4, 16, 25.95) is True
    push(core, 1, 4, 3, now=25.96, generation=1)
    replies = of(events.Reply, push(core, 2, 4, 3, now=26.0, generation=1))
    assert {reply.worker for reply in replies} == {1, 2}
    assert core.version == 4


def test_it_pushes_alone_once_the_slow_one_has_not_come_in_time():
    core = come_back()
    assert told(core, 1, 4, 1, 11.0) is False
    core.handle(events.Tick(), 10.0 + PATIENCE)
    assert core.has_started
    assert told(core, 1, 4, 2, 10.1 + PATIENCE) is True
    [reply] = of(events.Reply, push(core, 1, 4, 3, now=10.2 + PATIENCE, generation=1))
    assert (reply.version, core.version) == (4, 4)


def test_a_push_before_the_start_waits_for_it():
    """The worker's own limit of local steps needs no request."""
    core = come_back()
    assert told(core, 1, 4, 1, 11.0) is False
    assert not of(events.Reply, push(core, 1, 4, 3, now=12.0, generation=1))
    join(core, 2, 13.0)
    epoch = core.membership.epoch
    refused = of(events.Reject, push(core, 1, 4, 3, now=13.0, generation=1))
    assert not refused and epoch == core.membership.epoch
    replies = of(events.Reply, push(core, 2, 4, 3, now=14.0, generation=1))
    assert {reply.worker for reply in replies} == {1, 2}


def test_a_push_from_before_the_restart_waits_elsewhere_for_the_others():
    """Worker 1 takes the model here; another shard, which did not restart, has the same push."""
    core = come_back()
    assert join(core, 2, 11.0)
    assert reasons(push(core, 1, 4, 3, now=11.1, generation=0)) == ["STALE_GENERATION"]
    assert told(core, 2, 4, 1, 11.2) is True
    ask(core, 1, 5, 0, 11.3, seconds=1.0)  # worker 1 begins its next round, as the slowest
    assert told(core, 2, 4, 2, 11.4) is True  # earlier answers stay
    push(core, 2, 4, 3, now=11.5, generation=1)
    push(core, 1, 5, 3, now=12.3, generation=1)
    assert core.version == 4


def test_after_a_refused_push_its_next_round_is_waited_for():
    core = come_back()
    assert join(core, 2, 11.0)
    push(core, 1, 4, 3, now=11.1, generation=0)
    ask(core, 1, 5, 0, 11.3, seconds=1.0)
    assert told(core, 2, 4, 1, 11.4) is False
    assert told(core, 2, 4, 2, 12.25) is True


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_whose_shard_comes_back_goes_on_to_its_end(first):
    run = MiniRun(method("esync"), iter_max=20, seed=3)
    run.join_all()
    while run.shards[0].version < 8:
        assert run.turn()
    kept = run.shards[0].state_dict()
    run.settings = type(run.settings)(**(vars(run.settings) | {"generation": 1}))
    run.shards[0] = run._shard(0, run.theta)
    run.shards[0].load_state_dict(kept)
    workers = [run.workers[first], run.workers[3 - first]]
    for worker in workers:  # each continues its round; the first requests before the other is back
        event = events.Join(worker.number, worker.incarnation, True, "peer")
        run.feed(0, event)
        if worker.computing and worker.core.round.num_steps:
            [answer] = of(events.Answer, worker.ask())
        else:
            event = events.Query(worker.number, worker.incarnation, 99, 3, 0.01, 0.0, 0.0)
            [answer] = of(events.Answer, run.feed(0, event))
        assert worker is workers[1] or not answer.ready
    for worker in workers:
        worker.join(reconnects=True)
    while run.turn():
        pass
    assert run.shards[0].version == 20
    assert not run.deadlocked()


def test_the_last_summary_is_of_the_end_though_somebody_was_away_before():
    core = core_of(method("esync"))
    for worker in (1, 2):
        join(core, worker)
        ask(core, worker, 1, 0, 0.0, seconds=0.1 * worker)
    core.handle(events.Leave(2, 2, "done"), 1.0)
    early = core.summary()["esync"]
    join(core, 2, 2.0)
    for worker in (1, 2):
        ask(core, worker, 1, 0, 2.0, seconds=0.7)
        ask(core, worker, 1, 1, 2.0, seconds=0.7)
    final = core.summary()["esync"]
    assert final != early
    for worker in (2, 1):
        core.handle(events.Leave(worker, worker, "done"), 3.0)
    assert core.summary()["esync"] == final

"""Workers that rejoin in the middle of a round, and pushes that arrive after their answer."""

import dataclasses

from tests.pushes import with_numbers
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ps.core import events


def push_of(run, number):
    """Return a worker's next push, as of an epoch that is yet to come."""
    worker = run.workers[number]
    batch = worker.batches.integers(0, len(run.problem.y), run.batch)
    _, gradient = run.problem.gradient(worker.core.weights, batch)
    worker.outgoing = worker.core.begin(gradient, run.batch, 1.0) or worker.core.end_round()
    return run.push_event(worker, 0)


def answered(run, push, **numbers):
    """Let a push arrive; return the workers that may now continue."""
    push = dataclasses.replace(push, epoch=run.shards[0].membership.epoch)
    actions = run.feed(0, with_numbers(push, **numbers))
    return {each.worker for each in actions if isinstance(each, events.Reply)}


def test_an_answer_to_a_push_means_that_it_was_applied():
    """Let in, the worker was answered; its next push took the place of the one that waited."""
    run = MiniRun(method("bsp", 3), iter_max=50)
    run.join_all()
    first, second, third = (push_of(run, number) for number in (1, 2, 3))
    for worker in run.workers.values():
        worker.alive = False  # answers are looked at here
    for _ in range(2):
        run.now += 6.0
        for worker in (1, 2):
            run.feed(0, events.WorkerAlive(worker))
    assert run.shards[0].rounds.live() == (1, 2)  # the lease of worker 3 is over
    assert answered(run, first) == set()
    run.feed(0, events.Join(3, third.incarnation, True, "peer"))
    assert answered(run, third) == set()
    accounts = run.shards[0].counters
    # The worker is admitted when the round is over, and its push is of the next round.
    assert answered(run, second) == {1, 2}
    assert accounts.worker(3).pushes == 0
    assert answered(run, first, step=2) == set()
    assert answered(run, second, step=2) == {1, 2, 3}
    assert accounts.worker(3).pushes == 1


def test_a_push_that_comes_late_takes_no_answer_from_a_newer_one():
    """Answered by the old step's number, the worker would have waited for ever."""
    run = MiniRun(method("bsp", 2), iter_max=50)
    run.join_all()
    first, second = (push_of(run, number) for number in (1, 2))
    for worker in run.workers.values():
        worker.alive = False
    assert answered(run, first) == set()
    assert answered(run, second) == {1, 2}
    assert answered(run, first, step=2) == set()
    assert answered(run, first) == set()  # held up on a stream that worker 1 gave up
    actions = run.feed(0, with_numbers(second, step=2))
    assert {(each.worker, each.step) for each in actions} == {(1, 2), (2, 2)}
    run.feed(0, events.Pull(1, first.incarnation, None, 0))
    assert [type(each) for each in run.feed(0, first)] == [events.Reply]  # sent again: answered


def test_nobody_trains_on_for_ever_beside_one_that_has_pushed_unasked():
    """After its lease, worker 2 has no record and requests nothing: it waits for its round."""
    run = MiniRun(method("esync", 2), iter_max=50)
    run.join_all()
    first, second = run.workers[1], run.workers[2]

    def ask(worker, steps):
        query = events.Query(worker.number, worker.incarnation, 1, steps, 0.1, 0.0, 0.0)
        return [each.ready for each in run.feed(0, query) if isinstance(each, events.Answer)]

    for worker in (first, second):
        worker.alive = False
        ask(worker, 0)
    push = push_of(run, 2)
    run.feed(0, events.Leave(2, second.incarnation, "its lease is over"))
    run.feed(0, events.Join(2, second.incarnation, True, "peer"))
    run.now += 1.0
    assert answered(run, push) == set()
    assert ask(first, 1) == [True]


def test_a_push_that_waited_while_its_group_changed_is_sent_again():
    """Merged here with others than on shard 0, it would have put the shards out of step."""
    run = MiniRun(method("bsp", 2), iter_max=50, nb_ps=2)
    run.join_all()
    pushes = []
    for number in (1, 2):
        push_of(run, number)
        pushes.append(run.push_event(run.workers[number], 1))
    epoch = run.shards[0].membership.epoch
    run.feed(1, events.MembershipEpoch(epoch + 1, (), True))  # shard 0 has lost both
    for push in pushes:
        assert run.feed(1, dataclasses.replace(push, epoch=epoch + 1)) == []
    told = run.feed(1, events.MembershipEpoch(epoch + 2, (1,), True))
    assert [(each.reason, each.epoch) for each in told if isinstance(each, events.Reject)] == [
        ("STALE_EPOCH", epoch + 2)
    ]
    assert run.shards[1].version == 0  # worker 1 alone would have been a round
    again = dataclasses.replace(pushes[0], epoch=epoch + 2)
    assert {each.worker for each in run.feed(1, again) if isinstance(each, events.Reply)} == {1}

"""A reply reports how long the shard held it back and how stale the push was."""

import pytest

from tests.virtual.shard import core_of, join, of, push
from tests.virtual.toy import method
from thinwire.ps.core import events


def replies_by_worker(actions):
    return {reply.worker: reply for reply in of(events.Reply, actions)}


def test_a_barrier_holds_the_early_and_not_the_last():
    core = core_of(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    assert of(events.Reply, push(core, 1, 1, 0, now=1.0)) == []
    assert of(events.Reply, push(core, 2, 1, 0, now=1.5)) == []
    replies = replies_by_worker(push(core, 3, 1, 0, now=4.0))
    assert {worker: reply.held_seconds for worker, reply in replies.items()} == {
        1: 3.0,
        2: 2.5,
        3: 0.0,
    }
    assert {reply.staleness for reply in replies.values()} == {0}


def test_without_a_barrier_nobody_is_held_and_staleness_is_counted():
    core = core_of(method("asgd", nb_workers=2))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0, now=1.0)
    push(core, 1, 2, 1, now=2.0)
    (late,) = of(events.Reply, push(core, 2, 1, 0, now=9.0))
    assert (late.held_seconds, late.staleness) == (0.0, 2)


def test_a_bound_holds_and_does_not_change_the_staleness():
    core = core_of(method("ssp", nb_workers=2, staleness_bound=1))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0, now=1.0)
    assert of(events.Reply, push(core, 1, 2, 1, now=2.0)) == []
    replies = replies_by_worker(push(core, 2, 1, 0, now=5.0))
    assert replies[1].held_seconds == 3.0
    # Held back past another's update, yet its own update was fresh when it was applied.
    assert (replies[1].staleness, replies[1].version) == (0, 3)


def test_a_pull_is_of_no_push():
    core = core_of(method("asgd", nb_workers=2))
    join(core, 1)
    join(core, 2)
    push(core, 1, 1, 0)
    push(core, 2, 1, 0)
    (pulled,) = of(events.Reply, core.handle(events.Pull(2, 2, None, 0), 1.0))
    assert pulled.staleness == 0
    assert pulled.held_seconds == pytest.approx(0.0)

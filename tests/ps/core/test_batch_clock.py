"""The count of a script's batches: fractions add up exactly and survive a restart."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pushes import push_event
from tests.virtual.shard import core_of, joined, of
from tests.virtual.toy import method
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.batch_clock import BatchClock


@given(st.integers(1, 7), st.lists(st.integers(0, 14), max_size=40), st.integers(0, 10**9))
def test_parts_add_up_exactly(nb_workers, parts, first):
    clock = BatchClock(nb_workers, first=(first,))
    for each in parts:
        clock.count(each)
    assert clock.batches(0) == first + sum(parts) // nb_workers
    other = BatchClock(nb_workers, first=(0,))
    other.load_state_dict(clock.state_dict())
    for each in (clock, other):
        each.count(1)
    assert clock.batches(0) == other.batches(0)
    wider = BatchClock(3 * nb_workers, first=(0,))  # as --resume with more workers
    wider.load_state_dict(clock.state_dict())
    assert wider.batches(0) == clock.batches(0)


def test_each_optimizer_of_a_ps_counts_what_is_for_it():
    clock = BatchClock(2, 2, first=(0, 10))
    for optimizer in (0, 0, 1, 0):
        clock.count(2, optimizer)
    assert [clock.batches(0), clock.batches(1)] == [3, 11]


def test_optimizers_on_the_workers_count_the_same_batches():
    clock = BatchClock(2, first=(0, 10))
    clock.count(4)
    assert [clock.batches(0), clock.batches(1)] == [2, 12]


def pushed(core, worker, step, local_steps, parts):
    """Push a change of weights after local steps; none of them is a round without examples."""
    values = np.ones(4 if local_steps else 0, np.float32)
    update = Update(None if local_steps else np.empty(0, np.int64), values)
    epoch, samples = core.membership.epoch, 8 * local_steps
    about = {"samples": samples, "local_steps": local_steps, "batch_parts": parts}
    event = push_event(worker, worker, step, core.version, 0, epoch, update, **about)
    return core.handle(event, 0.0)


def counts(actions):
    return [reply.schedule_counts for reply in of(events.Reply, actions)]


@pytest.mark.parametrize("idle", [(2,), (1, 2)])
def test_a_round_counts_the_parts_of_those_without_an_example(idle):
    """The script's batch is consumed, though these workers had no row of it."""
    core = joined(core_of(method("fedavg", 2, local_steps=3), first_batches=(5,)))
    for step in (1, 2):
        steps = [0 if worker in idle else 3 for worker in (1, 2)]
        actions = itertools.chain(*(pushed(core, w, step, steps[w - 1], 3) for w in (1, 2)))
        assert counts(actions) == [(5 + 3 * step,)] * 2
    assert core.version == (0 if len(idle) == 2 else 2)


def test_what_a_lost_worker_has_not_pushed_is_not_counted():
    core = joined(core_of(method("bsp", 2), first_batches=(0,)))
    pushed(core, 1, 1, 1, 1)
    actions = core.handle(events.Leave(2, 2, "error"), 0.0)
    assert core.version == 1 and counts(actions) == [(0,)]
    assert counts(pushed(core, 1, 2, 1, 1)) == [(1,)]

"""Repeated, broken and late datagrams and pushes, and the state stored for them."""

import dataclasses

import numpy as np
import pytest

from tests.ps.port import alone, ramp, values_of
from thinwire.ps.core import events


def test_a_stale_epoch_is_asked_again_and_gets_the_same_update():
    port, worker = alone()
    outgoing = worker.begin(ramp())
    worker.send(outgoing)
    worker.mark(outgoing, epoch=0)
    assert [each.reason for each in port.refusals] == ["STALE_EPOCH"]
    assert port.core.version == 0
    worker.send(outgoing)  # the client sends everything again
    worker.mark(outgoing)
    assert port.core.version == 1
    first, second = port.pushed
    np.testing.assert_array_equal(values_of(first), values_of(second))
    np.testing.assert_array_equal(values_of(second), ramp())
    counters = port.counters(1)[0]
    assert counters.num_closed == 1 and counters.dropped["duplicate"] == sum(counters.num_announced)


@pytest.mark.parametrize("marker", ["step", "tensor"])
def test_a_push_that_was_answered_is_answered_again_and_not_applied(marker):
    port, worker = alone(dgt_marker=marker)
    outgoing = worker.begin(ramp())
    worker.push(outgoing)
    after = port.theta
    worker.mark(outgoing)
    worker.mark(outgoing)
    assert port.core.version == 1 and port.counters(1)[0].num_closed == 1
    assert [each.step for each in port.replies] == [0, 1, 1, 1]
    np.testing.assert_array_equal(port.theta, after)
    worker.push(worker.begin(ramp(2)))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(2))


def test_a_push_that_broke_off_is_taken_up_again():
    port, worker = alone(dgt_marker="tensor", dgt_wait_ms=1000.0)
    outgoing = worker.begin(ramp())
    messages = worker.messages(outgoing)
    assert len(messages) > 2 and all(push.more for push, _ in messages[:-1])
    for push, payload in messages[:2]:
        port.receiver.on_push(1, push, payload)
    port.turn()
    assert not port.pushed
    again = port.join(1, worker.incarnation, reconnects=True)
    assert again.welcome.datagrams == worker.welcome.datagrams
    worker.push(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp())


def test_a_push_broken_off_for_good_gives_way_to_the_next():
    port, worker = alone(dgt_marker="tensor")
    push, payload = worker.messages(worker.begin(ramp()))[0]
    port.receiver.on_push(1, push, payload)
    worker.push(worker.begin(ramp(2)))
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp(2))
    assert port.core.version == 1


def test_a_restarted_shard_takes_the_push_again_in_a_new_session():
    _, worker = alone()
    outgoing = worker.begin(ramp())
    old = worker.datagrams(outgoing)
    reborn, other = alone()
    worker.port, worker.incarnation = reborn, other.incarnation
    worker.leg.open("peer:1", other.welcome)
    assert worker.datagrams(outgoing) != old
    worker.push(outgoing)
    np.testing.assert_array_equal(values_of(reborn.pushed[0]), ramp())


def test_late_ones_come_with_the_next_step_and_those_of_the_last_one_are_counted():
    port, worker = alone()
    first = worker.begin(ramp())
    worker.mark(first)
    worker.send(first)
    second = worker.begin(ramp(10))
    worker.mark(second)
    reliable = values_of(port.pushed[0])
    np.testing.assert_array_equal(values_of(port.pushed[1]), np.where(reliable, ramp(10), ramp()))
    port.queue.append(events.Stop("iter_max"))
    port.turn()
    after = port.theta
    worker.send(second)
    worker.mark(worker.begin())
    np.testing.assert_array_equal(port.theta, after)
    counters = port.counters(1)[0]
    assert sum(counters.num_late) == sum(counters.num_announced[:]) * 2 // 3
    assert port.receiver.outcome(1, 1) is None
    assert port.core.version == 2


@pytest.mark.parametrize("reception", ["diff", "drop"])
def test_what_is_kept_does_not_grow(reception):
    """Half of the datagrams are lost, some late, some twice: 200 steps, then as many again."""
    port, worker = alone(dgt_reception=reception)
    rng = np.random.default_rng(5)
    held, sizes = [], []
    for step in range(400):
        outgoing = worker.begin(ramp())
        data = worker.datagrams(outgoing)
        fates = rng.integers(0, 4, len(data))
        for each, fate in zip(data, fates, strict=True):
            if fate == 1:
                port.receiver.receive(memoryview(each[0]), each[1])
        worker.mark(outgoing)
        held = [*held, *(each for each, fate in zip(data, fates, strict=True) if fate > 1)][-40:]
        for each in held[::7]:
            port.receiver.receive(memoryview(each[0]), each[1])
        port.pushed.clear(), port.replies.clear()
        if step in (199, 399):
            sizes.append(_kept(port.receiver._sessions.of_worker(1).reassembler))
    assert sizes[0] == pytest.approx(sizes[1], abs=20) and max(sizes) < 200
    assert port.core.version == 400


def _kept(assembler):
    """How many objects an assembler holds on to."""
    late = assembler._late.values()
    return (
        len(assembler._past)
        + len(assembler._window._open)
        + len(late)
        + sum(len(each.starts) + len(each.values) for each in late)
    )


def test_numbers_of_steps_may_pass_two_to_the_32():
    port, worker = alone(dgt_wait_ms=1000.0)
    worker.core.step = 2**32 - 3
    for number in range(6):
        worker.push(worker.begin(ramp(number + 1)))
        np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(number + 1))
    assert port.core._members[1].last_step == 2**32 + 3
    assert port.core.version == 6 and not port.counters(1)[0].num_incomplete


def test_counts_go_on_where_an_earlier_life_of_the_shard_ended():
    port, worker = alone()
    worker.push(worker.begin())
    port.receiver.receive(memoryview(b"nobody's" * 20), 160)
    before = port.receiver.counts()
    reborn, other = alone()
    reborn.receiver.restore(before)
    other.push(other.begin())
    found = reborn.receiver.counts()
    assert found.workers[1].num_closed == 2
    assert found.dropped == {"not Thinwire's": 1}
    assert dataclasses.asdict(before.workers[1])["num_closed"] == 1

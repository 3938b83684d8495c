"""Pushes put together of streams and datagrams, by the real receptions before a real core."""

import dataclasses
import math

import numpy as np
import pytest

from ops.sync import SyncRule
from ps import events
from ps.membership import Follower
from tests.ps.port import Port, alone, ramp, started, values_of


@pytest.fixture
def port():
    return Port()


@pytest.mark.parametrize("marker", ["step", "tensor"])
@pytest.mark.parametrize("order", ["datagrams first", "datagrams last"])
def test_a_push_is_all_that_came(marker, order):
    port, worker = alone(dgt_marker=marker, dgt_wait_ms=1000.0)
    outgoing = worker.begin(ramp())
    first, last = worker.send, worker.mark
    if order == "datagrams last":
        first, last = last, first
    first(outgoing)
    assert not port.pushed
    last(outgoing)
    np.testing.assert_array_equal(values_of(port.turn().pushed[0]), ramp())
    outcome = port.receptions.outcome(1, 1)
    assert outcome.announced == outcome.arrived > 0
    assert port.pushed[0].num_bytes > 28 * 4 + 80  # both ways, with the datagrams' frames
    assert port.core.version == 1


def test_what_does_not_come_is_zero_when_the_wait_is_over():
    port, worker = alone(dgt_wait_ms=1000.0)
    outgoing = worker.begin(ramp())
    worker.mark(outgoing)
    assert port.receptions.next_deadline() == 1.0
    port.now = 0.999
    port.tick()
    assert not port.pushed
    port.now = 1.0
    port.tick()
    found = values_of(port.pushed[0])
    reliable = found != 0
    assert 0 < reliable.sum() < 28
    np.testing.assert_array_equal(found[reliable], ramp()[reliable])
    assert port.receptions.next_deadline() is None


# -- sessions ---------------------------------------------------------------------------------


def test_a_stream_that_breaks_keeps_the_session_and_another_life_gets_another(port):
    one, two, three = started(port)
    again = port.join(3, three.incarnation, reconnects=True)
    assert again.welcome.datagrams == three.welcome.datagrams
    port.queue.append(events.Lost(3, three.incarnation))
    port.turn()
    anew = port.join(3, 3001)
    assert anew.welcome.datagrams.session != three.welcome.datagrams.session
    assert anew.welcome.datagrams.key != three.welcome.datagrams.key
    before = port.theta
    three.send(three.begin())
    assert port.dropped()["unknown session"] > 0
    np.testing.assert_array_equal(port.theta, before)
    for each in (one, two, anew):
        each.push(each.begin(ramp(each.number)))
    assert port.core.version == 1
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(3))


def test_sessions_and_keys_are_random_and_stay_out_of_sight(port):
    workers = started(port)
    said = [each.welcome.datagrams for each in workers]
    assert len({each.session for each in said}) == len({each.key for each in said}) == 3
    assert all(len(each.key) == 32 for each in said)
    pictures = [
        repr(vars(port.receptions)),
        repr(vars(port.port)),
        repr(port.receptions.received()),
    ]
    for each in said:
        for picture in pictures:
            assert repr(each.key) not in picture and each.key.hex() not in picture


def test_a_worker_that_joins_in_the_middle_of_a_round_keeps_its_session(port):
    one, two, three = started(port)
    port.queue.append(events.Leave(3, three.incarnation, "interrupted"))
    port.turn()
    one.push(one.begin())  # the round has begun, two is awaited
    again = port.join(3, 3001)
    assert port.core.sync_state["joining"] == [3]
    two.push(two.begin())
    assert port.core.version == 1
    for each in (one, two, again):
        each.push(each.begin(np.full(28, each.number, np.float32)))
    assert port.core.version == 2
    np.testing.assert_array_equal(values_of(port.pushed[-1]), np.full(28, 3, np.float32))


def test_a_following_shard_keeps_the_session_of_whom_it_has_not_heard_yet(port):
    """Hello may come before shard 0's word that the worker is a member, and behind an older one."""
    port.core.membership = Follower(3)
    port.core.sync = SyncRule(port.core.sync.groups)
    one, two = port.join(1), port.join(2)
    for number, live in ((1, (1,)), (2, (1, 2))):
        port.queue.append(events.Epoch(number, live, True))
        port.turn()
    assert len(port.receptions.numbers()) == 2
    two.push(two.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp())
    for number, live in ((3, (1,)), (4, (1, 2))):  # its next life is there before its end
        if number == 3:
            again = port.join(2, 2001)
        port.queue.append(events.Epoch(number, live, True))
        port.turn()
    again.push(again.begin(ramp(2)))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(2))
    port.queue.append(events.Epoch(5, (2,), True))
    port.turn()
    assert port.receptions.numbers() == [again.welcome.datagrams.session]
    one.send(one.begin())
    assert port.dropped()["unknown session"] > 0


def test_who_leaves_has_no_session_any_more(port):
    one, two, three = started(port)
    port.queue.append(events.Leave(2, two.incarnation, "interrupted"))
    port.turn()
    sessions = {each.welcome.datagrams.session for each in (one, three)}
    assert set(port.receptions.numbers()) == sessions
    two.send(two.begin())
    assert port.dropped()["unknown session"] > 0


@pytest.mark.parametrize("loss", [0.5, math.nan])
def test_a_push_that_waits_when_its_session_ends_is_refused(loss):
    port = Port(nb_workers=3, dgt_wait_ms=60_000.0)
    _, two, _ = started(port)
    two.mark(two.begin(), loss=loss)
    assert not port.pushed and not port.refusals
    port.receptions.end_all()
    port.turn()
    assert [(each.worker, each.reason, each.step) for each in port.refusals] == [
        (2, "NON_FINITE" if math.isnan(loss) else "NOT_MEMBER", 1)
    ]
    assert port.core.version == 0 and not port.core.members[2].pending


@pytest.mark.parametrize("incarnation", [None, 77])
def test_a_push_without_a_session_is_refused_and_never_an_empty_one(port, incarnation):
    one, _, _ = started(port)
    outgoing = one.begin()
    if incarnation is None:
        messages = one.messages(outgoing)
        port.receptions.end_all()
    else:
        messages = one.messages(outgoing, incarnation=incarnation)
    for push, payload in messages:
        port.receptions.mark(1, push, payload)
    port.turn()
    assert [(each.worker, each.reason, each.step) for each in port.refusals] == [
        (1, "NOT_MEMBER", 1)
    ]
    assert not port.core.members[1].pending and not port.core.members[1].early
    again = port.join(1, one.incarnation, reconnects=True)  # as the refusal asks
    again.push(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[-1]), np.ones(28, np.float32))


# -- repeats ----------------------------------------------------------------------------------


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
    books = port.books(1)[0]
    assert books.num_closed == 1 and books.dropped["duplicate"] == sum(books.num_announced)


@pytest.mark.parametrize("marker", ["step", "tensor"])
def test_a_push_that_was_answered_is_answered_again_and_not_applied(marker):
    port, worker = alone(dgt_marker=marker)
    outgoing = worker.begin(ramp())
    worker.push(outgoing)
    after = port.theta
    worker.mark(outgoing)
    worker.mark(outgoing)
    assert port.core.version == 1 and port.books(1)[0].num_closed == 1
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
        port.receptions.mark(1, push, payload)
    port.turn()
    assert not port.pushed
    again = port.join(1, worker.incarnation, reconnects=True)
    assert again.welcome.datagrams == worker.welcome.datagrams
    worker.push(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp())


def test_a_push_broken_off_for_good_makes_room_for_the_next():
    port, worker = alone(dgt_marker="tensor")
    push, payload = worker.messages(worker.begin(ramp()))[0]
    port.receptions.mark(1, push, payload)
    worker.push(worker.begin(ramp(2)))
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp(2))
    assert port.core.version == 1


def test_a_restarted_shard_takes_the_push_again_in_a_new_session():
    _, worker = alone()
    outgoing = worker.begin(ramp())
    old = worker.datagrams(outgoing)
    reborn, other = alone()
    worker.port, worker.incarnation = reborn, other.incarnation
    worker.leg.opened("peer:1", other.welcome)
    assert worker.datagrams(outgoing) != old
    worker.push(outgoing)
    np.testing.assert_array_equal(values_of(reborn.pushed[0]), ramp())


# -- late -------------------------------------------------------------------------------------


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
    books = port.books(1)[0]
    assert sum(books.num_late) == sum(books.num_announced[:]) * 2 // 3
    assert port.receptions.outcome(1, 1) is None
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
                port.receptions.take(memoryview(each[0]), each[1])
        worker.mark(outgoing)
        held = [*held, *(each for each, fate in zip(data, fates, strict=True) if fate > 1)][-40:]
        for each in held[::7]:
            port.receptions.take(memoryview(each[0]), each[1])
        port.pushed.clear(), port.replies.clear()
        if step in (199, 399):
            sizes.append(_kept(port.receptions._sessions.of_worker(1).assembler))
    assert sizes[0] == pytest.approx(sizes[1], abs=20) and max(sizes) < 200
    assert port.core.version == 400


def _kept(assembler):
    """How many objects an assembler holds on to."""
    late = assembler._late._held.values()
    return (
        len(assembler._past) + len(assembler._window._open) + len(late)
        + sum(len(each.starts) + len(each.values) for each in late)
    )  # fmt: skip


def test_numbers_of_steps_may_pass_two_to_the_32():
    port, worker = alone(dgt_wait_ms=1000.0)
    worker.core.step = 2**32 - 3
    for number in range(6):
        worker.push(worker.begin(ramp(number + 1)))
        np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(number + 1))
    assert port.core.members[1].last_step == 2**32 + 3
    assert port.core.version == 6 and not port.books(1)[0].num_incomplete


def test_counts_go_on_where_an_earlier_life_of_the_shard_ended():
    port, worker = alone()
    worker.push(worker.begin())
    port.receptions.take(memoryview(b"nobody's" * 20), 160)
    before = port.receptions.received()
    reborn, other = alone()
    reborn.receptions.restore(before)
    other.push(other.begin())
    found = reborn.receptions.received()
    assert found.workers[1].num_closed == 2
    assert found.dropped == {"not Thinwire's": 1}
    assert dataclasses.asdict(before.workers[1])["num_closed"] == 1

"""Pushes assembled from streams and datagrams, by the real receiver and a real core."""

import math

import numpy as np
import pytest

from tests.ps.port import LocalPort, alone, ramp, started, values_of
from thinwire.ops.routing.datagram_format import HEADER
from thinwire.ps.core import events
from thinwire.ps.datagrams.receiver import headers_of


@pytest.fixture
def port():
    return LocalPort()


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
    outcome = port.receiver.outcome(1, 1)
    assert outcome.announced == outcome.arrived > 0
    assert port.pushed[0].num_bytes > 28 * 4 + 80  # both ways, with the datagrams' frames
    assert port.core.version == 1


def test_what_does_not_come_is_zero_when_the_wait_is_over():
    port, worker = alone(dgt_wait_ms=1000.0)
    outgoing = worker.begin(ramp())
    worker.mark(outgoing)
    assert port.receiver.next_deadline() == 1.0
    port.now = 0.999
    port.tick()
    assert not port.pushed
    port.now = 1.0
    port.tick()
    found = values_of(port.pushed[0])
    reliable = found != 0
    assert 0 < reliable.sum() < 28
    np.testing.assert_array_equal(found[reliable], ramp()[reliable])
    assert port.receiver.next_deadline() is None


# -- sessions ---------------------------------------------------------------------------------


def test_a_stream_that_breaks_keeps_the_session_and_another_life_gets_another(port):
    one, two, three = started(port)
    again = port.join(3, three.incarnation, reconnects=True)
    assert again.welcome.datagrams == three.welcome.datagrams
    port.queue.append(events.WorkerDisconnected(3, three.incarnation))
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
        repr(vars(port.receiver)),
        repr(vars(port.port)),
        repr(port.receiver.counts()),
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
    assert port.core.rounds.joining() == (3,)
    two.push(two.begin())
    assert port.core.version == 1
    for each in (one, two, again):
        each.push(each.begin(np.full(28, each.number, np.float32)))
    assert port.core.version == 2
    np.testing.assert_array_equal(values_of(port.pushed[-1]), np.full(28, 3, np.float32))


def test_a_following_shard_keeps_the_session_of_a_worker_that_is_no_member_yet():
    """Hello may come before shard 0's word that the worker is a member, and behind an older one."""
    port = LocalPort(nb_workers=3, follows=True)
    one, two = port.join(1), port.join(2)
    for number, live in ((1, (1,)), (2, (1, 2))):
        port.queue.append(events.MembershipEpoch(number, live, True))
        port.turn()
    assert len(port.receiver.session_ids()) == 2
    two.push(two.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp())
    for number, live in ((3, (1,)), (4, (1, 2))):  # its next incarnation starts before its end
        if number == 3:
            again = port.join(2, 2001)
        port.queue.append(events.MembershipEpoch(number, live, True))
        port.turn()
    again.push(again.begin(ramp(2)))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(2))
    port.queue.append(events.MembershipEpoch(5, (2,), True))
    port.turn()
    assert port.receiver.session_ids() == [again.welcome.datagrams.session]
    one.send(one.begin())
    assert port.dropped()["unknown session"] > 0


def test_who_leaves_has_no_session_any_more(port):
    one, two, three = started(port)
    port.queue.append(events.Leave(2, two.incarnation, "interrupted"))
    port.turn()
    sessions = {each.welcome.datagrams.session for each in (one, three)}
    assert set(port.receiver.session_ids()) == sessions
    two.send(two.begin())
    assert port.dropped()["unknown session"] > 0


@pytest.mark.parametrize("loss", [0.5, math.nan])
def test_a_push_that_waits_when_its_session_ends_is_refused(loss):
    port = LocalPort(nb_workers=3, dgt_wait_ms=60_000.0)
    _, two, _ = started(port)
    two.mark(two.begin(), loss=loss)
    assert not port.pushed and not port.refusals
    port.receiver.end_all_sessions()
    port.turn()
    assert [(each.worker, each.reason, each.step) for each in port.refusals] == [
        (2, "NON_FINITE" if math.isnan(loss) else "NOT_MEMBER", 1)
    ]
    assert port.core.version == 0 and not port.core._members[2].submitted


@pytest.mark.parametrize("incarnation", [None, 77])
def test_a_push_without_a_session_is_refused_and_never_an_empty_one(port, incarnation):
    one, _, _ = started(port)
    outgoing = one.begin()
    if incarnation is None:
        messages = one.messages(outgoing)
        port.receiver.end_all_sessions()
    else:
        messages = one.messages(outgoing, incarnation=incarnation)
    for push, payload in messages:
        port.receiver.on_push(1, push, payload)
    port.turn()
    assert [(each.worker, each.reason, each.step) for each in port.refusals] == [
        (1, "NOT_MEMBER", 1)
    ]
    assert not port.core._members[1].submitted and not port.core._members[1].buffered
    again = port.join(1, one.incarnation, reconnects=True)  # as the rejection requests
    again.push(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[-1]), np.ones(28, np.float32))


@pytest.mark.parametrize(
    ("num_bytes", "has_header"),
    [
        (0, False),
        (HEADER.itemsize - 1, False),
        (HEADER.itemsize, True),
        (HEADER.itemsize + 15, True),
    ],
)
def test_a_shorter_last_datagram_counts_if_its_header_is_whole(num_bytes, has_header):
    heads = np.zeros(3, HEADER)
    heads["session"] = (5, 6, 7)
    first, second, third = (head.tobytes() + bytes(16) for head in heads)
    received = memoryview(first + second + third[:num_bytes])
    sessions = headers_of(received, len(first))["session"].tolist()
    assert sessions == ([5, 6, 7] if has_header else [5, 6])

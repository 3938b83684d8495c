"""The receiving thread's rounds, run by hand: fair reading, limits, pauses, batching."""

import contextlib
import socket

import pytest

from tests.proto.udp_fakes import Notes, poured
from thinwire.proto.udp import receiver as udp_receiver
from thinwire.proto.udp.receiver import UdpReceiver


class CpuClock:
    """Every reading is this many seconds later than the reading before."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@contextlib.contextmanager
def stepped(share, seconds_per_round, sleep=None):
    """A receiver with rounds run by hand, on fake clocks."""
    owner = Notes()
    owner.share = share
    now = [100.0]
    receiver = UdpReceiver(
        "127.0.0.1",
        2,
        owner,
        clock=lambda: now[0],
        cpu_clock=CpuClock(seconds_per_round),
        sleep=sleep or (lambda _: None),
    )
    owner.deadline = 0.0  # so that no round waits
    owner.tick = lambda _: None
    try:
        yield receiver, now
    finally:
        receiver.close()


def test_rejected_datagrams_make_their_channel_rest_until_time_has_paid():
    cost = udp_receiver._REJECTED_BURST_SECONDS + 1e-3
    with stepped(share=0, seconds_per_round=cost) as (receiver, now):
        poured(receiver, 3 * udp_receiver._ROUND_CALLS)
        receiver._round()
        first = receiver.counts()[0]
        assert (first.datagrams, first.rests) == (udp_receiver._ROUND_CALLS, 1)
        rest = 1e-3 / (udp_receiver.REJECTED_SHARE / 2)  # for two channels
        receiver._round()
        now[0] += 0.99 * rest
        receiver._round()
        assert receiver.counts()[0].datagrams == first.datagrams
        now[0] += 0.02 * rest
        receiver._round()  # takes the channel up again
        receiver._round()
        assert receiver.counts()[0].datagrams == 2 * first.datagrams


def test_a_resting_channel_holds_up_neither_the_others_nor_the_timer():
    with stepped(share=0, seconds_per_round=1.0) as (receiver, _):
        poured(receiver, 5)
        receiver._round()
        assert receiver.counts()[0].rests == 1
        ticks = []
        receiver._owner.tick = ticks.append
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
            each.connect(("127.0.0.1", receiver.ports[1]))
            each.send(b"y")
        receiver._round()
        assert receiver.counts()[1].datagrams == 1 and len(ticks) == 1


def test_what_is_taken_never_makes_a_channel_rest():
    with stepped(share=1, seconds_per_round=10.0) as (receiver, _):
        for _ in range(3):
            poured(receiver, 5)
            receiver._round()
        assert receiver.counts()[0].rests == 0
        assert receiver.counts()[0].taken == 15


def test_the_best_channel_is_read_first():
    with stepped(share=1, seconds_per_round=0.0) as (receiver, _):
        for port in reversed(receiver.ports):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
                each.connect(("127.0.0.1", port))
                each.send(b"z")
        receiver._round()
        assert [channel for channel, _ in receiver._owner.take(2)] == [1, 2]


def test_a_trickle_is_left_to_gather_but_the_first_of_it_and_floods_are_not():
    slept = []
    free = udp_receiver._FREE_SMALL_ROUNDS
    with stepped(share=1, seconds_per_round=0.0, sleep=slept.append) as (receiver, now):
        for _ in range(free):
            poured(receiver, 1)
            receiver._round()
        assert not slept
        poured(receiver, udp_receiver._SMALL_ROUND_DATAGRAMS)
        receiver._round()
        receiver._round()  # nothing there
        assert not slept
        poured(receiver, 1)
        receiver._round()
        assert slept == [pytest.approx(1e-3)]
        now[0] += 1.0
        poured(receiver, 1)
        receiver._round()
        assert len(slept) == 1


@pytest.mark.parametrize("joining", [False, True])
def test_equal_datagrams_of_a_round_are_handed_over_together(joining):
    owner = Notes()
    handed = []
    owner.deliver = lambda channel, data, size: handed.append((channel, len(data), size)) or 1
    owner.deadline = 0.0  # so that no round waits
    owner.tick = lambda _: None
    receiver = UdpReceiver("127.0.0.1", 1, owner, joining=joining)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        each.connect(("127.0.0.1", receiver.ports[0]))
        for size in (80, 80, 80, 60, 80, 90):
            each.send(bytes(size))
    receiver._round()
    assert handed == [(1, 300, 80), (1, 80, 80), (1, 90, 90)]
    assert receiver.counts()[0].datagrams == 6
    receiver.close()

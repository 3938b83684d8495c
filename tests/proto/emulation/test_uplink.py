"""The link with classes in real time, between streams, datagrams and real sockets."""

import errno
import socket
import struct
import threading
import time

import pytest

from tests.proto.udp_fakes import flush
from thinwire.ops.types import Link
from thinwire.proto.emulation.priority_link import SEND_BUFFER_BYTES
from thinwire.proto.emulation.uplink import (
    EmulatedSocket,
    PrioritySender,
    RunningLink,
    class_of_channel,
)
from thinwire.proto.udp.sender import UdpSettings, connect

SIZE = 1472
WAIT_SECONDS = 20.0


class Sink:
    """A socket that records sent datagrams and signals when there are enough."""

    def __init__(self, wanted=0):
        self.sent, self.wanted, self.enough, self.closed = [], wanted, threading.Event(), False

    def send(self, data):
        self.sent.append(bytes(data))
        if len(self.sent) >= self.wanted:
            self.enough.set()
        return len(data)

    def fileno(self):
        return -1 if self.closed else 3

    def close(self):
        self.closed = True


class Refusing(Sink):
    def send(self, data):
        super().send(data)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")


@pytest.fixture
def running():
    links = []

    def start(**given):
        links.append(RunningLink(Link(**given), seed=3))
        return links[-1]

    yield start
    for link in links:
        link.close()


def numbered(count, size=SIZE):
    return b"".join(struct.pack("<I", number).ljust(size, b".") for number in range(count))


def numbers(datagrams):
    return [struct.unpack_from("<I", data)[0] for data in datagrams]


def segments(size=SIZE):
    return [(17, 103, struct.pack("=H", size))]


# -- marks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "channels", "classes"),
    [
        ("cs", 7, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("cs", 3, [4, 5, 6, 7]),
        ("compact", 3, [2, 4, 6, 7]),
        ("off", 2, [7, 7, 7]),
        ("compact", 0, [7]),
    ],
)
def test_the_link_goes_by_the_marks(scheme, channels, classes):
    found = [class_of_channel(scheme, channel, channels) for channel in range(channels + 1)]
    assert found == classes


# -- one socket -------------------------------------------------------------------------------


def test_datagrams_arrive_later_and_whole(running):
    sink = Sink(wanted=45)
    way = EmulatedSocket(sink, running(mbps=20, delay_ms=30), 3)
    data, started = bytearray(numbered(45)), time.monotonic()
    assert way.sendmsg([memoryview(data)], segments()) == 45 * SIZE
    data[:] = bytes(len(data))  # the sender may use its buffer again
    assert sink.enough.wait(WAIT_SECONDS)
    assert time.monotonic() - started >= 0.030 + 45 * 1500 * 8 / 20e6
    assert numbers(sink.sent) == list(range(45))
    assert all(len(each) == SIZE for each in sink.sent)


def test_losses_and_duplicates_reach_the_socket(running):
    sink = Sink()
    way = EmulatedSocket(sink, running(mbps=1000, loss=0.2, duplicate=0.3), 3)
    data = numbered(132)
    for first in range(0, 132, 44):
        way.sendmsg([data[first * SIZE : (first + 44) * SIZE]], segments())
    deadline = time.monotonic() + WAIT_SECONDS
    while b"last" not in sink.sent and time.monotonic() < deadline:
        way.send(b"last")  # which may be lost, too
        sink.enough.wait(0.01)
        sink.enough.clear()
    arrived = numbers(each for each in sink.sent if each != b"last")
    assert 132 - len(set(arrived)) > 10
    assert len(arrived) - len(set(arrived)) > 10


def test_a_link_that_holds_enough_refuses_more(running):
    way = EmulatedSocket(Sink(), running(mbps=1), 3)
    taken = 0
    with pytest.raises(BlockingIOError):
        while taken <= 2 * SEND_BUFFER_BYTES:
            taken += way.sendmsg([numbered(44)], segments())
    assert SEND_BUFFER_BYTES - 45 * SIZE < taken < SEND_BUFFER_BYTES + 45 * SIZE
    other = EmulatedSocket(Sink(), way._link, 2)
    other.send(b"another class is free")


def test_who_never_gets_on_is_heard_now_and_then():
    """The sender above the socket drops rejected datagrams for a quarter of a second."""

    class Slow:
        seconds = 0.0

        def now(self):
            return self.seconds

        def has_space(self, priority):
            return False

        def offer_datagrams(self, *arguments):
            pass

    link = Slow()
    way = EmulatedSocket(Sink(), link, 3)
    with pytest.raises(BlockingIOError):
        way.send(b"x")
    link.seconds = 0.21
    assert way.send(b"x") == 1
    with pytest.raises(BlockingIOError):
        way.send(b"x")


def test_a_refusal_behind_the_link_is_a_loss(running):
    sink = Refusing(wanted=2)
    way = EmulatedSocket(sink, running(), 3)
    way.sendmsg([numbered(2)], segments())
    assert sink.enough.wait(WAIT_SECONDS)
    way.close()
    assert sink.closed


# -- streams together with datagrams -----------------------------------------------------------


def test_streams_wait_behind_urgent_datagrams_and_before_others(running):
    link = running(mbps=20)
    order, done = [], threading.Event()
    link.offer_datagrams(5, SIZE, 40, lambda arrival: order.append("first"))
    link.offer_datagrams(6, SIZE, 40, lambda arrival: (order.append("last"), done.set()))
    link.offer_datagrams(1, SIZE, 40, lambda arrival: order.append("urgent"))
    (ticket,) = link.offer(4, [50_000], link.now())
    ticket.result(WAIT_SECONDS)
    order.append("stream")
    assert done.wait(WAIT_SECONDS)
    assert order.index("urgent") < order.index("stream") < order.index("last")
    assert ticket.result() == 50_000


def test_marked_streams_pass_background_and_unmarked_ones_wait():
    link = Link(mbps=40, background_mbps=36, background_class=4)
    seconds = {}
    for scheme in ("cs", "off"):
        uplink = RunningLink(link, 1)
        sender = PrioritySender(uplink, class_of_channel(scheme, 0, 7))
        started = uplink.now()
        passed = list(sender.carry_all([50_000] * 2, started))
        seconds[scheme] = uplink.now() - started
        uplink.close()
        assert passed == [50_000] * 2
    alone = 100_000 * 8 / 40e6
    assert alone <= seconds["cs"] < 5 * alone < seconds["off"]


def test_closing_lets_everybody_go(running):
    link = running(mbps=0.001)
    tickets = link.offer(7, [10**6, 10**6], link.now())
    link.close()
    assert all(ticket.done() for ticket in tickets)
    assert all(ticket.done() for ticket in link.offer(7, [1], link.now()))
    link.close()


def test_an_error_in_what_lies_behind_ends_the_link(running):
    link = running()

    def broken(arrival):
        raise RuntimeError("no such thing")

    link.offer_datagrams(3, SIZE, 1, broken)
    link._thread.join(WAIT_SECONDS)
    assert not link._thread.is_alive()
    assert link.offer(7, [1], link.now())[0].done()


# -- with the real sender and real sockets ------------------------------------------------------


class Signed:
    def __init__(self, channel, data):
        self.channel, self.size, self.count = channel, SIZE, len(data) // SIZE
        self.data = memoryview(bytearray(data))

    def sign(self, key):
        self.data[SIZE - len(key) : SIZE] = key


def test_the_udp_sender_sends_over_an_emulated_link():
    receivers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    uplink = RunningLink(Link(mbps=200, delay_ms=5), 1)
    try:
        for receiver in receivers:
            receiver.bind(("127.0.0.1", 0))
            receiver.settimeout(WAIT_SECONDS)
        ports = [receiver.getsockname()[1] for receiver in receivers]
        sender = connect("127.0.0.1", ports, UdpSettings(b"key"), over=uplink.over("cs", 2))
        sender.send([Signed(1, numbered(30)), Signed(2, numbered(40))], step=1)
        assert flush(sender)
        got = [[r.recv(2000) for _ in range(n)] for r, n in zip(receivers, (30, 40), strict=True)]
        assert [numbers(each) for each in got] == [list(range(30)), list(range(40))]
        assert got[0][0].endswith(b"key")
        assert [counts.datagrams for counts in sender.counts()] == [30, 40]
        sender.close()
    finally:
        uplink.close()
        for receiver in receivers:
            receiver.close()

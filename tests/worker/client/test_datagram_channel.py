"""A worker's datagrams to one shard: over UDP, in the stream, and switches between the two."""

import types

import numpy as np
import pytest

from thinwire.ops.routing.base import Routed, Transport, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.types import Block, CodedValues, Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.emulation.uplink import PrioritySender
from thinwire.proto.udp.sender import ChannelCounts
from thinwire.worker.client.datagrams import DatagramChannel, WorkerTransport


class FakeSender:
    """Records the datagrams to send."""

    def __init__(self, key, mtu=1472):
        self.key, self.mtu, self.failure, self.closed = key, mtu, None, False
        self.sent = []

    def send(self, batches, step):
        self.sent.append((step, sum(batch.count for batch in batches)))

    def counts(self):
        return (ChannelCounts(datagrams=sum(count for _, count in self.sent)), ChannelCounts())

    def close(self):
        self.closed = True


class Way:
    """A channel and the senders that it has opened."""

    def __init__(self, **transport):
        self.opened = []
        router = types.SimpleNamespace(channels=2, marks_slots=False)
        self.channel = DatagramChannel(5, router, Transport(**transport), self._connect)

    def _connect(self, host, ports, key):
        self.opened.append((host, tuple(ports)))
        self.sender = FakeSender(key)
        return self.sender

    def welcome(self, session=1, ports=(7, 8), address="host:1"):
        said = pb.Welcome()
        said.datagrams.session, said.datagrams.key = session, bytes([session] * 32)
        said.datagrams.ports.extend(ports)
        self.channel.open(address, said)
        return self

    def push(self, step):
        """Send an exchange; return how many datagrams went before, during and after the push."""
        self.channel.seal(step, routed())
        before = sum(1 for _ in self.channel.before())
        beside = len(self.sender.sent) if self.opened else 0
        behind = sum(1 for _ in self.channel.after())
        beside = len(self.sender.sent) - beside if self.opened else 0
        return before, beside, behind


def routed():
    values = np.arange(64, dtype=np.float32)
    part = UnreliableBlocks(
        slot=0,
        size=64,
        block_entries=16,
        blocks=np.arange(3),
        channels=np.ones(3, np.uint8),
        encoding=ValueEncoding.FLOAT32,
        indices=None,
        data=values,
        scales=np.ones(4, np.float32),
        lows=np.zeros(4, np.float32),
    )
    return Routed((Block(0, 64, None, CodedValues("float32", values)),), (part,))


def answer(announced=3, arrived=3, came_late=0):
    return pb.DatagramOutcome(announced=announced, arrived=arrived, came_late=came_late)


@pytest.mark.parametrize(
    ("address", "host"), [("host:1", "host"), ("[::1]:50", "::1"), ("10.0.0.1:9", "10.0.0.1")]
)
def test_datagrams_go_to_the_ports_of_the_stream_s_host(address, host):
    way = Way().welcome(address=address)
    assert way.opened == [(host, (7, 8))]
    assert way.push(1) == (0, 1, 0)


def test_a_reconnection_goes_on_and_another_session_seals_anew():
    way = Way().welcome()
    first = way.channel.seal(1, routed())
    way.welcome()
    assert len(way.opened) == 1 and way.channel.seal(1, routed()) is first
    old = way.sender
    way.welcome(session=2)
    assert old.closed and len(way.opened) == 2
    assert way.channel.seal(1, routed()) is not first
    assert way.sender.key == bytes([2] * 32)


@pytest.mark.parametrize("ports", [(), (7, 8)])
def test_the_stream_alone_carries_them_behind_the_push(ports):
    """For any shard settings: the path of datagrams may differ between nodes."""
    way = Way(dgt_transport="grpc").welcome(ports=ports)
    assert way.push(1) == (0, 0, 1)
    assert not way.channel.fell_back and not way.opened


def test_where_next_to_nothing_comes_they_go_before_the_push_and_it_is_said_once(caplog):
    way = Way(dgt_fallback_steps=3, dgt_fallback_fill=0.1).welcome()
    for step, came in enumerate((0, 0, 1, 0, 0, 0, 0), 1):
        way.push(step)
        way.channel.record(answer(30, 0, 3 * came))
    assert way.channel.fell_back and way.sender.closed
    assert caplog.text.count("firewall") == 1
    assert way.push(8) == (1, 0, 0)
    way.welcome(session=2)  # for good
    assert way.push(8) == (1, 0, 0) and len(way.opened) == 1
    assert caplog.text.count("in the gRPC stream") == 1


@pytest.mark.parametrize(("arrived", "late"), [(3, 0), (0, 3), (1, 2)])
def test_what_comes_late_has_come(arrived, late):
    way = Way(dgt_fallback_steps=1, dgt_fallback_fill=0.1).welcome()
    way.channel.record(answer(30, arrived, late))
    assert not way.channel.fell_back


def test_nothing_announced_says_nothing():
    way = Way(dgt_fallback_steps=2).welcome()
    for announced in (30, 0, 30):
        assert not way.channel.fell_back
        way.channel.record(answer(announced, 0))
    assert way.channel.fell_back


def test_it_never_falls_back_if_told_so():
    way = Way(dgt_fallback_steps=0).welcome()
    for _ in range(200):
        way.channel.record(answer(30, 0))
    assert way.push(1) == (0, 1, 0)


@pytest.mark.parametrize("steps", [0, 20])
def test_a_sender_that_has_failed_is_noticed_at_the_next_push(steps, caplog):
    way = Way(dgt_fallback_steps=steps).welcome()
    assert way.push(1) == (0, 1, 0)
    sent = way.channel.counts()
    way.sender.failure = OSError("made here")
    assert way.push(2) == (1, 0, 0)
    assert way.channel.fell_back and way.sender.closed
    assert caplog.text.count("cannot be sent: OSError('made here')") == 1
    assert way.channel.counts()[0].datagrams > sent[0].datagrams  # the stream counts, too
    assert way.push(3) == (1, 0, 0)
    assert caplog.text.count("in the gRPC stream") == 1


def test_a_shard_that_has_lost_its_ports_gets_them_in_the_stream(caplog):
    way = Way().welcome()
    way.push(1)
    way.welcome(session=2, ports=())
    assert way.push(1) == (1, 0, 0)
    assert "no UDP ports" in caplog.text


def test_a_bitmap_says_what_is_lost():
    way = Way().welcome()
    way.channel.seal(1, routed())
    reception = answer(3, 2)
    reception.bitmap = bytes([0b101])
    (lost,) = way.channel.record(reception)
    assert lost.slot == 0 and lost.ranges.tolist() == [[16, 32]]


def test_nothing_is_sealed_before_the_welcome():
    with pytest.raises(ValueError, match="session"):
        Way().channel.seal(1, routed())


def test_ends_twice():
    way = Way().welcome()
    way.channel.close()
    way.channel.close()
    assert way.sender.closed


@pytest.mark.parametrize(
    ("link", "router", "sender"),
    [
        (Link(), Reliable(), None),
        (Link(), Dgt(), None),
        (Link(10.0), Reliable(), EmulatedSender),
        (Link(10.0), Dgt(), PrioritySender),
        (Link(10.0, background_mbps=1.0), Reliable(), PrioritySender),
    ],
)
def test_a_link_has_classes_where_something_may_overtake_the_stream(link, router, sender):
    transport = WorkerTransport(link, 1, Transport(), router)
    try:
        assert type(transport.sender) is (sender or type(None))
    finally:
        transport.close()

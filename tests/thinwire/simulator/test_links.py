"""Links with classes of service on the virtual clock: streams, datagrams, shared links."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.thinwire.simulator.test_simulation import played
from thinwire.ops.types import Link
from thinwire.proto.udp.sender import UdpSettings, pacing
from thinwire.simulator.clock import Clock
from thinwire.simulator.datagrams import SimulatedSender
from thinwire.simulator.links import ClassPipe, Pipe, carry, uplink_of

SIZE = 1472
UNIT_SECONDS = 1500 * 8 / 10e6  # seconds of one datagram at 10 Mbit/s


def play(clock):
    while clock.advance():
        pass


class Batch:
    """Datagrams that bear their numbers."""

    def __init__(self, channel, count, first=0):
        self.channel, self.count, self.size = channel, count, SIZE
        numbers = range(first, first + count)
        data = b"".join(struct.pack("<I", number).ljust(SIZE, b".") for number in numbers)
        self.data, self.num_signed = memoryview(bytearray(data)), 0

    def sign(self, key):
        self.num_signed += 1


def receiver(clock):
    """Return a list of (channel, numbers, seconds), and what fills it."""
    seen = []

    def deliver(data, size, channel):
        numbers = [struct.unpack_from("<I", data, at)[0] for at in range(0, len(data), size)]
        seen.append((channel, numbers, clock.now))

    return seen, deliver


def numbers_of(seen, channel):
    return [number for at, numbers, _ in seen if at == channel for number in numbers]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3000)), max_size=20), st.integers(0, 99))
def test_streams_alone_pass_as_on_the_plain_pipe(messages, seed):
    def passed(make):
        clock, arrived = Clock(), []
        hops = [make(clock), Pipe(Link(1.0))]
        for number, (when, size) in enumerate(sorted(messages)):

            def note(number=number):
                arrived.append((number, clock.now))

            def send(size=size, note=note):
                carry(clock, hops, [size, 100], True, note)

            clock.at(when, send)
        play(clock)
        return arrived, [hop.num_bytes for hop in hops]

    link = Link(0.1, 20, 0.2)
    plain = passed(lambda clock: Pipe(link, seed))
    own = passed(lambda clock: ClassPipe(clock, link, seed))
    assert own == plain


def test_only_links_that_need_classes_have_them():
    clock = Clock()
    assert isinstance(uplink_of(clock, Link(1.0), 1), Pipe)
    assert isinstance(uplink_of(clock, Link(1.0), 1, datagrams=True), ClassPipe)
    assert isinstance(uplink_of(clock, Link(1.0, background_mbps=0.5), 1), ClassPipe)


def test_background_slows_unmarked_pushes_down_and_nothing_else():
    links = [Link(0.1, 10), Link(0.1, 10, background_mbps=0.05, background_class=3)]
    free, shared = (played("asgd", 1, links=(link,), iter_max=20) for link in links)
    streams = [simulation.workers[0]._exchange for simulation in (free, shared)]
    assert streams[0].bytes_up == streams[1].bytes_up
    assert streams[0].bytes_down == streams[1].bytes_down
    extra = shared.clock.now - free.clock.now
    packet_seconds = 1500 * 8 / 0.1e6  # each push may find one under way
    assert 1 * packet_seconds < extra < 20 * packet_seconds
    assert streams[1].requested_at <= streams[1].sent_at <= shared.clock.now


def sender_of(clock, link, channels=2, max_late=2, bucket=None):
    pipe = ClassPipe(clock, link)
    seen, deliver = receiver(clock)
    sending = UdpSettings(b"key", max_late=max_late)
    return SimulatedSender(clock, pipe, sending, channels, deliver, bucket), pipe, seen


def test_datagrams_arrive_by_priority_and_signed_once():
    clock = Clock()
    sender, pipe, seen = sender_of(clock, Link(10.0, 7))
    low, high = Batch(2, 40), Batch(1, 44)
    sender.send([low, high], 1)
    carry(clock, [pipe], [50_000], True, lambda: seen.append((0, [], clock.now)))
    play(clock)
    assert numbers_of(seen, 1) == list(range(44))
    assert numbers_of(seen, 2) == list(range(40))
    assert (low.num_signed, high.num_signed) == (1, 1)
    last = {channel: max(at for c, _, at in seen if c == channel) for channel in (0, 1, 2)}
    assert last[1] == pytest.approx(0.007 + 44 * UNIT_SECONDS)
    assert last[2] == pytest.approx(0.007 + 84 * UNIT_SECONDS)
    # Without a mark, the stream has the class of the last channel, and arrived later.
    assert last[0] == pytest.approx(last[2] + 50_000 * 8 / 10e6)
    assert [counts.datagrams for counts in sender.counts()] == [44, 40]
    assert not sender._outbox


def test_what_waits_too_long_is_never_sent():
    """The link accepts as many bytes as a socket's buffer holds; later bytes wait at the sender."""
    clock = Clock()
    sender, _, seen = sender_of(clock, Link(10.0))
    sender.send([Batch(1, 44, 44 * part) for part in range(10)], 1)
    assert sender._outbox
    sender.send([Batch(1, 5, 1000)], 4)
    play(clock)
    counts = sender.counts()[0]
    taken = 4 * 44  # 212,992 bytes are 142 datagrams
    assert (counts.datagrams, counts.outdated) == (taken + 5, 440 - taken)
    assert numbers_of(seen, 1) == [*range(taken), *range(1000, 1005)]


def test_a_paced_sender_overflows_no_queue():
    for bucket, all_arrive in ((None, False), (pacing(9.0), True)):
        clock = Clock()
        sender, _, seen = sender_of(clock, Link(10.0, queue_kb=20), bucket=bucket)
        sender.send([Batch(1, 44, 44 * part) for part in range(10)], 1)
        play(clock)
        assert (len(numbers_of(seen, 1)) == 440) == all_arrive
    assert clock.now == pytest.approx(440 * 1500 * 8 / 9e6, rel=0.05)


def test_a_closed_sender_delivers_nothing():
    clock = Clock()
    sender, pipe, seen = sender_of(clock, Link(10.0, 50))
    sender.send([Batch(1, 44)], 1)
    sender.close()
    sender.close()
    sender.send([Batch(1, 44)], 2)
    play(clock)
    assert (seen, pipe.on_space) == ([], [])

"""Frames over a bulk connection: all splits and sizes, with and without TLS, and its end."""

import contextlib
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Papers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection, TcpWire, wire_bytes
from thinwire.proto.bulk.tls import TlsRecords, TlsWire, context_of
from thinwire.proto.framing import (
    MAX_MESSAGE_BYTES,
    MOST_INLINE_BYTES,
    Chunk,
    Malformed,
    MessageAssembler,
    frames,
)

WAIT_SECONDS = 20.0


def tcp_pair():
    """Two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname(), WAIT_SECONDS)
        other, _ = listening.accept()
    other.settimeout(WAIT_SECONDS)
    return one, other


def pair(protected=False):
    """Two ends of one connection."""
    one, other = tcp_pair()
    if not protected:
        return BulkConnection(TcpWire(one)), BulkConnection(TcpWire(other))
    papers = Papers()
    served = TlsRecords(context_of(papers.of("ps-0"), True), None)
    client = TlsRecords(context_of(papers.of("worker-1"), False), "127.0.0.1")
    while not (client.handshake() and served.handshake()):
        served.put(client.take())
        served.handshake()
        client.put(served.take())
    client.put(served.take())
    return BulkConnection(TlsWire(one, served)), BulkConnection(TlsWire(other, client))


@contextlib.contextmanager
def ends(protected=False):
    one, other = pair(protected)
    try:
        yield one, other
    finally:
        one.abort()
        other.abort()


def push(step, size=0):
    message = pb.ToServer()
    message.push.step = step
    return message, (bytes(range(step % 7, 251)) * (size // 244 + 1))[:size]


def in_background(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def send_all(connection, sent, chunk_bytes):
    for message, payload in sent:
        views = [memoryview(payload)[: len(payload) // 3], memoryview(payload)[len(payload) // 3 :]]
        for frame in frames(message, views, chunk_bytes):
            connection.send(frame)


def received(connection, count):
    assembler, got = MessageAssembler(pb.ToServer, lambda message: 1 << 30), []
    while len(got) < count:
        complete = assembler.feed(connection.receive(WAIT_SECONDS))
        if complete is not None:
            got.append((complete[0].push.step, bytes(complete[1])))
    return got


@pytest.mark.parametrize("protected", [False, True])
def test_messages_of_all_sizes_arrive_in_both_directions_at_a_time(protected):
    sizes = (0, 1, 70_000, MOST_INLINE_BYTES + 1, 3_000_001, 5, 0)
    sent = [push(step, size) for step, size in enumerate(sizes, 1)]
    with ends(protected) as both:
        senders = [in_background(send_all, end, sent, 1 << 20) for end in both]
        for end in both:
            assert received(end, len(sent)) == [(m.push.step, payload) for m, payload in sent]
        for sender in senders:
            sender.join(WAIT_SECONDS)


@given(
    sizes=st.lists(st.integers(0, 150_000), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=8),
    chunk=st.integers(16 << 10, 90_000),
)
def test_any_cut_of_the_bytes_gives_the_same_messages(sizes, cuts, chunk):
    """The bytes as one connection sends them, in pieces that TCP may make of them."""
    sent = [push(step, size) for step, size in enumerate(sizes, 1)]
    stream = Recorder()
    send_all(BulkConnection(stream), sent, chunk)
    end = BulkConnection(Replay(stream.data, cuts))
    assert received(end, len(sent)) == [(m.push.step, payload) for m, payload in sent]
    assert end.num_received == len(stream.data)
    assert end.receive(0.0) is None


class Recorder:
    """A wire that records the sent bytes."""

    def __init__(self):
        self.data = b""

    def send(self, parts):
        assert len(parts) <= 1024
        self.data += b"".join(parts)


class Replay:
    """A wire on which given bytes arrive, in pieces of given sizes, again and again."""

    def __init__(self, data, cuts):
        self.left, self.cuts, self.turn = memoryview(data), cuts, 0

    def wait(self, milliseconds):
        return True

    def receive_into(self, space):
        count = min(len(space), len(self.left), self.cuts[self.turn % len(self.cuts)])
        self.turn += 1
        space[:count], self.left = self.left[:count], self.left[count:]
        return count


def test_a_payload_of_very_many_small_parts_is_sent_whole():
    message, _ = push(1)
    parts = [bytes([at % 256]) * 150 for at in range(3000)]
    with ends() as (one, other):
        sender = in_background(lambda: [one.send(each) for each in frames(message, parts)])
        assert received(other, 1) == [(1, b"".join(parts))]
        sender.join(WAIT_SECONDS)


@pytest.mark.parametrize("sent", [b"abc", Chunk([memoryview(b"defg")], 4)])
def test_the_number_of_bytes_is_that_of_the_wire(sent):
    stream = Recorder()
    BulkConnection(stream).send(sent)
    assert len(stream.data) == wire_bytes(sent)


def test_silence_is_told_apart_from_the_end():
    with ends() as (one, other):
        with pytest.raises(TimeoutError):
            other.receive(0.01)
        assert not other.readable
        one.send(b"last")
        one.finish()
        assert other.receive(WAIT_SECONDS) == b"last"
        assert other.receive(WAIT_SECONDS) is None
        other.send(b"answer")  # the other direction still stands
        assert one.receive(WAIT_SECONDS) == b"answer"


def test_the_beginning_of_a_frame_outlives_a_time_out():
    left, right = tcp_pair()
    with left:
        end = BulkConnection(TcpWire(right))
        left.sendall(b"\0\0\0\4ab")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                end.receive(0.01)
        left.sendall(b"cd")
        assert end.receive(WAIT_SECONDS) == b"abcd"
        end.abort()


@pytest.mark.parametrize(
    "word", [MAX_MESSAGE_BYTES + 1, (1 << 31) | (MAX_MESSAGE_BYTES + 1), 1 << 31]
)
def test_a_length_that_no_frame_has_is_refused_before_anything_is_read(word):
    end = BulkConnection(Replay(word.to_bytes(4, "big") + bytes(100), [50]))
    with pytest.raises(Malformed, match="a frame of"):
        end.receive(0.0)


def test_bulk_bytes_without_a_message_before_them_are_malformed():
    end = BulkConnection(Replay((1 << 31 | 3).to_bytes(4, "big") + b"abc", [50]))
    assembler = MessageAssembler(pb.ToServer, lambda message: 1 << 30)
    with pytest.raises(Malformed, match="without a header"):
        assembler.feed(end.receive(0.0))


def test_bulk_bytes_beyond_the_payload_are_malformed():
    message, payload = push(1, MOST_INLINE_BYTES + 1)
    stream = Recorder()
    sender = BulkConnection(stream)
    for frame in frames(message, [payload]):
        sender.send(frame)
    sender.send(Chunk([memoryview(b"more")], 4))
    end = BulkConnection(Replay(stream.data, [1 << 20]))
    assembler = MessageAssembler(pb.ToServer, lambda message: 1 << 30)
    with pytest.raises(Malformed, match="without a header"):
        while True:
            assembler.feed(end.receive(0.0))


@pytest.mark.parametrize("protected", [False, True])
def test_an_abort_frees_those_who_send_and_receive(protected):
    with ends(protected) as (one, _):
        errors = []

        def fill():
            try:
                while True:
                    one.send(Chunk([memoryview(bytes(1 << 20))], 1 << 20))
            except OSError as error:
                errors.append(error)

        sender, receiver = in_background(fill), in_background(one.receive)
        time.sleep(0.1)
        assert sender.is_alive() and receiver.is_alive()
        one.abort()
        for thread in (sender, receiver):
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        assert errors
        with pytest.raises(OSError, match="closed"):
            one.send(b"x")
        assert one.receive(0.0) is None


def test_last_words_are_read_although_the_end_has_not_read_its_own():
    """A close with unread bytes makes the system reset the connection and drop bytes under way."""
    client, server = pair()
    client.send(b"never read")
    ending = in_background(lambda: (server.send(b"the run has ended"), server.end(WAIT_SECONDS)))
    time.sleep(0.1)
    assert client.receive(WAIT_SECONDS) == b"the run has ended"
    assert client.receive(WAIT_SECONDS) is None
    client.abort()
    ending.join(WAIT_SECONDS)
    assert not ending.is_alive()

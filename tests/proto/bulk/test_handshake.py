"""Each state of a bulk handshake at both ends, with and without TLS; a client's deadline."""

import contextlib
import itertools
import socket
import ssl
import threading

import pytest

from tests.certificates import Papers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.handshake import (
    MOST_HANDSHAKE_BYTES,
    PROOF_BYTES,
    TRANSITIONS,
    BulkFailure,
    Handshake,
    HandshakeState,
    NoBulkConnection,
    connect,
    number_of,
)
from thinwire.proto.bulk.tls import TlsRecords, context_of
from thinwire.runtime.run.credentials import NO_CREDENTIALS

KEY, NUMBER = bytes(range(32)), bytes(range(16))
WAIT_SECONDS = 20.0
PAPERS = Papers()


def records(serves):
    papers = PAPERS.of("ps-0" if serves else "worker-1")
    return TlsRecords(context_of(papers, serves), None if serves else "127.0.0.1")


def end(serves, protected=False, key=KEY, number=NUMBER, token=b""):
    return Handshake(number, key, token, records(serves) if protected else None, serves)


def pass_on(data, to, size):
    """Give an end these bytes in pieces of one size; return the bytes that the end sends."""
    answer = b""
    while data:
        count = min(size, to.wanted_bytes)
        piece, data = data[:count], data[count:]
        answer += to.receive(piece)
    return answer


def until_client_is_proven(client, shard, size=1 << 20):
    """Run both ends until the shard knows its client."""
    sending = client.begin()
    shard.begin()
    for _ in range(10):
        sending = pass_on(sending, shard, size)
        if shard.state is HandshakeState.PROVEN:
            return sending
        sending = pass_on(sending, client, size)
    raise AssertionError(f"{client.state}, {shard.state}")


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("protected", [False, True])
def test_both_ends_are_proven_whatever_the_pieces(protected, size):
    client, shard = end(False, protected), end(True, protected)
    begins = HandshakeState.SECURING if protected else HandshakeState.PROVING
    assert client.state is shard.state is begins
    left = until_client_is_proven(client, shard, size)
    assert client.state is HandshakeState.PROVING
    proof = shard._records.encrypt(shard.proof) if protected else shard.proof
    pass_on(left + proof, client, size)
    assert client.state is HandshakeState.PROVEN


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize(
    "other", [{"key": bytes(32)}, {"number": bytes(16)}, {"token": b"another one, long enough"}]
)
def test_a_false_proof_fails_at_the_shard(protected, other):
    client, shard = end(False, protected, **other), end(True, protected)
    with pytest.raises(ConnectionRefusedError, match="client of the stream"):
        until_client_is_proven(client, shard)
    assert shard.state is HandshakeState.FAILED


@pytest.mark.parametrize("data", [bytes(PROOF_BYTES), None])
def test_a_false_proof_fails_at_the_client(data):
    """The second one is the client's own, sent back."""
    client = end(False)
    sent = client.begin()
    with pytest.raises(ConnectionRefusedError, match="shard of the stream"):
        client.receive(sent if data is None else data)
    assert client.state is HandshakeState.FAILED


@pytest.mark.parametrize("serves", [False, True])
def test_what_is_no_tls_fails(serves):
    one = end(serves, protected=True)
    one.begin()
    with pytest.raises(ssl.SSLError):
        one.receive(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert one.state is HandshakeState.FAILED


def test_a_certificate_of_another_authority_fails():
    strangers = TlsRecords(context_of(Papers().of("ps-0"), True), None)
    shard = Handshake(NUMBER, KEY, b"", strangers, True)
    with pytest.raises(ssl.SSLError):
        until_client_is_proven(end(False, protected=True), shard)


def test_an_end_takes_in_so_much_and_no_more():
    """An endless TLS record, up to the limit."""
    shard = end(True, protected=True)
    hello = end(False, protected=True).begin()
    record = hello[:3] + (16000).to_bytes(2, "big") + b"\1" + (90_000).to_bytes(3, "big")
    with pytest.raises((ConnectionRefusedError, ssl.SSLError)):
        pass_on(record + bytes(MOST_HANDSHAKE_BYTES + 1), shard, 1000)
    assert shard.state is HandshakeState.FAILED
    assert shard._num_bytes <= MOST_HANDSHAKE_BYTES + 1000


def test_every_state_is_left_only_for_its_successors():
    assert set(TRANSITIONS) == set(HandshakeState)
    for state, other in itertools.product(HandshakeState, HandshakeState):
        one = end(True)
        one.state = state
        with (
            contextlib.nullcontext() if other in TRANSITIONS[state] else pytest.raises(RuntimeError)
        ):
            one._enter(other)


def test_each_attempt_has_a_number_that_needs_the_key():
    numbers = {number_of(NUMBER, KEY, attempt) for attempt in range(50)}
    assert len(numbers) == 50 and NUMBER in numbers
    assert number_of(NUMBER, bytes(32), 1) not in numbers


# -- the client's deadline -----------------------------------------------------------------------


class Clock:
    """Moves on by a step at each look."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@contextlib.contextmanager
def trickling(data):
    """A server that sends these bytes one by one, a byte for each that the client has taken."""
    listening = socket.create_server(("127.0.0.1", 0))
    num_sent = [0]

    def serve():
        with contextlib.suppress(OSError):
            connected, _ = listening.accept()
            with connected:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for byte in data:
                    connected.sendall(bytes([byte]))
                    num_sent[0] += 1
                    stop.wait(0.001)
                stop.wait(WAIT_SECONDS)

    stop = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield pb.BulkSession(port=listening.getsockname()[1], number=NUMBER, key=KEY)
    finally:
        stop.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("protected", [False, True])
def test_bytes_that_trickle_do_not_move_a_clients_deadline(protected):
    credentials = PAPERS.of("worker-1") if protected else NO_CREDENTIALS
    # A record of TLS that is announced to have 16,000 bytes.
    data = b"\x16\x03\x03\x3e\x80" + bytes(20_000) if protected else bytes(PROOF_BYTES - 1)
    clock = Clock(0.1)
    with trickling(data) as offered, pytest.raises(NoBulkConnection) as caught:
        connect("127.0.0.1", offered, credentials, None, None, 2.0, clock=clock)
    assert caught.value.failure is BulkFailure.TURNED_AWAY
    assert 2.0 < clock.now < 2.3


def test_the_addresses_of_a_host_share_the_deadline(monkeypatch):
    """The first address drops everything, as IPv6 does in many networks; the second one answers."""
    waited = []

    class Dropped(socket.socket):
        def connect(self, address):
            if address[1] == 1:
                waited.append(self.gettimeout())
                raise TimeoutError("timed out")
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Dropped)
    with trickling(bytes(PROOF_BYTES)) as offered:
        here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", offered.port))
        away = (*here[:4], ("127.0.0.1", 1))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [away, here])
        with pytest.raises(NoBulkConnection) as caught:
            connect("both", offered, NO_CREDENTIALS, None, None, 2.0)
    assert caught.value.failure is BulkFailure.DISTRUSTED  # the connection was checked
    assert len(waited) == 1 and 0.9 < waited[0] <= 1.0

"""A stream moves to its bulk connection, or stays: real servers, clients and strangers."""

import contextlib
import socket
import threading
import time

import pytest

from tests.certificates import Papers
from tests.proto.echoes import WAIT_SECONDS, connected, serving
from thinwire.ops.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.ops.types import Link
from thinwire.proto import bulk, grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import listener as listener_module
from thinwire.proto.framing import MessageAssembler, frame, frames
from thinwire.proto.grpc import client as client_module
from thinwire.proto.security.connection_guard import ConnectionGuard

TOKEN = b"a token of the run, long enough"
SIZE = 1_500_000


def answering(stream):
    """Offer a connection, then say every payload again; reports come in between."""
    assembler = MessageAssembler(pb.ToServer, lambda message: 1 << 30)
    offered = stream.offer_bulk()
    welcome = pb.Welcome() if offered is None else pb.Welcome(bulk=offered)
    stream.send((frame(pb.ToClient(welcome=welcome)),), counted=False)
    for data in stream.incoming():
        complete = assembler.feed(data)
        if complete is not None:
            message, payload = complete
            reply = pb.ToClient()
            reply.reply.version = message.push.step
            stream.send(frames(reply, [payload], lambda: stream.chunks.num_bytes))


def next_message(client, assembler):
    while (complete := assembler.feed(client.receive(WAIT_SECONDS))) is None:
        pass
    return complete


def talk(client, count=3):
    """Say Hello's part, then exchange payloads; return whether all of them came back."""
    assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 30)
    welcome, _ = next_message(client, assembler)
    if welcome.welcome.HasField("bulk"):
        client.switch(welcome.welcome.bulk)
    for step in range(1, count + 1):
        payload = bytes([step]) * SIZE
        message = pb.ToServer()
        message.push.step = step
        client.send(frames(message, [payload]))
        reply, back = next_message(client, assembler)
        assert reply.reply.version == step and bytes(back) == payload


@contextlib.contextmanager
def client_of(server, credentials):
    stream = grpc.ClientStream(f"127.0.0.1:{server.port}", credentials=credentials)
    try:
        stream.open(WAIT_SECONDS)
        yield stream
    finally:
        stream.close()


def uses_bulk(client):
    return client._receives_bulk


def credentials_of(kind):
    if kind == "tls":
        papers = Papers()
        return papers.of("ps-0"), papers.of("worker-1")
    if kind == "tls and token":
        papers = Papers()
        return papers.of("ps-0", TOKEN), papers.of("worker-1", TOKEN)
    token = Credentials(token=TOKEN) if kind == "token" else NO_CREDENTIALS
    return token, token


@pytest.mark.parametrize("kind", ["open", "token", "tls", "tls and token"])
def test_messages_move_to_the_connection(kind):
    mine, theirs = credentials_of(kind)
    with serving(answering, ConnectionGuard(mine)) as server, client_of(server, theirs) as client:
        talk(client)
        assert uses_bulk(client)
        most = 3 * (SIZE + 100)
        assert 3 * SIZE < client.bytes_sent < most and 3 * SIZE < client.bytes_received < most


def test_nothing_that_is_under_way_is_lost_or_overtaken():
    """The shard goes on talking while its client moves."""
    stop = threading.Event()

    def talkative(stream):
        def talk_on():
            number = 0
            while not stop.is_set():
                number += 1
                stream.send((frame(pb.ToClient(reply=pb.Reply(version=number))),))
                time.sleep(0.0002)
            stream.close()

        offered = stream.offer_bulk()
        stream.send((frame(pb.ToClient(welcome=pb.Welcome(bulk=offered))),), counted=False)
        threading.Thread(target=talk_on, daemon=True).start()
        for _ in stream.incoming():
            pass

    with serving(talkative) as server, connected(server) as client:
        assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 30)
        welcome, _ = next_message(client, assembler)
        time.sleep(0.02)
        client.switch(welcome.welcome.bulk)
        time.sleep(0.1)
        stop.set()
        numbers = []
        with contextlib.suppress(grpc.StreamLost):
            while True:
                numbers.append(next_message(client, assembler)[0].reply.version)
        assert uses_bulk(client)
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 50


def _nobody_listens(offered, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        offered.port = free.getsockname()[1]


def _a_mute_stranger_listens(offered, monkeypatch):
    monkeypatch.setattr(client_module, "_BULK_SECONDS", 0.2)
    mute = socket.create_server(("127.0.0.1", 0))
    _kept.append(mute)
    offered.port = mute.getsockname()[1]


def _the_key_is_another(offered, monkeypatch):
    offered.key = bytes(32)


def _the_number_is_another(offered, monkeypatch):
    offered.number = bytes(16)


_kept = []


@pytest.mark.parametrize(
    "spoil",
    [_nobody_listens, _a_mute_stranger_listens, _the_key_is_another, _the_number_is_another],
)
def test_without_a_way_everything_goes_over_grpc(monkeypatch, spoil):
    with serving(answering) as server, connected(server) as client:
        switch = client.switch

        def spoilt(offered):
            spoil(offered, monkeypatch)
            switch(offered)

        client.switch = spoilt
        talk(client)
        assert not uses_bulk(client)
    while _kept:
        _kept.pop().close()


def test_an_emulated_link_is_not_passed_by():
    def emulated(stream):
        stream.pace(Link(1000.0), 1.0, 0)
        answering(stream)

    with serving(emulated) as server, connected(server) as client:
        talk(client, 1)
        assert not uses_bulk(client)


@pytest.mark.parametrize("token", [b"", b"another token, long enough"])
def test_a_stolen_offer_is_of_no_use_without_the_token(token):
    offers = []

    def offering(stream):
        offers.append(stream.offer_bulk())
        for _ in stream.incoming():
            pass

    mine = Credentials(token=TOKEN)
    with serving(offering, ConnectionGuard(mine)) as server, client_of(server, mine):
        while not offers:
            time.sleep(0.01)
        with pytest.raises(OSError):
            bulk.connect("127.0.0.1", offers[0], Credentials(token=token), None, None, WAIT_SECONDS)
        with pytest.raises(OSError):  # and it is gone
            bulk.connect("127.0.0.1", offers[0], mine, None, None, 0.3)


def test_strangers_that_say_nothing_cost_no_thread_and_do_not_stay(monkeypatch):
    monkeypatch.setattr(listener_module, "_MOST_NAMELESS", 3)
    offers = []

    def offering(stream):
        offers.append(stream.offer_bulk())
        answering(stream)

    with serving(offering) as server, connected(server):
        while not offers:
            time.sleep(0.01)
        port, before = offers[0].port, threading.active_count()
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        with connected(server) as second:
            talk(second, 1)
            assert uses_bulk(second)
        assert threading.active_count() <= before + 1
        closed = 0
        for each in strangers:
            each.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                closed += each.recv(1) == b""
            each.close()
        assert closed >= 5


def test_nobody_is_accepted_while_no_offer_is_open():
    with serving(answering) as server, connected(server) as client:
        talk(client, 1)
        port = server._listener._port
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(0.3)
            stranger.sendall(bytes(16))
            with pytest.raises(TimeoutError):
                stranger.recv(1)
            with connected(server) as second:  # an offer opens the door: the stranger is sent away
                talk(second, 1)
                assert uses_bulk(second)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_when_grpc_ends_so_does_the_connection():
    streams = []

    def kept(stream):
        streams.append(stream)
        answering(stream)

    with serving(kept) as server, connected(server) as client:
        talk(client, 1)
        client._channel.close()
        with pytest.raises(grpc.StreamLost):
            client.receive(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not streams[0].lost:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_when_the_connection_ends_so_does_the_stream():
    with serving(answering) as server, connected(server) as client:
        talk(client, 1)
        client._bulk._wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(grpc.StreamLost):
            client.receive(WAIT_SECONDS)
        client._reader.join(WAIT_SECONDS)
        assert client.ended


def test_the_shards_last_words_arrive():
    def farewell(stream):
        offered = stream.offer_bulk()
        stream.send((frame(pb.ToClient(welcome=pb.Welcome(bulk=offered))),), counted=False)
        for data in stream.incoming():
            if data == b"bye":
                stream.send((b"go", b"well"))
                return

    with serving(farewell) as server, connected(server) as client:
        assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 30)
        client.switch(next_message(client, assembler)[0].welcome.bulk)
        client.send((b"bye", b"and more, which nobody reads"))
        assert [client.receive(WAIT_SECONDS) for _ in range(2)] == [b"go", b"well"]
        with pytest.raises(grpc.StreamLost):
            client.receive(WAIT_SECONDS)


def test_a_close_ends_the_shards_half_after_what_was_queued():
    heard, done = [], threading.Event()

    def listening(stream):
        offered = stream.offer_bulk()
        stream.send((frame(pb.ToClient(welcome=pb.Welcome(bulk=offered))),), counted=False)
        heard.extend(stream.incoming())
        done.set()

    with serving(listening) as server:
        with connected(server) as client:
            assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 30)
            client.switch(next_message(client, assembler)[0].welcome.bulk)
            for _ in range(100):
                client.send((b"x" * 1000,))
        assert done.wait(WAIT_SECONDS)
        assert heard == [b"x" * 1000] * 100

"""A stream moves to its bulk connection, or stays: real servers, clients and strangers."""

import collections
import contextlib
import socket
import threading
import time

import pytest

from tests.certificates import Papers
from tests.firewall import dropping
from tests.proto.echoes import WAIT_SECONDS, connected, serving
from tests.waiting import wait_until
from thinwire.ops.types import Link
from thinwire.proto import bulk, grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import listener as listener_module
from thinwire.proto.bulk import switching
from thinwire.proto.framing import MessageAssembler, frame, frames
from thinwire.proto.grpc.session import ClientSession
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    """Forget all servers, because another test's server may have had the same port."""
    monkeypatch.setattr(switching, "UNREACHABLE", switching.UnreachablePorts())


TOKEN = b"a token of the run, long enough"
SIZE = 1_500_000


def answering(stream):
    """Offer a connection, then echo every payload; reports come in between."""
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


def talk(client, count=3, moves=True):
    """Send Hello's part, then exchange payloads; return True if all payloads came back."""
    assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 30)
    welcome, _ = next_message(client, assembler)
    if welcome.welcome.HasField("bulk"):
        client.switch(welcome.welcome.bulk)
        client.moved.wait(WAIT_SECONDS if moves else 0.0)
    for step in range(1, count + 1):
        talk_on(client, step, assembler)


def talk_on(client, step, assembler=None):
    """Exchange one payload."""
    assembler = assembler or MessageAssembler(pb.ToClient, lambda message: 1 << 30)
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
    """The shard continues sending while its client switches."""
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
        assert client.moved.wait(WAIT_SECONDS)
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
    monkeypatch.setattr(switching, "_LONGEST_ATTEMPT_SECONDS", 0.2)
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
        talk(client, moves=False)
        assert not client.moved.wait(0.5) and not uses_bulk(client)
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
        wait_until(lambda: offers)
        with pytest.raises(OSError):
            bulk.connect("127.0.0.1", offers[0], Credentials(token=token), None, None, WAIT_SECONDS)
        with pytest.raises(OSError):  # and the stream is closed
            bulk.connect("127.0.0.1", offers[0], mine, None, None, 0.3)


def test_strangers_that_say_nothing_cost_no_thread_and_do_not_stay(monkeypatch):
    monkeypatch.setattr(listener_module, "MOST_STRANGERS", 3)
    offers = []

    def offering(stream):
        offers.append(stream.offer_bulk())
        answering(stream)

    with serving(offering) as server, connected(server):
        wait_until(lambda: offers)
        port = offers[0].port
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        with connected(server) as second:
            talk(second, 1)
            assert uses_bulk(second)
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
        wait_until(lambda: streams[0].lost, WAIT_SECONDS)


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
        assert client.moved.wait(WAIT_SECONDS)
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
            assert client.moved.wait(WAIT_SECONDS)
            for _ in range(100):
                client.send((b"x" * 1000,))
        assert done.wait(WAIT_SECONDS)
        assert heard == [b"x" * 1000] * 100


# -- firewalls, and strangers that connect quickly ---------------------------------------------


class Shards:
    """Servers that welcome with a lease; the offers of some name a port that is dropped."""

    def __init__(self, stack, monkeypatch, lease_seconds, blocked):
        self.num_hellos, self.offered = [], {}
        blocked_port = stack.enter_context(dropping())
        self.dialled = []
        create = socket.socket.connect

        def connect(connecting, address):
            if address[1] == blocked_port:
                self.dialled.append(address)
            return create(connecting, address)

        monkeypatch.setattr(socket.socket, "connect", connect, raising=False)

        def handler(index):
            def welcome(stream):
                assembler = MessageAssembler(pb.ToServer, lambda message: 1 << 30)
                for data in stream.incoming():
                    complete = assembler.feed(data)
                    if complete is None:
                        continue
                    message, _ = complete
                    if message.WhichOneof("body") != "hello":
                        stream.send((frame(pb.ToClient(waiting=pb.Waiting())),))
                        continue
                    self.num_hellos.append(index)
                    answer = pb.ToClient(welcome=pb.Welcome(lease_seconds=lease_seconds))
                    if message.hello.bulk:
                        answer.welcome.bulk.CopyFrom(stream.offer_bulk())
                        if index in blocked:
                            answer.welcome.bulk.port = blocked_port
                    stream.send((frame(answer),))

            return welcome

        self.servers = [stack.enter_context(serving(handler(index))) for index in range(3)]

    def join(self, stack):
        """Join at all shards, one after another, as a worker does."""
        sessions = []
        for number, server in enumerate(self.servers):
            hello = pb.Hello(role=pb.ROLE_WORKER, shard=number)
            session = ClientSession(f"127.0.0.1:{server.port}", hello, 1 << 20)
            stack.callback(session.close, 0.0)
            session.open(WAIT_SECONDS)
            sessions.append(session)
        return sessions


@pytest.mark.parametrize("blocked", [{1}, {0, 1, 2}])
def test_a_port_that_drops_holds_nothing_up_and_is_not_tried_again(monkeypatch, caplog, blocked):
    monkeypatch.setattr(switching, "_DEATH_SECONDS", 0.05)
    lease = 2.0
    with contextlib.ExitStack() as stack:
        shards = Shards(stack, monkeypatch, lease, blocked)
        warm = shards.servers[0]  # a first channel takes gRPC a while
        with connected(warm):
            began = time.monotonic()
            sessions = shards.join(stack)
        assert time.monotonic() - began < lease / 4  # the attempts alone would take so long each
        for session in sessions:  # messages pass while the attempts are under way
            session.send_control(pb.ToServer(heartbeat=pb.Heartbeat()))
            assert session.receive(WAIT_SECONDS)[0].WhichOneof("body") == "waiting"
        for number, session in enumerate(sessions):
            assert number in blocked or session.stream.moved.wait(WAIT_SECONDS)
        wait_until(lambda: len(caplog.messages) >= len(blocked), WAIT_SECONDS)
        assert len(shards.dialled) == 2 * len(blocked)  # a flood could have silenced it once
        for session in shards.join(stack):  # a rejoin of all
            assert session._hello.bulk == (session.shard not in blocked)
            assert session.shard in blocked or session.stream.moved.wait(WAIT_SECONDS)
        assert len(shards.dialled) == 2 * len(blocked)
        assert len(caplog.messages) == len(blocked)
        for number in blocked:
            address = f"127.0.0.1:{shards.servers[number].port} "
            (line,) = (each for each in caplog.messages if address in each)
            assert "within 0.5 s" in line and "ip_local_port_range" in line


class Strangers:
    """Connects this many times a second in its own thread, and keeps every connection open.

    Args:
        port: Port to connect to.
        per_second: Number of connections per second.
        first: First bytes of each connection.
    """

    def __init__(self, port, per_second, first=b""):
        self._port, self._pause, self._first = port, 1 / per_second, first
        self._stop, self.num = threading.Event(), 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(WAIT_SECONDS)

    def _run(self):
        open_ones = collections.deque()
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += self._pause
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", self._port))
            with contextlib.suppress(OSError):
                stranger.send(self._first)
            open_ones.append(stranger)
            self.num += 1
            if len(open_ones) > 400:
                open_ones.popleft().close()
        for each in open_ones:
            each.close()


@pytest.mark.parametrize("first", [b"", b"x", bytes(16)])
def test_honest_clients_among_quick_strangers_move(first):
    """Strangers at the client's address, as behind one NAT."""
    with serving(answering) as server, connected(server) as opening:
        port = _port_of(server, opening)
        with Strangers(port, 200, first) as strangers:
            wait_until(lambda: strangers.num >= 100)
            for _ in range(20):
                with connected(server) as client:
                    talk(client, 1)
                    assert uses_bulk(client)
        assert strangers.num > 150


def _port_of(server, client):
    welcome, _ = next_message(client, MessageAssembler(pb.ToClient, lambda message: 1 << 30))
    assert welcome.welcome.bulk.port == server._listener._port
    return welcome.welcome.bulk.port


def test_who_was_turned_away_moves_later_on_the_same_stream(monkeypatch):
    """Strangers have all places for a while: each newcomer is closed before it is read."""
    crowded = threading.Event()
    crowded.set()
    read = listener_module.BulkListener._take_number
    num_turned_away = []

    def closes(self, half, data, halves):
        if crowded.is_set():
            num_turned_away.append(1)
            halves.end(half)
            return
        read(self, half, data, halves)

    monkeypatch.setattr(listener_module.BulkListener, "_take_number", closes)
    with serving(answering) as server, connected(server) as client:
        talk(client, 1, moves=False)
        wait_until(lambda: num_turned_away)
        assert not uses_bulk(client)
        talk_on(client, 5)
        crowded.clear()
        assert client.moved.wait(WAIT_SECONDS)
        talk_on(client, 6)
        assert uses_bulk(client)


def test_an_attempt_that_the_client_gave_up_does_not_stand_in_the_way(monkeypatch):
    """The shard has taken the first connection over when the client's time is up."""
    path_of = []
    attach = switching.ServerPath.attach

    def attached(self, connection):
        attach(self, connection)
        path_of.append(self)
        if len(path_of) == 1:
            connection._wire.shutdown(socket.SHUT_RDWR)  # before its proof arrives

    monkeypatch.setattr(switching.ServerPath, "attach", attached)
    with serving(answering) as server, connected(server) as client:
        talk(client)
        assert uses_bulk(client) and len(path_of) == 2

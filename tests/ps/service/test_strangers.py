"""A shard on a real port sends strangers a reason, and no information about the run."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from tests.certificates import TOKEN, Papers
from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame, push_frame
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits, MessageRate
from thinwire.proto.security.credentials import PeerEvidence
from thinwire.ps.service.handshake import guard_of, unanswered
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def papers():
    return Papers()


@contextlib.contextmanager
def shard_behind(guard):
    """Yield (shard, port) of a server that runs until the end of the block."""
    shard, over = Shard(), threading.Event()
    shard.server.guard = guard
    port = shard.server.listen("127.0.0.1", 0)
    writer = threading.Thread(target=shard.server.run_until, args=(over.is_set,), daemon=True)
    writer.start()
    try:
        yield shard, port
    finally:
        over.set()
        shard.server.server.stop()
        writer.join(WAIT_SECONDS)


@contextlib.contextmanager
def opened(shard, port, credentials, **hello):
    session = ClientSession(
        f"127.0.0.1:{port}", shard.hello(**hello), 1 << 20, credentials=credentials
    )
    try:
        yield session, session.open(WAIT_SECONDS)
    finally:
        session.close(0.0)


def refused(shard, port, credentials, **hello):
    """Return the reason of a refusal."""
    with pytest.raises(RequestRejected) as caught, opened(shard, port, credentials, **hello):
        pass
    return caught.value.reason


def test_a_worker_with_papers_and_token_trains(papers):
    with (
        shard_behind(ConnectionGuard(papers.of("ps-0", TOKEN))) as (shard, port),
        opened(shard, port, papers.of("worker-1", TOKEN), id=1) as (session, welcome),
    ):
        assert welcome.run_id == "run"
        session.send_control(pb.ToServer(pull=pb.Pull()))
        message, payload = session.receive(WAIT_SECONDS)
        while message.WhichOneof("body") != "reply":
            message, payload = session.receive(WAIT_SECONDS)
        assert len(payload) == 4 * shard.core.model.theta.size


def test_who_is_somebody_else_is_refused_and_the_holder_stays(papers):
    guard = ConnectionGuard(papers.of("ps-0"))
    with shard_behind(guard) as (shard, port):
        with opened(shard, port, papers.of("worker-1"), id=1):
            assert refused(shard, port, papers.of("worker-2"), id=1) == pb.REASON_IDENTITY
            supervisor = {"role": pb.ROLE_SUPERVISOR, "id": 0}
            assert refused(shard, port, papers.of("worker-2"), **supervisor) == pb.REASON_IDENTITY
            assert list(shard.server.connections.workers) == [1]
        assert not shard.server.connections.observers
        assert shard.board.status().policies["refused_peers"] == {"identity": 2}


@pytest.mark.parametrize("credentials", [NO_CREDENTIALS, Credentials(token=b"not the run's token")])
def test_without_the_token_nothing_is_told_but_why(credentials):
    with shard_behind(ConnectionGuard(Credentials(token=TOKEN))) as (shard, port):
        # Other token: the client detects the false shard before it sends anything.
        expected = pb.REASON_IDENTITY if credentials.token else pb.REASON_TOKEN
        assert refused(shard, port, credentials, id=1) == expected
        assert not shard.server.connections.workers


def test_not_even_that_it_is_starting_is_told_to_strangers():
    shard = Shard()
    shard.server.guard, shard.server.identity = ConnectionGuard(Credentials(token=TOKEN)), None
    stream = Stream(shard.server, [frame(hello=shard.hello())])
    stream.evidence = PeerEvidence((), b"c" * 32, b"s" * 32)
    stream.read()
    assert [message.WhichOneof("body") for message, _ in stream.received] == ["refusal"]
    assert stream.last("refusal")[0].reason == pb.REASON_TOKEN
    assert shard.server.queue.empty()


def test_a_client_that_says_nothing_does_not_stay():
    with shard_behind(ConnectionGuard(limits=Limits(hello_seconds=0.05))) as (shard, port):
        session = ClientSession(f"127.0.0.1:{port}", shard.hello(), 1 << 20)
        session.stream.open(WAIT_SECONDS)
        with pytest.raises(StreamLost):
            session.receive(WAIT_SECONDS)
        session.close()
    assert shard.server.guard.refused == {"silent": 1}


def test_a_client_that_has_said_hello_stays():
    with (
        shard_behind(ConnectionGuard(limits=Limits(hello_seconds=0.1))) as (shard, port),
        opened(shard, port, NO_CREDENTIALS, id=1) as (session, _),
    ):
        assert session.poll(0.4) is None
    assert shard.server.guard.refused == {}


# -- limits ------------------------------------------------------------------------------------


def test_a_flood_of_messages_is_cut_off():
    shard = Shard()
    shard.server.guard = ConnectionGuard(limits=Limits(messages_per_second=1.0, burst_messages=3.0))
    stream = shard.say(*[{"heartbeat": pb.Heartbeat()}] * 10, id=ROGUE)
    assert stream.last("refusal")[0].reason == pb.REASON_LIMIT
    assert " 1 messages a second" in stream.last("refusal")[0].message
    assert stream.num_read < 10
    assert shard.server.guard.refused == {"rate": 1}


def test_a_client_that_does_not_take_replies_is_cut_off():
    shard = Shard()
    hello = frame(hello=shard.hello(id=HONEST))

    def frames():
        yield hello
        for count in (0, 3, 4):
            stream.num_waiting = count
            yield frame(pull=pb.Pull())

    stream = Stream(shard.server)
    stream.frames = frames()
    stream.read()
    assert stream.last("reply")[0] is not None
    assert "4 replies" in stream.last("refusal")[0].message
    assert shard.server.guard.refused == {"unanswered": 1}


def test_replies_wait_where_the_client_does_not_read():
    with (
        shard_behind(ConnectionGuard()) as (shard, port),
        opened(shard, port, NO_CREDENTIALS, id=1) as (session, _),
    ):
        stream = shard.server.connections.workers[1].stream
        blocked, gate = threading.Event(), threading.Event()

        def make():
            blocked.set()
            gate.wait(WAIT_SECONDS)
            return [frame()]

        for _ in range(3):
            stream.send(make)
        assert blocked.wait(WAIT_SECONDS)
        assert stream.num_waiting == 2  # the first is being made
        gate.set()
        session.close()


def test_what_legal_workers_do_is_far_below_the_limits():
    limits = Limits()
    stream = Stream(None)
    rate = MessageRate(limits)
    stream.num_waiting = 2
    assert all(rate.exceeded() is None for _ in range(5_000))
    assert unanswered("push", stream, limits) is None


def test_a_shard_keeps_places_for_other_addresses():
    run = SimpleNamespace(nb_workers=4, nb_ps=2, credentials=NO_CREDENTIALS)
    limits = guard_of(run).limits
    assert limits.streams_per_address == 30, "three of a worker, each shard, 16 more"
    assert limits.streams > limits.streams_per_address


def test_ill_formed_hellos_and_refused_ones_are_counted():
    shard = Shard()
    shard.say(id=ROGUE, shard=3)
    Stream(shard.server, [b"\xff"]).read()
    assert shard.server.guard.refused == {"hello": 1, "malformed": 1}
    with pytest.raises(Unreachable):
        ClientSession("127.0.0.1:1", shard.hello(), 1 << 20).open(0.2)


class OpenWorker:
    """An open stream of a worker; a worker that reconnects keeps its incarnation."""

    def __init__(self, shard, incarnation):
        self.shard, self.stream = shard, Stream(shard.server)
        self.reader = shard.server.reader_of(self.stream)
        self.send(frame(hello=shard.hello(id=HONEST, incarnation=incarnation)))

    def send(self, data):
        self.is_open = self.reader.receive(data)
        self.shard.server.run_until(self.shard.server.queue.empty)
        return self


def test_a_worker_s_old_stream_has_no_say_once_another_has_its_place():
    shard = Shard("asgd")
    old = OpenWorker(shard, 5).send(frame(pull=pb.Pull()))
    new = OpenWorker(shard, 5).send(frame(pull=pb.Pull()))
    assert old.stream.closed and not new.stream.closed
    before = shard.picture()
    push = push_frame(incarnation=5, epoch=shard.core.membership.epoch)
    assert not old.send(push).is_open
    assert shard.picture() == before and shard.server.guard.refused["replaced"] == 1
    push = push_frame(incarnation=5, epoch=shard.core.membership.epoch)
    assert new.send(push).is_open and shard.core.version == 1


def test_the_end_of_an_old_stream_leaves_the_new_one():
    shard = Shard("asgd")
    old, new = OpenWorker(shard, 5), OpenWorker(shard, 5)
    old.reader.forget()
    shard.server.run_until(shard.server.queue.empty)
    assert shard.server.connections.workers[HONEST].stream is new.stream
    assert not new.stream.closed
    new.send(frame(pull=pb.Pull()))
    assert new.stream.last("reply")[0] is not None

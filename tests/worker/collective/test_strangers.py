"""Workers of a collective run accept connections only from each other."""

import numpy as np
import pytest

from tests.certificates import TOKEN, Papers
from thinwire.proto import messages
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.proto.grpc import ClientStream, StreamLost, Unreachable
from thinwire.proto.grpc.common import PEER_SERVICE
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
from thinwire.runtime.run.credentials import Credentials
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, PartName, RoundId
from thinwire.worker.collective.peers import PeerLost, Peers
from thinwire.worker.collective.service import PeerServer, guard_of

WAIT_SECONDS = 20.0
PART = peers.Part(view=7, round=1, number=0)


@pytest.fixture(scope="module")
def papers():
    return Papers()


class Listener:
    """Worker 2, which waits for parts."""

    def __init__(self, credentials):
        self.mailbox, self.guard = Mailbox(1 << 20), ConnectionGuard(credentials)
        self.server = PeerServer(self.mailbox, lambda ask: None, 1 << 16, guard=self.guard)
        self.server.run_id = "run"
        port = self.server.listen("127.0.0.1", 0)
        self.member = CollectiveMember(2, 102, f"127.0.0.1:{port}")

    def hears(self, worker, credentials):
        """Let a worker send a part; return what arrives."""
        sender = Peers(worker, None, 1 << 16, 1 << 16, credentials)
        sender.run_id = "run"
        try:
            sender.send(self.member, PART, np.float32([1, 2]))
            part = self.mailbox.get(PartName(RoundId(0, 1), 7, worker, 0), WAIT_SECONDS)
            return np.frombuffer(part, np.float32).tolist()
        finally:
            sender.close()


@pytest.fixture
def listen():
    opened = []

    def start(credentials):
        opened.append(Listener(credentials))
        return opened[-1]

    yield start
    for listener in opened:
        listener.server.close()


def test_peers_with_papers_and_token(papers, listen):
    listener = listen(papers.of("worker-2", TOKEN))
    assert listener.hears(1, papers.of("worker-1", TOKEN)) == [1, 2]
    assert listen(Credentials(token=TOKEN)).hears(1, Credentials(token=TOKEN)) == [1, 2]


def greet(listener, credentials, worker):
    """Send an identity; return the reason of the rejection."""
    stream = ClientStream(
        listener.member.address,
        service=PEER_SERVICE,
        credentials=credentials,
        server_name="worker-2.thinwire.internal",
    )
    stream.open(WAIT_SECONDS)
    greeting = peers.Greeting(
        protocol_version=messages.PROTOCOL_VERSION, run_id="run", worker=worker
    )
    stream.send((frame(peers.ToPeer(greeting=greeting)),))
    answer = peers.FromPeer.FromString(stream.receive(WAIT_SECONDS))
    with pytest.raises(StreamLost):
        stream.receive(WAIT_SECONDS)
    stream.close()
    return answer.refusal.reason


def test_a_worker_does_not_speak_for_another(papers, listen):
    listener = listen(papers.of("worker-2"))
    assert greet(listener, papers.of("worker-1"), 3) == pb.REASON_IDENTITY
    assert greet(listener, papers.of("ps-0"), 1) == pb.REASON_IDENTITY
    assert listener.guard.refused["identity"] == 2
    assert not listener.server.has_stream_of(3)


def test_without_the_token_nobody_is_heard(listen):
    listener = listen(Credentials(token=TOKEN))
    assert greet(listener, Credentials(), 1) == pb.REASON_TOKEN
    assert listener.guard.refused["token"] == 1


def test_a_flood_of_messages_is_cut_off(listen):
    listener = listen(Credentials())
    listener.guard.limits = Limits(messages_per_second=1.0, burst_messages=3.0)
    stream = ClientStream(listener.member.address, service=PEER_SERVICE)
    stream.open(WAIT_SECONDS)
    greeting = peers.Greeting(protocol_version=messages.PROTOCOL_VERSION, run_id="run", worker=1)
    part = peers.ToPeer(part=PART)
    stream.send([frame(peers.ToPeer(greeting=greeting)), *[frame(part)] * 20])
    answer = peers.FromPeer.FromString(stream.receive(WAIT_SECONDS))
    assert answer.refusal.reason == pb.REASON_LIMIT
    with pytest.raises(StreamLost):
        stream.receive(WAIT_SECONDS)
    stream.close()
    assert listener.guard.refused == {"rate": 1}
    assert not listener.server.has_stream_of(1)


@pytest.mark.parametrize("version", [0, messages.PROTOCOL_VERSION + 1])
def test_a_peer_of_another_version_is_told_which(listen, version):
    listener = listen(Credentials(token=TOKEN))
    stream = ClientStream(listener.member.address, service=PEER_SERVICE)
    stream.open(WAIT_SECONDS)
    greeting = peers.Greeting(protocol_version=version, run_id="run", worker=1)
    stream.send((frame(peers.ToPeer(greeting=greeting)),))
    refusal = peers.FromPeer.FromString(stream.receive(WAIT_SECONDS)).refusal
    stream.close()
    assert refusal.reason == pb.REASON_PROTOCOL_VERSION
    assert f"the peer {version}" in refusal.message and "install the same" in refusal.message


def test_an_address_does_not_lock_peers_out(listen):
    assert guard_of(Credentials(), 4).limits.streams_per_address == 20
    listener = listen(Credentials(token=TOKEN))
    listener.guard.limits = Limits(streams=1, waiting_strangers=4)
    silent = [ClientStream(listener.member.address, service=PEER_SERVICE) for _ in range(10)]
    for stream in silent:
        stream.open(WAIT_SECONDS)
    assert listener.hears(1, Credentials(token=TOKEN)) == [1, 2]
    assert listener.guard.refused == {"crowded": 6}
    for stream in silent:
        stream.close(0.0)


def test_strangers_do_not_get_in_and_false_peers_are_told_nothing(papers, listen):
    listener = listen(papers.of("worker-2"))
    with pytest.raises(Unreachable):
        ClientStream(listener.member.address, service=PEER_SERVICE).open(0.5)
    elsewhere = listen(papers.of("worker-1"))
    with pytest.raises(PeerLost, match="worker 2: .* is not trusted"):
        elsewhere.hears(1, papers.of("worker-1"))
    with pytest.raises(PeerLost, match="does not prove"):
        listen(Credentials()).hears(1, Credentials(token=TOKEN))

"""All-reduce between workers over real gRPC on loopback, one thread per worker."""

import threading
from concurrent import futures

import numpy as np
import pytest

from thinwire.ops.collectives import REGISTRY
from thinwire.ops.types import ConfigurationError
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed, frame
from thinwire.proto.grpc import ClientStream, StreamLost, wire_bytes
from thinwire.proto.grpc.common import PEER_SERVICE
from thinwire.proto.messages import PROTOCOL_VERSION
from thinwire.worker.collective.all_reduce import Aggregator, MembershipChanged
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, PartName, RoundId
from thinwire.worker.collective.peers import PeerLost, Peers, listening_address
from thinwire.worker.collective.service import PeerServer

pytestmark = pytest.mark.timeout(60)
ROUND = RoundId(0, 1)
CHUNK = 1 << 20


class CollectiveNode:
    """One worker's endpoint of an all-reduce."""

    def __init__(self, worker, look=lambda sender: None, limit_bytes=1 << 28, run_id="run"):
        self.worker = worker
        self.mailbox = Mailbox(limit_bytes)
        self.server = PeerServer(self.mailbox, self.answer, 1 << 26)
        self.peers = Peers(worker, None, CHUNK, 1 << 26)
        self.server.run_id = self.peers.run_id = run_id
        port = self.server.listen("127.0.0.1", 0)
        self.member = CollectiveMember(worker, worker + 100, f"127.0.0.1:{port}")
        self.look = look

    def answer(self, ask):
        return peers.Holding(version=self.worker, standing=peers.STANDING_STEPPED), [b"model"]

    def sum(self, name, members, buffers, look=None):
        adder = Aggregator(self.algorithm, self.worker, self.peers, self.mailbox, look or self.look)
        return adder.sum(name, members, buffers)

    algorithm = "ring"

    def close(self):
        self.peers.close()
        self.server.close()


@pytest.fixture
def start():
    nodes = []

    def some(count, **options):
        nodes.extend(CollectiveNode(worker, **options) for worker in range(1, count + 1))
        return nodes

    yield some
    for node in nodes:
        node.close()


def together(nodes, task):
    """Run a task for all nodes in parallel; return its results or the raised errors."""
    with futures.ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(task, nodes))


def summand(worker, size=1000):
    return np.random.default_rng(worker).normal(size=size).astype(np.float32)


def exact_sum(nodes, size=1000):
    return np.sum([summand(node.worker, size).astype(np.float64) for node in nodes], axis=0)


@pytest.mark.parametrize("algorithm", REGISTRY)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_members_get_numpy_s_sum_and_the_same_bits(start, algorithm, count):
    nodes = start(count)
    members = [node.member for node in nodes]

    def work(node):
        node.algorithm = algorithm
        results = []
        for number in (1, 2, 3):
            buffers = [summand(node.worker), np.full((2, 3), node.worker, np.float32)]
            results.append(node.sum(RoundId(0, number), members, buffers))
            node.mailbox.finish(RoundId(0, number - 1))
        return results

    everything = together(nodes, work)
    for sums in (result for results in everything for result in results):
        np.testing.assert_allclose(sums[0], exact_sum(nodes), rtol=0, atol=1e-6 * count)
        np.testing.assert_array_equal(sums[0], everything[0][0][0])
        np.testing.assert_array_equal(sums[1], np.full((2, 3), count * (count + 1) // 2))


def test_parts_larger_than_a_message_travel_and_bytes_are_those_of_the_table(start):
    size = 1_200_000
    nodes = start(3)
    members = [node.member for node in nodes]
    together(nodes, lambda node: node.sum(ROUND, members, [summand(node.worker, size)]))
    for node in nodes:
        payload = 4 * size * 2 * 2 / 3
        assert payload < node.peers.bytes_sent < 1.002 * payload
    assert wire_bytes(CHUNK) < 1.001 * CHUNK


def test_without_a_lost_member_the_round_is_done_again(start):
    nodes = start(3)
    members = [node.member for node in nodes]
    nodes[2].close()
    left = nodes[:2]

    def work(node):
        def notice(sender):
            raise MembershipChanged("worker 3 has left")

        with pytest.raises(MembershipChanged):
            node.sum(ROUND, members, [summand(node.worker)], notice)
        return node.sum(ROUND, members[:2], [summand(node.worker)])[0]

    sums = together(left, work)
    np.testing.assert_allclose(sums[0], exact_sum(left), atol=1e-6)
    np.testing.assert_array_equal(*sums)


def test_a_member_that_begins_again_needs_nobody_else_to(start):
    """Received parts are still there, and repeated parts are the same."""
    nodes = start(3)
    members = [node.member for node in nodes]
    late = threading.Event()

    def work(node):
        if node.worker == 3:  # late: worker 1 gives up on it in between
            late.wait(20)
        if node.worker == 1:

            def give_up(sender):
                late.set()
                raise MembershipChanged("no patience")

            with pytest.raises(MembershipChanged):
                node.sum(ROUND, members, [summand(1)], give_up)
        return node.sum(ROUND, members, [summand(node.worker)])[0]

    sums = together(nodes, work)
    for each in sums:
        np.testing.assert_array_equal(each, sums[0])
    np.testing.assert_allclose(sums[0], exact_sum(nodes), atol=1e-6)


def test_other_lives_and_other_algorithms_do_not_mix(start):
    nodes = start(2)
    names = [node.member for node in nodes]
    returned = [names[0], CollectiveMember(2, 999, names[1].address)]
    looks = []

    def look(sender):
        looks.append(sender)
        raise MembershipChanged("it is another life")

    def work(node):
        members = names if node.worker == 1 else returned
        with pytest.raises(MembershipChanged, match="another life"):
            node.sum(ROUND, members, [summand(node.worker)], look)

    together(nodes, work)
    assert sorted(looks) == [1, 2]


def test_whoever_cannot_be_reached_is_named(start):
    (node,) = start(1)
    gone = CollectiveMember(2, 5, "127.0.0.1:1")
    with pytest.raises(MembershipChanged, match=r"worker 2 at 127\.0\.0\.1:1"):
        node.sum(ROUND, [node.member, gone], [summand(1)])
    with pytest.raises(PeerLost, match="worker 2"):
        node.peers.query(gone, peers.ModelQuery(), 1.0)


def test_peers_say_what_they_hold(start):
    nodes = start(2)
    holding, payload = nodes[0].peers.query(nodes[1].member, peers.ModelQuery(version=2), 10.0)
    assert (holding.version, bytes(payload)) == (2, b"model")
    nodes[0].peers.forget([])
    holding, _ = nodes[0].peers.query(nodes[1].member, peers.ModelQuery(), 10.0)
    assert holding.standing == peers.STANDING_STEPPED
    assert nodes[1].server.bytes_sent > 0
    assert nodes[1].server.has_stream_of(1)
    assert not nodes[0].server.has_stream_of(2)


def test_a_worker_of_another_run_is_refused(start):
    node, other = start(1)[0], CollectiveNode(2, run_id="another")
    with pytest.raises(PeerLost, match="run_id"):
        node.peers.query(other.member, peers.ModelQuery(), 10.0)
    other.close()


def greeting(**fields):
    return peers.Greeting(protocol_version=PROTOCOL_VERSION, run_id="run", **fields)


@pytest.mark.parametrize(
    "messages",
    [
        [peers.ToPeer(query=peers.ModelQuery())],  # before the greeting
        [peers.ToPeer(greeting=peers.Greeting(protocol_version=9, run_id="run", worker=2))],
        [peers.ToPeer(greeting=greeting())],
        [peers.ToPeer(greeting=greeting(worker=2))] * 2,
        [
            peers.ToPeer(greeting=greeting(worker=2)),
            peers.ToPeer(part=peers.Part(payload=b"123", payload_bytes=3)),
        ],
        [
            peers.ToPeer(greeting=greeting(worker=2)),
            peers.ToPeer(part=peers.Part(payload_bytes=1 << 30)),
        ],
    ],
)
def test_what_is_malformed_ends_the_stream_and_nothing_else(start, messages):
    (node,) = start(1)
    stream = ClientStream(node.member.address, service=PEER_SERVICE)
    stream.open(10.0)
    for message in messages:
        stream.send((frame(message),))
    with pytest.raises(StreamLost):
        while True:
            data = stream.receive(10.0)
            assert peers.FromPeer.FromString(data).refusal.reason in (
                pb.REASON_PROTOCOL_VERSION,
                pb.REASON_ID_RANGE,
            )
    stream.close()
    assert node.mailbox.get(PartName(RoundId(0, 0), 0, 2, 0), 0.0) is None


def test_a_mailbox_keeps_rounds_to_come_and_is_bounded():
    box = Mailbox(limit_bytes=100)
    name = PartName(ROUND, 7, 2, 0)
    box.put(name, memoryview(b"x" * 60))
    box.put(name, memoryview(b"x" * 60))  # again: the same bytes
    later = PartName(RoundId(0, 2), 7, 2, 0)
    with pytest.raises(Malformed, match="60 bytes.*60 bytes.*100"):
        box.put(later, memoryview(b"y" * 60))
    box.put(later, memoryview(b"y" * 40))
    box.finish(ROUND)
    assert box.get(name, 0.0) is None
    assert bytes(box.get(later, 0.0)) == b"y" * 40
    box.put(name, memoryview(b"x" * 60))  # too late
    assert box.get(name, 0.0) is None
    box.put(PartName(RoundId(1, 1), 7, 2, 0), memoryview(b"z" * 60))  # there is space again


def test_a_worker_listens_where_it_reaches_the_ps(monkeypatch):
    assert listening_address("127.0.0.1:2223", insecure=False) == "127.0.0.1"

    def find_nobody(*arguments, **options):
        raise OSError("name not known")

    monkeypatch.setattr("socket.getaddrinfo", find_nobody)
    with pytest.raises(ConfigurationError, match="there is no route to elsewhere:2223"):
        listening_address("elsewhere:2223", insecure=True)


def test_beyond_this_machine_only_if_asked_to(monkeypatch):
    monkeypatch.setattr("thinwire.worker.collective.peers.is_loopback", lambda address: False)
    with pytest.raises(ConfigurationError, match=r"here at 127\.0\.0\.1.*--insecure"):
        listening_address("127.0.0.1:2223", insecure=False)
    assert listening_address("127.0.0.1:2223", insecure=True) == "127.0.0.1"


def test_a_peer_counts_as_connected_for_as_long_as_its_stream_is_open():
    """A part that is late is waited for only while it may still come."""
    server = PeerServer(Mailbox(1 << 20), lambda query: None, 1 << 16)
    server.run_id, seen = "run", []
    greeting = peers.Greeting(protocol_version=PROTOCOL_VERSION, run_id="run", worker=2)
    part = peers.Part(view=7, round=1, number=0, payload=bytes(4), payload_bytes=4)

    class Stream:
        peer, bytes_sent, bytes_received = "ipv4:127.0.0.1:1", 0, 0

        def incoming(self):
            for message in (peers.ToPeer(greeting=greeting), peers.ToPeer(part=part)):
                seen.append(server.has_stream_of(2))
                yield message.SerializeToString()
            seen.append(server.has_stream_of(2))

    server._read(Stream())
    assert seen == [False, True, True] and not server.has_stream_of(2)

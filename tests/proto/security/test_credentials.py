"""Streams of authenticated peers work; streams of unauthenticated peers are rejected."""

import contextlib
import queue
import types

import pytest

from tests.certificates import OTHER_WORKER, SUPERVISOR, TOKEN, WORKER, Papers
from thinwire.ops.types import ConfigurationError
from thinwire.proto import grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security import credentials as trust
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

WAIT_SECONDS = 20.0
DIAL_SECONDS = 0.7
WITH_TOKEN = Credentials(token=TOKEN)


@pytest.fixture(scope="module")
def papers():
    return Papers()


@pytest.fixture(scope="module")
def strangers():
    return Papers()


@contextlib.contextmanager
def serving(guard, handler=None):
    """Yield (port, received parts); the server stores the claims of a client's first frame."""
    heard = queue.SimpleQueue()

    def judge(stream):
        for frame in stream.incoming():
            hello = pb.Hello.FromString(frame)
            claims = trust.claims_of(hello)
            refusal = guard.authenticate(stream, trust.part_of(hello), hello.proof, claims)
            heard.put(refusal and refusal[0])
            stream.send([b"no" if refusal else b"welcome"])

    server = grpc.GrpcServer("127.0.0.1", 0, handler or judge, guard=guard)
    try:
        yield server.port, heard
    finally:
        server.stop()


def claim(port, credentials, seconds=DIAL_SECONDS, **hello):
    """Say Hello; return the answer."""
    stream = grpc.ClientStream(f"127.0.0.1:{port}", credentials=credentials)
    try:
        stream.open(seconds)
        said = pb.Hello(**({"role": pb.ROLE_WORKER, "id": 1} | hello))
        said.proof = stream.peer.prove(trust.claims_of(said))
        stream.send([said.SerializeToString()])
        return stream.receive(WAIT_SECONDS)
    finally:
        stream.close(0.0)


def test_mutual_tls_lets_each_play_its_own_part(papers):
    guard = ConnectionGuard(papers.of("ps-0"))
    with serving(guard) as (port, _):
        assert claim(port, papers.of("worker-1"), WAIT_SECONDS) == b"welcome"
        assert claim(port, papers.of("worker-2"), WAIT_SECONDS, id=2) == b"welcome"
        supervisor = {"role": pb.ROLE_SUPERVISOR, "id": 0}
        assert claim(port, papers.of("supervisor-0"), WAIT_SECONDS, **supervisor) == b"welcome"
        shard = {"role": pb.ROLE_SHARD, "id": 1}
        assert claim(port, papers.of("ps-1"), WAIT_SECONDS, **shard) == b"welcome"
    assert guard.refused == {}


@pytest.mark.parametrize(
    ("name", "hello"),
    [
        ("worker-1", {"id": 2}),
        ("worker-1", {"role": pb.ROLE_SUPERVISOR, "id": 0}),
        ("worker-1", {"role": pb.ROLE_SHARD, "id": 1}),
        ("supervisor-0", {"id": 1}),
        ("ps-1", {"role": pb.ROLE_SHARD, "id": 0}),
        ("worker-1", {"role": 7}),
    ],
)
def test_no_certificate_serves_for_another_part(papers, name, hello):
    guard = ConnectionGuard(papers.of("ps-0"))
    with serving(guard) as (port, heard):
        assert claim(port, papers.of(name), WAIT_SECONDS, **hello) == b"no"
        assert heard.get() == pb.REASON_IDENTITY
    assert guard.refused == {"identity": 1}


def test_strangers_do_not_get_as_far_as_a_stream(papers, strangers):
    nameless = Credentials(authority=papers.authority)
    foreign = Credentials(*strangers.by_name["worker-1"].pem(), papers.authority)
    expired = papers.with_certificate(papers.expired("worker-1", WORKER))
    guard, met = ConnectionGuard(papers.of("ps-0")), []
    with serving(guard, met.append) as (port, _):
        for stranger in (NO_CREDENTIALS, nameless, foreign, expired):
            with pytest.raises(grpc.Unreachable, match="TLS, or .*--tls_cert"):
                claim(port, stranger, 0.5)
    assert not met


@pytest.mark.parametrize("which", ["foreign", "expired", "a worker", "elsewhere"])
def test_a_false_shard_is_told_nothing(papers, strangers, which):
    from thinwire.proto.security import certificates

    elsewhere = certificates.CertificateHolder("ps-0", trust.part_of_shard(0), ("10.9.8.7",))
    false = {
        "foreign": strangers.of("ps-0"),
        "expired": papers.with_certificate(papers.expired("ps-0", trust.part_of_shard(0))),
        "a worker": papers.of("worker-2"),
        "elsewhere": papers.with_certificate(certificates.issue(papers.issuer, elsewhere, 1)),
    }[which]
    with serving(ConnectionGuard(false)) as (port, heard):
        with pytest.raises(trust.UntrustedPeer, match="is not trusted"):
            claim(port, papers.of("worker-1"))
        assert heard.empty()


def test_a_supervisors_certificate_serves_nobody(papers):
    with (
        serving(ConnectionGuard(papers.of("supervisor-0"))) as (port, _),
        pytest.raises(trust.UntrustedPeer, match="purpose"),
    ):
        claim(port, papers.of("worker-1"))


def test_workers_are_known_to_each_other_by_their_number(papers):
    with serving(ConnectionGuard(papers.of("worker-2"))) as (port, _):
        for number, trusted in ((2, True), (1, False)):
            stream = grpc.ClientStream(
                f"127.0.0.1:{port}",
                credentials=papers.of("worker-1"),
                server_name=trust.server_name_of_worker(number),
            )
            if trusted:
                stream.open(WAIT_SECONDS)
                stream.close()
            else:
                with pytest.raises(trust.UntrustedPeer):
                    stream.open(DIAL_SECONDS)


def test_tls_without_an_authority_asks_nobody_who_he_is(papers):
    certificate, key = papers.by_name["ps-0"].pem()
    mine = Credentials(certificate, key)
    assert mine.protection.encrypted and not mine.protection.authenticated
    with serving(ConnectionGuard(mine)) as (port, _):
        assert claim(port, Credentials(authority=papers.authority), WAIT_SECONDS) == b"welcome"


# -- the token ---------------------------------------------------------------------------------


def test_the_right_token_with_and_without_tls(papers):
    with serving(ConnectionGuard(WITH_TOKEN)) as (port, _):
        assert claim(port, WITH_TOKEN, WAIT_SECONDS) == b"welcome"
    with serving(ConnectionGuard(papers.of("ps-0", TOKEN))) as (port, heard):
        assert claim(port, papers.of("worker-1", TOKEN), WAIT_SECONDS) == b"welcome"
        assert claim(port, papers.of("worker-1"), WAIT_SECONDS) == b"no"
        assert [heard.get(), heard.get()] == [None, pb.REASON_TOKEN]


def test_no_token_is_refused():
    guard = ConnectionGuard(WITH_TOKEN)
    with serving(guard) as (port, heard):
        assert claim(port, NO_CREDENTIALS, WAIT_SECONDS) == b"no"
        assert heard.get() == pb.REASON_TOKEN
    assert guard.refused == {"token": 1}


@pytest.mark.parametrize("mine", [b"another token, as long", b""])
def test_whoever_has_a_token_tells_nothing_to_a_shard_without_it(mine):
    with serving(ConnectionGuard(Credentials(token=mine))) as (port, heard):
        with pytest.raises(trust.UntrustedPeer, match="does not prove.*--token_file"):
            claim(port, WITH_TOKEN, WAIT_SECONDS)
        assert heard.empty()


EVIDENCE = trust.PeerEvidence((), b"c" * 32, b"s" * 32)


def judged(proof, evidence=EVIDENCE, words=("a", "b")):
    refusal = trust.check_client(evidence, WITH_TOKEN, WORKER, proof, words)
    return refusal and refusal[0]


def test_a_proof_holds_for_one_stream_and_one_claim():
    proof = trust.client_proof(TOKEN, b"c" * 32, b"s" * 32, ("a", "b"))
    assert judged(proof) is None
    assert judged(proof, words=("ab", "")) == pb.REASON_TOKEN
    assert judged(proof, trust.PeerEvidence((), b"c" * 32, b"t" * 32)) == pb.REASON_TOKEN
    assert judged(proof, trust.PeerEvidence((), b"", b"s" * 32)) == pb.REASON_TOKEN
    assert judged(proof[:-1]) == judged(b"") == pb.REASON_TOKEN
    wrong = trust.client_proof(TOKEN + b"!", b"c" * 32, b"s" * 32, ("a", "b"))
    assert judged(wrong) == pb.REASON_TOKEN


def test_what_a_server_shows_is_no_proof_of_a_client():
    shown = trust.server_proof(TOKEN, b"c" * 32, b"s" * 32)
    assert judged(shown, words=()) == pb.REASON_TOKEN


def test_a_proof_speaks_of_the_part_the_run_and_the_life():
    hello = pb.Hello(role=pb.ROLE_WORKER, id=1, run_id="r", incarnation=5, num_shards=1)
    words = trust.claims_of(hello)
    for name, value in {
        "id": 2,
        "role": 2,
        "run_id": "s",
        "incarnation": 6,
        "shard": 1,
        "num_shards": 2,
        "peer_address": "x",
        "generation": 1,
    }.items():
        other = pb.Hello()
        other.CopyFrom(hello)
        setattr(other, name, value)
        assert trust.claims_of(other) != words


def test_parts_have_names():
    assert WORKER == "thinwire://worker/1" != OTHER_WORKER
    assert trust.part_of(pb.Hello(role=pb.ROLE_SHARD, id=3)) == "thinwire://ps/3"
    assert trust.part_of(pb.Hello(role=pb.ROLE_SUPERVISOR, id=3)) == SUPERVISOR


def test_secrets_are_not_shown(papers):
    shown = repr(papers.of("worker-1", TOKEN)) + repr(ConnectionGuard(WITH_TOKEN))
    assert "PRIVATE" not in shown and TOKEN.decode() not in shown


# -- the guard ----------------------------------------------------------------------------------


def test_who_says_nothing_is_sent_away():
    guard = ConnectionGuard(limits=Limits(hello_seconds=0.05))
    with serving(guard) as (port, _):
        stream = grpc.ClientStream(f"127.0.0.1:{port}")
        stream.open(WAIT_SECONDS)
        with pytest.raises(grpc.StreamLost):
            stream.receive(WAIT_SECONDS)
        stream.close()
    assert guard.refused == {"silent": 1}


def test_who_has_said_hello_may_be_silent():
    guard = ConnectionGuard(limits=Limits(hello_seconds=0.2))

    def handler(stream):
        for frame in stream.incoming():
            guard.hello_received(stream)
            stream.send([frame])

    with serving(guard, handler) as (port, _):
        stream = grpc.ClientStream(f"127.0.0.1:{port}")
        stream.open(WAIT_SECONDS)
        stream.send([b"hello"])
        assert stream.receive(WAIT_SECONDS) == b"hello"
        with pytest.raises(grpc.NoProgress):
            stream.receive(0.4)
        stream.close()
    assert guard.refused == {}


class Arrival:
    """A stream that waits."""

    def __init__(self, peer, shows_token=False):
        self.peer, self.closed = peer, False
        self.evidence = trust.PeerEvidence(shows_token=shows_token)

    def close(self):
        self.closed = True


def arrive(guard, *peers, shows_token=False):
    """Let streams come; return them."""
    came = [Arrival(peer, shows_token) for peer in peers]
    assert [guard.admit(stream) for stream in came] == [None] * len(came)
    return came


def test_an_address_does_not_take_all_streams():
    guard = ConnectionGuard(limits=Limits(streams=3, streams_per_address=2))
    came = arrive(guard, *[f"ipv4:10.0.0.1:{port}" for port in (1, 2, 3)], "ipv4:10.0.0.2:1")
    assert guard.hello_received(came[0]) is guard.hello_received(came[1]) is None
    assert guard.hello_received(came[2])[0] == "streams"
    assert guard.hello_received(came[3]) is None, "of another address"
    assert "all 3 streams of this node" in guard.admit(Arrival("ipv4:10.0.0.3:1"))
    guard.release(came[0])
    assert "of this node" not in str(guard.admit(Arrival("ipv4:10.0.0.1:4")))
    assert sum(guard.refused.values()) == 1
    with serving(ConnectionGuard(limits=Limits(streams_per_address=0))) as (port, _):
        stream = grpc.ClientStream(f"127.0.0.1:{port}")
        with pytest.raises(grpc.Unreachable, match="all 0 streams that one address"):
            stream.open(WAIT_SECONDS)


def test_who_waits_takes_no_place_of_those_who_come_after():
    guard = ConnectionGuard(limits=Limits(streams=1, waiting_streams=4))
    silent = arrive(guard, *[f"ipv4:10.0.0.{n % 2}:{n}" for n in range(100)])
    assert sum(not stream.closed for stream in silent) == 4
    (honest,) = arrive(guard, "ipv4:10.0.1.1:1")
    arrive(guard, *[f"ipv4:10.0.0.{n % 2}:{n}" for n in range(100)])
    assert not honest.closed, "the only one of its address"
    assert guard.hello_received(honest) is None
    assert guard.refused == {"crowded": 197}


def test_who_does_not_show_the_token_has_few_places_and_none_of_the_others():
    guard = ConnectionGuard(WITH_TOKEN, Limits(waiting_streams=2, waiting_strangers=3))
    (honest,) = arrive(guard, "ipv4:10.0.0.1:1", shows_token=True)
    strangers = arrive(guard, *[f"ipv4:10.0.0.1:{n}" for n in range(50)])
    assert sum(not stream.closed for stream in strangers) == 3
    assert not honest.closed and guard.known_peers() == {honest.peer}


def test_strangers_without_the_token_hold_no_stream_against_a_worker():
    guard = ConnectionGuard(WITH_TOKEN, Limits(streams=2, waiting_strangers=2, waiting_streams=1))
    with serving(guard) as (port, _), contextlib.ExitStack() as silent:
        for _ in range(8):
            stranger = grpc.ClientStream(f"127.0.0.1:{port}")
            silent.callback(stranger.close, 0.0)
            stranger.open(WAIT_SECONDS)
        assert claim(port, WITH_TOKEN, WAIT_SECONDS) == b"welcome"
    assert guard.refused == {"crowded": 6}


def test_a_flood_of_strangers_gets_neither_threads_nor_sentences():
    guard = ConnectionGuard(WITH_TOKEN, Limits(strangers_per_second=1.0))
    shown = ((trust.NONCE, b"n" * 32), (trust.PASS, trust.client_pass(TOKEN, b"n" * 32)))
    heeded = [guard.is_heeded(()) for _ in range(100)]
    assert heeded == [True] * sum(heeded) + [False] * (100 - sum(heeded)) and sum(heeded) < 4
    assert guard.is_heeded(shown)
    with serving(guard) as (port, _):
        with pytest.raises(grpc.Unreachable, match="UNIMPLEMENTED"):
            grpc.ClientStream(f"127.0.0.1:{port}").open(WAIT_SECONDS)
        assert claim(port, WITH_TOKEN, WAIT_SECONDS) == b"welcome"


@pytest.mark.parametrize("token", [b"", b"another token, as long"])
def test_the_token_is_shown_where_a_stream_opens(token):
    nonce = b"n" * 32
    shown = ((trust.NONCE, nonce), (trust.PASS, trust.client_pass(token or TOKEN, nonce)))
    context = types.SimpleNamespace(auth_context=dict, invocation_metadata=lambda: shown)
    evidence, _ = trust.begin_handshake(context, WITH_TOKEN)
    assert evidence.shows_token is (not token)
    assert trust.check_client(evidence, WITH_TOKEN, WORKER, b"", ())[0] == pb.REASON_TOKEN


def test_refusals_are_logged_now_and_then(monkeypatch):
    from thinwire.proto.security import connection_guard as module

    lines, now = [], [0.0]
    monkeypatch.setattr(module.logging, "warning", lambda text, *words: lines.append(text % words))
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    guard = ConnectionGuard()
    for _ in range(1000):
        guard.record_refusal("rate", "ipv4:1.2.3.4:5", "x" * 5000)
    now[0] = 11.0
    guard.record_refusal("rate", "ipv4:1.2.3.4:5", "again")
    guard.record_refusal("token", "ipv4:1.2.3.4:5", "another reason")
    assert len(lines) == 3 and len(lines[0]) < 700
    assert lines[1].endswith("again (and 999 like it before)")
    assert guard.refused == {"rate": 1001, "token": 1}


def test_a_client_without_a_random_number_of_its_own_proves_nothing():
    for nonce in (b"", b"c", b"c" * 31):
        evidence = trust.PeerEvidence((), nonce, b"s" * 32)
        proof = trust.client_proof(TOKEN, nonce, b"s" * 32, ("a", "b"))
        assert judged(proof, evidence) == pb.REASON_TOKEN


@pytest.mark.parametrize("content", [b"", b"\n", b"too short"])
def test_a_token_file_without_a_token_is_refused(tmp_path, content):
    """The node would start without a token and admit every client."""
    path = tmp_path / "token"
    path.write_bytes(content)
    files = trust.CredentialFiles(token=str(path))
    with pytest.raises(ConfigurationError, match="--token_file.*at least 16"):
        trust.read(files, "", None, serves=True)

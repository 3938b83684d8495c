"""The bytes that a rejected stranger receives reveal no model, keys or run."""

import contextlib
import socket
import ssl
import threading

import numpy as np
import pytest

from tests.certificates import HOSTS, TOKEN, Papers
from tests.ps.service.test_strangers import shard_behind
from tests.ps.streams import Shard
from tests.virtual.toy import SPEC
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.proto.grpc import ServerStream, StreamLost
from thinwire.proto.grpc.session import ClientSession
from thinwire.proto.security.certificates import CertificateHolder, issue
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.proto.security.credentials import part_of_worker
from thinwire.ps.service.handshake import Identity
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

WAIT_SECONDS = 20.0
RUN_ID = "the-identity-of-this-run"


class Tap:
    """Forwards connections to a port and records the returned bytes."""

    def __init__(self, port):
        self.target, self.heard = port, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.ends += [near, far]
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, one, other, keep):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if keep:
                    self.heard += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self):
        for end in [self.listener, *self.ends]:
            end.close()


@contextlib.contextmanager
def tapped(guard):
    with shard_behind(guard) as (shard, port):
        shard.server.identity = Identity(RUN_ID, 0, 1, 0, shard.fingerprint, SPEC, [])
        shard.server.document = '{"seams": "of nobody\'s business"}'
        tap = Tap(port)
        try:
            yield shard, tap
        finally:
            tap.close()


def ask_for_everything(tap, credentials, shard, **hello):
    """Send Hello and immediately request the model; stay until the shard closes the connection."""
    session = ClientSession(f"127.0.0.1:{tap.port}", shard.hello(**hello), 1 << 20)
    session.stream.peer._credentials = credentials
    session.stream.peer.check = lambda: None  # a stranger does not check the server
    session.stream.open(WAIT_SECONDS)
    said = shard.hello(**hello)
    said.proof = session.stream.peer.prove(())
    for message in (
        pb.ToServer(hello=said),
        pb.ToServer(pull=pb.Pull()),
        pb.ToServer(pull=pb.Pull(observe=True)),
    ):
        session.stream.send((frame(message),))
    with contextlib.suppress(StreamLost):
        while True:
            session.stream.receive(WAIT_SECONDS)
    session.close()


def secrets_of(shard):
    theta = shard.core.model.theta.astype("<f4").tobytes()
    windows = {theta[at : at + 8] for at in range(0, len(theta) - 8, 4)}
    return windows | {TOKEN, RUN_ID.encode(), b"of nobody"}


def leaked(tap, shard):
    return [secret for secret in secrets_of(shard) if secret in bytes(tap.heard)]


@pytest.mark.parametrize(
    "credentials", [NO_CREDENTIALS, Credentials(token=b"not the run's token, but long")]
)
@pytest.mark.parametrize("role", [pb.ROLE_WORKER, pb.ROLE_SUPERVISOR])
def test_whoever_has_no_token_gets_a_sentence(credentials, role):
    with tapped(ConnectionGuard(Credentials(token=TOKEN))) as (shard, tap):
        shard.core.model.theta[:] = np.linspace(0.123, 4.567, shard.core.model.theta.size)
        ask_for_everything(tap, credentials, shard, role=role)
        assert b"does not prove that it has this run's token" in bytes(tap.heard)
        assert leaked(tap, shard) == []
        assert len(tap.heard) < 2000
        assert not shard.server.connections.workers and not shard.server.connections.observers
        assert shard.server.queue.empty() and shard.core.version == 0
        assert shard.server.guard.refused == {"token": 1}


def test_the_tap_does_hear_what_a_member_gets(monkeypatch):
    """The test above would fail: the same bytes are looked for where they must be."""
    monkeypatch.setattr(ServerStream, "offer_bulk", lambda stream: None)  # all through the tap
    with tapped(ConnectionGuard()) as (shard, tap):
        shard.core.model.theta[:] = np.linspace(0.123, 4.567, shard.core.model.theta.size)
        session = ClientSession(f"127.0.0.1:{tap.port}", shard.hello(id=1, run_id=RUN_ID), 1 << 20)
        assert session.open(WAIT_SECONDS).run_id == RUN_ID
        session.send_control(pb.ToServer(pull=pb.Pull()))
        while session.receive(WAIT_SECONDS)[0].WhichOneof("body") != "reply":
            pass
        session.close()
        assert RUN_ID.encode() in leaked(tap, shard) and len(leaked(tap, shard)) > 20


def test_a_neighbour_reads_nothing_of_what_tls_carries(monkeypatch):
    monkeypatch.setattr(ServerStream, "offer_bulk", lambda stream: None)
    papers = Papers()
    with tapped(ConnectionGuard(papers.of("ps-0"))) as (shard, tap):
        shard.core.model.theta[:] = np.linspace(0.123, 4.567, shard.core.model.theta.size)
        hello = shard.hello(id=1, run_id=RUN_ID)
        credentials = papers.of("worker-1")
        session = ClientSession(f"127.0.0.1:{tap.port}", hello, 1 << 20, credentials=credentials)
        assert session.open(WAIT_SECONDS).run_id == RUN_ID
        session.send_control(pb.ToServer(pull=pb.Pull()))
        while session.receive(WAIT_SECONDS)[0].WhichOneof("body") != "reply":
            pass
        session.close()
        assert leaked(tap, shard) == [] and len(tap.heard) > 4 * shard.core.model.theta.size


# -- certificates ------------------------------------------------------------------------------


def papers_of_strangers(mine, theirs):
    """Name -> the stranger's certificate, or None."""
    holder = CertificateHolder("worker-1", part_of_worker(1), HOSTS)
    return {
        "none": None,
        "expired": mine.expired("worker-1", part_of_worker(1)),
        "foreign": theirs.by_name["worker-1"],
        "made by a worker": issue(mine.by_name["worker-2"], holder, days=1),
    }


def application_bytes(port, folder, issued):
    """Return the bytes that a client with a certificate receives inside TLS over HTTP/2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if issued is not None:
        certificate, key = issued.pem()
        (folder / "c").write_bytes(certificate)
        (folder / "k").write_bytes(key)
        context.load_cert_chain(folder / "c", folder / "k")
    got = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as plain,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain) as inside,
    ):
        inside.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while data := inside.recv(4096):
            got += data
            if len(got) >= 9:
                break
    return got


def test_without_a_good_certificate_not_a_byte_comes_out_of_tls(tmp_path):
    mine, theirs = Papers(), Papers()
    shard = Shard()
    shard.server.guard = ConnectionGuard(mine.of("ps-0"))
    port = shard.server.listen("127.0.0.1", 0)
    try:
        for who, issued in papers_of_strangers(mine, theirs).items():
            assert application_bytes(port, tmp_path, issued) == b"", who
        good = application_bytes(port, tmp_path, mine.by_name["worker-1"])
        assert good[3:4] == b"\4"  # SETTINGS: the server accepts an authenticated client
    finally:
        shard.server.server.stop()
    assert not shard.server.connections.workers

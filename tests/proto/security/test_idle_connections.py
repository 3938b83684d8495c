"""Connections without a stream are closed; a connection with a stream may stay silent."""

import socket
import time

import pytest

from tests.certificates import Papers
from thinwire.proto.grpc import ClientStream, NoProgress
from thinwire.proto.grpc import server as grpc_server
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.runtime.run.credentials import Credentials

WAIT_SECONDS = 20.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def read_to_the_end(port, said):
    """Say something on a new connection and wait until the server ends it."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(said)
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass


@pytest.mark.parametrize(
    "protected", [pytest.param(False, marks=pytest.mark.product), True], ids=["plain", "TLS"]
)
def test_whoever_opens_no_stream_does_not_stay(monkeypatch, protected):
    monkeypatch.setattr(grpc_server, "_HANDSHAKE_MS", 600)
    monkeypatch.setattr(grpc_server, "_IDLE_MS", 800)
    papers = Papers()
    mine, theirs = (papers.of("ps-0"), papers.of("worker-1")) if protected else (Credentials(),) * 2

    def echo(stream):
        for data in stream.incoming():
            stream.send((data,))

    server = grpc_server.GrpcServer("127.0.0.1", 0, echo, guard=ConnectionGuard(mine))
    try:
        began = time.monotonic()
        legal = ClientStream(f"127.0.0.1:{server.port}", credentials=theirs)
        legal.open(WAIT_SECONDS)
        for said in (b"", PREFACE, PREFACE + SETTINGS):
            read_to_the_end(server.port, said)
        with pytest.raises(NoProgress):  # twice as long as a connection without streams may stand
            legal.receive(max(0.0, began + 1.7 - time.monotonic()))
        legal.send([b"x"])
        assert legal.receive(WAIT_SECONDS) == b"x"
        legal.close()
    finally:
        server.stop()

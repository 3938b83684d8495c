"""Idle connections take neither file descriptors nor places from other connections."""

import contextlib
import json
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from tests.proto.echoes import WAIT_SECONDS, connected
from thinwire.proto.grpc import server as grpc_server
from thinwire.proto.security import connection_sweeper
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits

ROOT = pathlib.Path(__file__).parents[3]
NUM_STRANGERS = 1200

#: A node that may open 512 files at first, and at most 1,024 if it wants; for a line that it reads
#: it opens files, and writes if that succeeded.
NODE = """
import json, resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
from thinwire.proto.grpc import GrpcServer
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
guard = ConnectionGuard(limits=Limits(streams=50))
def echo(stream):
    for data in stream.incoming():
        guard.hello_received(stream)
        stream.send((data,))
server = GrpcServer("127.0.0.1", 0, echo, guard=guard)
print(server.port, flush=True)
for line in sys.stdin:
    try:
        files = [tempfile.TemporaryFile() for _ in range(50)]
        found = {"files": len(files)}
    except OSError as error:
        found = {"error": str(error)}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    print(json.dumps({**found, "limit": limit, "refused": guard.refused}), flush=True)
"""


@pytest.mark.product
def test_strangers_leave_descriptors_for_files_and_places_for_workers():
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * NUM_STRANGERS, most)), most))
    with subprocess.Popen(
        [sys.executable, "-c", NODE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        strangers = []
        try:
            port = int(node.stdout.readline())
            for _ in range(NUM_STRANGERS):
                strangers.append(socket.create_connection(("127.0.0.1", port), WAIT_SECONDS))
            node.stdin.write("\n")
            node.stdin.flush()
            found = json.loads(node.stdout.readline())
            with connected(type("Server", (), {"port": port})) as worker:
                worker.send([b"x"])
                assert worker.receive(WAIT_SECONDS) == b"x"
        finally:
            node.kill()
            for stranger in strangers:
                stranger.close()
    assert found["files"] == 50
    assert found["limit"] == 1024, "the limit is raised to what the system allows"


def test_the_oldest_connections_of_the_greediest_end_and_members_stay(monkeypatch):
    monkeypatch.setattr(connection_sweeper, "SWEPT_FROM", 8)
    monkeypatch.setattr(connection_sweeper, "SWEPT_TO", 4)
    monkeypatch.setattr(connection_sweeper, "_SWEEP_SECONDS", 0.01)
    guard = ConnectionGuard(limits=Limits(streams=4))

    def enter(stream):
        for data in stream.incoming():
            guard.hello_received(stream)
            stream.send((data,))

    server = grpc_server.GrpcServer("127.0.0.1", 0, enter, guard=guard)
    strangers = []
    try:
        with connected(server) as member:
            member.send([b"x"])
            assert member.receive(WAIT_SECONDS) == b"x"
            for number in range(30):
                source = (f"127.0.0.{2 + number % 2}", 0)
                target = ("127.0.0.1", server.port)
                strangers.append(socket.create_connection(target, WAIT_SECONDS, source))
            deadline = time.monotonic() + WAIT_SECONDS
            while not guard.refused.get("connections") and time.monotonic() < deadline:
                pass
            strangers[0].settimeout(WAIT_SECONDS)
            assert strangers[0].recv(100) == b"" or strangers[0].recv(100) == b""
            member.send([b"y"])
            assert member.receive(WAIT_SECONDS) == b"y"
    finally:
        for stranger in strangers:
            stranger.close()
        server.stop()


def test_files_of_the_node_itself_are_examined_once(monkeypatch):
    monkeypatch.setattr(connection_sweeper, "SWEPT_FROM", 8)
    sweeper = connection_sweeper.ConnectionSweeper(0, ConnectionGuard())
    sweeper.stop()
    examined = []
    peer_of = connection_sweeper._peer_of
    monkeypatch.setattr(
        connection_sweeper, "_peer_of", lambda *of: examined.append(of) or peer_of(*of)
    )
    with contextlib.ExitStack() as files:
        for _ in range(20):
            files.enter_context(tempfile.TemporaryFile())
        sweeper.sweep(1.0)
        before = len(examined)
        sweeper.sweep(2.0)
        assert before >= 20
        assert len(examined) == before

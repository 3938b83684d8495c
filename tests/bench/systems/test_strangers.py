"""The bench of strangers opens real streams and measures a real run."""

import socket

from bench.systems.strangers import hold, opening
from tests.certificates import TOKEN
from tests.proto.echoes import echo, serving
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
from thinwire.runtime.run.credentials import Credentials

SETTINGS, HEADERS = 4, 1


def frames_of(connection):
    """Yield (type, payload) of each frame that a server sends."""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            yield head[3], stream.read(int.from_bytes(head[:3], "big"))


def test_an_opening_is_a_call_that_a_server_accepts():
    with (
        serving(echo) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger,
    ):
        stranger.sendall(opening())
        kinds = (kind for kind, _ in frames_of(stranger))
        assert next(kinds) == SETTINGS
        assert HEADERS in kinds


def test_connections_and_streams_are_held_and_counted():
    guard = ConnectionGuard(Credentials(token=TOKEN), Limits(waiting_strangers=1))
    with serving(echo, guard) as server:
        assert hold(server.port, opening(), 0.3) > 2
        assert guard.refused.get("crowded", 0) > 0

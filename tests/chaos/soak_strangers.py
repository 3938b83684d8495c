"""Connections from clients that do not belong to the run."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def call(port: int, dice: random.Random) -> Callable[[], None]:
    """Call a shard and send an odd message; return what ends the call."""
    if dice.random() < 0.4:
        return _introduce(port, dice)
    said = dice.choice((b"", _PREFACE, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"))
    said += dice.randbytes(dice.choice((0, 100, 10_000)))
    wire = socket.socket()
    with contextlib.suppress(OSError):
        wire.settimeout(2.0)
        wire.connect(("127.0.0.1", port))
        wire.sendall(said)
    return wire.close


def _introduce(port: int, dice: random.Random) -> Callable[[], None]:
    """Send the Hello of a client that does not belong to the run."""
    hello = pb.Hello(
        protocol_version=dice.choice((messages.PROTOCOL_VERSION, 99)),
        role=dice.choice((pb.ROLE_WORKER, pb.ROLE_SHARD, 9)),
        id=dice.choice((0, 1, 2, 77)),
        run_id=dice.choice(("another", "")),
        num_shards=dice.choice((1, 2, 5)),
    )
    session = ClientSession(f"127.0.0.1:{port}", hello, 1 << 20)

    def speak() -> None:
        with contextlib.suppress(RequestRejected, StreamLost, Unreachable):
            session.open(5.0)

    thread = threading.Thread(target=speak, name="stranger", daemon=True)
    thread.start()

    def leave() -> None:
        if not thread.is_alive():
            session.close(0.0)

    return leave

"""How both ends of a bulk connection show that they are those of the gRPC stream.

The client names the offer, then TLS begins where the run has it, then both prove that they have the
key that came through the stream, and the run's token.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable

from thinwire.ops.run.credentials import Credentials
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection, TcpWire, Wire
from thinwire.proto.bulk.tls import TlsWire, context_of

NUMBER_BYTES = 16
KEY_BYTES = 32
PROOF_BYTES = 32


def set_class(each: socket.socket, dscp: int | None) -> None:
    """Set the class of service of all packets, 0..63; None leaves it to the system."""
    if dscp is None:
        return
    if each.family == socket.AF_INET6:
        each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        each.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def connect(
    host: str,
    offered: pb.BulkSession,
    credentials: Credentials,
    server_name: str | None,
    dscp: int | None,
    timeout_seconds: float,
) -> BulkConnection:
    """Dial what a Welcome offers.

    Args:
        host: Of the gRPC stream.
        offered: The offer.
        credentials: Of this node.
        server_name: What the shard's certificate must name; None: the host.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        timeout_seconds: For each of three steps.

    Raises:
        OSError: There is no way, or the other end is not the shard.
    """
    each = socket.create_connection((host, offered.port), timeout_seconds)
    try:
        set_class(each, dscp)
        each.sendall(offered.number)
        wire: Wire
        if credentials.authority:
            wire = TlsWire(each, context_of(credentials, serves=False), server_name or host)
        else:
            wire = TcpWire(each)
        each.settimeout(timeout_seconds)
        wire.send((_proof(b"client", offered.number, offered.key, credentials),))
        theirs = _receive(wire, PROOF_BYTES)
        if not hmac.compare_digest(
            theirs, _proof(b"server", offered.number, offered.key, credentials)
        ):
            raise ConnectionRefusedError("the other end does not prove to be the shard")
        each.settimeout(None)
    except BaseException:
        each.close()
        raise
    return BulkConnection(wire)


def accept(
    each: socket.socket,
    number: bytes,
    key: bytes,
    credentials: Credentials,
    attach: Callable[[BulkConnection], None],
) -> None:
    """Go on with a client that has named an offer.

    Args:
        each: Its socket, with a time-out for each step.
        number: Of the offer.
        key: Of the offer.
        credentials: Of the shard.
        attach: Takes the connection over, before the client learns that it stands.

    Raises:
        OSError: It is not the client of the stream.
    """
    timeout_seconds = each.gettimeout()
    wire: Wire
    if credentials.certificate:
        wire = TlsWire(each, context_of(credentials, serves=True), None)
    else:
        wire = TcpWire(each)
    each.settimeout(timeout_seconds)
    if not hmac.compare_digest(
        _receive(wire, PROOF_BYTES), _proof(b"client", number, key, credentials)
    ):
        raise ConnectionRefusedError("the other end does not prove to be the client")
    each.settimeout(None)
    attach(BulkConnection(wire))
    wire.send((_proof(b"server", number, key, credentials),))


def _receive(wire: Wire, size: int) -> bytes:
    data = memoryview(bytearray(size))
    count = 0
    while count < size:
        if not (more := wire.receive_into(data[count:])):
            raise ConnectionResetError("the connection ended in its handshake")
        count += more
    return bytes(data)


def _proof(end: bytes, number: bytes, key: bytes, credentials: Credentials) -> bytes:
    secret = hmac.digest(key, b"thinwire.v1.bulk" + credentials.token, "sha256")
    return hmac.digest(secret, end + number, "sha256")

"""What both ends of a gRPC stream share: names, options, byte counting, addresses, chunk sizes.

`ChunkPace` adapts the size of a payload's messages to the link. A whole message is the smallest
sign of life that the other end sees: on a link of 0.5 Mbit/s one of 1 MiB takes 17 s, and its
sender would be declared dead each time; on a fast link small messages cost time for nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import (
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    MIN_CHUNK_BYTES,
    Frame,
    frame,
)
from thinwire.runtime.run.credentials import NOT_PROTECTED, Protection

SERVICE = "thinwire.v1.ParameterServer"
PEER_SERVICE = "thinwire.v1.Peer"  # of a worker, for its peers
METHOD = "Session"

_MESSAGE_OVERHEAD_BYTES = 5  # gRPC: compression flag and length
_FRAME_OVERHEAD_BYTES = 9  # HTTP/2 frame header
_FRAME_BYTES = 16 << 10

#: Frames, or a function that makes them when their turn has come.
Frames = Iterable[Frame] | Callable[[], Iterable[Frame]]

#: Frames on their way to a stream's sending thread: the frames, whether their bytes are training
#: bytes, and when they were queued. A tuple because every exchange makes two of them.
QueuedFrames = tuple[Frames, bool, float]


#: The last frames that a client and a server send on a stream before its bulk connection.
CLIENT_SWITCHES = frame(pb.ToServer(switch=pb.Switch()))
SERVER_SWITCHES = frame(pb.ToClient(switch=pb.Switch()))


def wire_bytes(num_bytes: int) -> int:
    """Return what one message costs on a stream: 5 bytes, and 9 for each 16 KiB frame of it."""
    inside = num_bytes + _MESSAGE_OVERHEAD_BYTES
    num_frames = -(-inside // _FRAME_BYTES)
    return inside + _FRAME_OVERHEAD_BYTES * num_frames


def channel_options(keepalive_seconds: float, dscp: int | None = None) -> list[tuple[str, int]]:
    """Return the gRPC options of both ends.

    A silent peer is noticed after two keep-alive times. Messages just above the limit come
    through, so that they can be refused with a reason. ``dscp`` is the class of service, 0..63, of
    all packets of this end; None leaves it to the system.
    """
    keepalive_ms = round(1000 * keepalive_seconds)
    marks = [] if dscp is None else [("grpc.dscp", dscp)]
    return [
        *marks,
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + (64 << 10)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + (64 << 10)),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ]


def host_and_port(address: str, port: int) -> str:
    """Return ``host:port`` as gRPC wants it, IPv6 addresses in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address: 127.0.0.0/8, ::1, localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(
    address: str, insecure: bool, protection: Protection = NOT_PROTECTED, flag: str = "ip_PS"
) -> None:
    """Refuse to listen beyond this machine without authentication unless the user allows it.

    Args:
        address: To listen at.
        insecure: Whether the user allows it.
        protection: Of those who listen there.
        flag: Names the address, for the message.

    Raises:
        ConfigurationError: Others reach the address, and nothing keeps strangers out.
    """
    if is_loopback(address):
        return
    if protection.authenticated:
        if not protection.encrypted:
            logging.warning(
                "listening on %s with a token alone: strangers are rejected, but anyone who can "
                "listen to the network reads weights and updates; TLS (--tls_cert) encrypts them",
                address,
            )
        return
    what = (
        "encrypted, but not authenticated"
        if protection.encrypted
        else "neither encrypted nor authenticated"
    )
    if not insecure:
        raise ConfigurationError(
            f"--{flag}={address} is reachable from other machines and the connection is {what}; "
            "bind 127.0.0.1, give certificates (--tls_cert, --tls_key, --tls_ca) or a token "
            "(--token_file), or add --insecure if every machine that can reach this address is "
            "trusted"
        )
    logging.warning(
        "listening on %s with --insecure, %s; whoever reaches this address can read and change "
        "the model",
        address,
        what,
    )


_FIRST_BYTES = 32 << 10
#: For one message; much less than any lease.
_TARGET_SECONDS = 0.5
#: This many easy ones in a row double the size. Systems accept megabytes into their buffers
#: immediately, whatever the link: pieces of 1 MiB come after 8 MiB that went well.
_IN_A_ROW = 8


class ChunkPace:
    """Bytes of a payload's next piece; for the one thread that sends them.

    Doubles while pieces pass easily, and falls to what passes in the time aimed at. Begins small:
    nothing is known of a new connection.
    """

    def __init__(self) -> None:
        self.num_bytes = _FIRST_BYTES
        self._num_easy = 0

    def finish(self) -> None:
        """Take the largest from now on: every byte is a sign of life on a bulk connection."""
        self.num_bytes = MAX_CHUNK_BYTES

    def record(self, num_bytes: int, seconds: float) -> None:
        """Record how long the network took to accept a message of this many bytes."""
        if seconds > _TARGET_SECONDS:
            fitting = int(num_bytes * _TARGET_SECONDS / seconds)
            self.num_bytes = max(MIN_CHUNK_BYTES, min(self.num_bytes, fitting))
            self._num_easy = 0
        elif num_bytes >= self.num_bytes:
            self._num_easy = self._num_easy + 1 if seconds < _TARGET_SECONDS / 4 else 0
            if self._num_easy == _IN_A_ROW:
                self.num_bytes, self._num_easy = min(MAX_CHUNK_BYTES, 2 * self.num_bytes), 0

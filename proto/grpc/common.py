"""Functions for both ends of a gRPC stream: options, byte counts, addresses and chunk sizes.

`ChunkPace` adapts the size of the messages in which a payload is sent to the link. The library gRPC
delivers whole messages only, so the receiver sees no progress before a message is complete. On a
link of 0.5 Mbit/s a message of 1 MiB takes 17 s, and the receiver would declare the sender dead
during each such message. On a fast link, sending a payload in small messages wastes time.
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
PEER_SERVICE = "thinwire.v1.Peer"  # gRPC service of a worker for other workers
METHOD = "Session"

_MESSAGE_OVERHEAD_BYTES = 5  # size in bytes of gRPC's compression flag and length before a message
_FRAME_OVERHEAD_BYTES = 9  # size of an HTTP/2 frame header in bytes
_FRAME_BYTES = 16 << 10

#: Frames to send, or a function that the sending thread calls just before it sends the returned
#: frames.
Frames = Iterable[Frame] | Callable[[], Iterable[Frame]]

#: Entry in the queue of a stream's sending thread: frames, whether their bytes count as training
#: traffic, and the monotonic time when they were queued. The entry is a tuple, because a tuple is
#: cheaper than an object and every exchange creates two entries.
QueuedFrames = tuple[Frames, bool, float]


#: Last frame that a client (and the server) sends over gRPC before it uses the bulk connection.
CLIENT_SWITCHES = frame(pb.ToServer(switch=pb.Switch()))
SERVER_SWITCHES = frame(pb.ToClient(switch=pb.Switch()))


def wire_bytes(num_bytes: int) -> int:
    """Return the bytes of one message on the wire, with 5 bytes of gRPC and HTTP/2 frame headers.

    An HTTP/2 frame header has 9 bytes, and an HTTP/2 frame contains up to 16 KiB.
    """
    message_bytes = num_bytes + _MESSAGE_OVERHEAD_BYTES
    num_frames = -(-message_bytes // _FRAME_BYTES)
    return message_bytes + _FRAME_OVERHEAD_BYTES * num_frames


def channel_options(keepalive_seconds: float, dscp: int | None = None) -> list[tuple[str, int]]:
    """Return the gRPC options for a channel or a server.

    The library gRPC detects a silent peer after two keepalive times. The message size limit of gRPC
    is 64 KiB above Thinwire's limit, so that Thinwire can reject a message that is slightly too
    large with a reason.

    Args:
        keepalive_seconds: gRPC keepalive time, in seconds.
        dscp: DSCP class of service of all outgoing packets, 0..63. None: the system's default.
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
    """Return ``host:port`` in gRPC's form, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Return True for an address that only this machine reaches: 127.0.0.0/8, ::1, localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(address: str, insecure: bool, protection: Protection = NOT_PROTECTED) -> None:
    """Raise an error if a node would listen for other machines without authentication, unless the
    user allows it.

    Args:
        address: Address at which the node will listen.
        insecure: True if the user passed --insecure.
        protection: Encryption and authentication of the listening node.

    Raises:
        ConfigurationError: Other machines reach the address, and the node does not authenticate
            its clients.
    """
    if is_loopback(address):
        return
    if protection.authenticated:
        if not protection.encrypted:
            logging.warning(
                "this PS listens on %s with a token but without TLS: clients without the token "
                "are rejected, but anyone who can read the network traffic reads weights and "
                "updates; TLS (--tls_cert) encrypts the traffic",
                address,
            )
        return
    state = (
        "encrypted, but not authenticated"
        if protection.encrypted
        else "neither encrypted nor authenticated"
    )
    if not insecure:
        raise ConfigurationError(
            f"--ip_PS={address} is reachable from other machines, but the connection is {state}; "
            "listen on 127.0.0.1, give certificates (--tls_cert, --tls_key, --tls_ca) or a token "
            "(--token_file), or add --insecure if every machine that can reach this address is "
            "trusted"
        )
    logging.warning(
        "this PS listens on %s with --insecure, %s; anyone who reaches this address can read and "
        "change the model",
        address,
        state,
    )


_FIRST_BYTES = 32 << 10
#: Time in seconds that the network should take to accept one message, much less than any lease.
_TARGET_SECONDS = 0.5
#: Number of fast messages in a row that doubles the piece size. The operating system buffers
#: megabytes immediately, even on a slow link, so one fast message proves nothing. With 8 messages,
#: the piece size reaches 1 MiB only after about 8 MiB have passed fast.
_IN_A_ROW = 8


class ChunkPace:
    """Adaptive size of the pieces of a large payload; only the sending thread may call its methods.

    The size of payload pieces doubles while the network accepts pieces fast. After a payload piece
    that the network accepts slowly, the piece size falls to the number of bytes that it accepts
    within the target time. The size of payload pieces starts small, because the speed of a new
    connection is unknown.

    Attributes:
        num_bytes: Size of the next payload piece, in bytes.
    """

    def __init__(self) -> None:
        self.num_bytes = _FIRST_BYTES
        self._num_easy = 0

    def finish(self) -> None:
        """Use the largest piece size, because a bulk connection's receiver sees each byte's
        progress.
        """
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

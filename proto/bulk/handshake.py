"""How client and shard prove on a bulk (TCP) connection that they are the ends of a gRPC stream.

A client begins a bulk connection's handshake with the secret number of its attempt, which the offer
in the shard's Welcome message determines. After the client has sent its attempt's number, TLS
starts on the bulk connection if the run uses TLS. On the bulk connection, client and shard then
prove to each other that they have the run's token, and the key that the gRPC stream carried.

`Handshake` is the state machine of one end (client or shard) of a bulk connection after the client
has sent its attempt's number. `Handshake` uses no socket and no clock: callers pass all bytes in
and out. Without sockets in `Handshake`, a shard can run all handshakes in one thread, with one
deadline for each whole handshake, and tests reach every state. The function `connect` runs the
client's end of the handshake over a socket.

The secret number of an attempt to open a bulk connection is valid for one connection only. Every
attempt of a client to open a bulk connection has a different number. If the run does not use TLS,
the Welcome message contains the number of the client's first connection attempt in clear, but not
the numbers of later attempts. An eavesdropper on one connection attempt can neither compute the
number of the next attempt nor repeat a proof, because a proof is valid for one number only.
"""

from __future__ import annotations

import enum
import hmac
import socket
import time
from collections.abc import Callable
from typing import Any

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection, TcpWire
from thinwire.proto.bulk.tls import TlsRecords, TlsWire, context_of
from thinwire.runtime.run.credentials import Credentials

NUMBER_BYTES = 16
KEY_BYTES = 32
PROOF_BYTES = 32
#: Largest number of bytes that client or shard accepts in a handshake. OpenSSL accepts a
#: certificate chain of 100 KiB at most, and an honest handshake has 5 KiB.
MOST_HANDSHAKE_BYTES = 128 << 10
_READ_BYTES = 16 << 10


class BulkFailure(enum.Enum):
    """Reason why an attempt to open a bulk (TCP) connection has failed."""

    #: The host refuses the connection to the port, or no route leads to the host, so that another
    #: attempt would fail as well.
    UNREACHABLE = "unreachable"
    #: The client's TCP connection gets no answer: a firewall drops the packets, or a flood has
    #: filled the shard's accept queue. Only another attempt can distinguish a firewall from a
    #: flood.
    SILENT = "silent"
    #: The shard, or a machine on the path, closed the connection or left it unanswered, for example
    #: because the shard is overloaded. Another attempt may succeed.
    TURNED_AWAY = "turned away"
    #: The peer of the connection did not prove that it is the shard.
    DISTRUSTED = "distrusted"


class NoBulkConnection(OSError):
    """Error: an attempt to open a bulk (TCP) connection has failed.

    Attributes:
        failure: Kind of the failure, by which the client decides whether to try again.
    """

    def __init__(self, failure: BulkFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


class HandshakeState(enum.Enum):
    """State of one end (client or shard) of a bulk connection's handshake."""

    SECURING = "the TLS handshake is running"
    PROVING = "waiting for the other end's proof"
    PROVEN = "the other end's proof is valid"
    FAILED = "TLS failed, the proof is false, or too many bytes arrived"


#: Legal next states of each state of a handshake.
TRANSITIONS: dict[HandshakeState, tuple[HandshakeState, ...]] = {
    HandshakeState.SECURING: (HandshakeState.PROVING, HandshakeState.FAILED),
    HandshakeState.PROVING: (HandshakeState.PROVEN, HandshakeState.FAILED),
    HandshakeState.PROVEN: (),
    HandshakeState.FAILED: (),
}


class Handshake:
    """One end of a bulk connection's handshake after the client has sent the attempt's number.

    In a bulk connection's handshake, the client sends its proof of identity before the shard does.
    The shard's listener sends the shard's proof after the gRPC stream has taken over the bulk
    connection.

    Attributes:
        state: Current state of the handshake at this end (client or shard).
        proof: Proof of 32 bytes that this end has the run's token and the offer's key. After the
            handshake, a shard sends its own proof over the byte stream `wire`.

    Args:
        number: Secret number of 16 bytes that identifies this connection attempt.
        key: Secret key of 32 bytes in the shard's offer of a bulk connection.
        token: Token of the run; empty if the run has no token.
        records: TLS state machine of the connection, before the TLS handshake; None if the run does
            not use TLS.
        serves: True for the shard's end, False for the client's end.
    """

    def __init__(
        self, number: bytes, key: bytes, token: bytes, records: TlsRecords | None, serves: bool
    ) -> None:
        secret = hmac.digest(key, b"thinwire.v1.bulk" + token, "sha256")
        ends = (b"server", b"client") if serves else (b"client", b"server")
        self.proof, self._expected = (hmac.digest(secret, e + number, "sha256") for e in ends)
        self._records, self._serves = records, serves
        self.state = HandshakeState.PROVING if records is None else HandshakeState.SECURING
        self._arrived = bytearray()  # Received bytes of the peer's proof.
        self._num_bytes = 0

    @property
    def wanted_bytes(self) -> int:
        """Largest number of bytes that the caller may read from the handshake's socket now."""
        # Frames follow the peer's proof without a gap, and a read beyond the proof would consume
        # the first bytes of a frame. With TLS, the surplus bytes stay in `records`, which later
        # decrypts the frames.
        return _READ_BYTES if self._records else PROOF_BYTES - len(self._arrived)

    def begin(self) -> bytes:
        """Return the handshake's first bytes for the peer; empty if the peer must send bytes first.

        Raises:
            ssl.SSLError: The TLS handshake of the connection fails.
        """
        if self._records is not None:
            return self._secure(self._records)
        return b"" if self._serves else self.proof

    def receive(self, data: bytes) -> bytes:
        """Process handshake bytes received from the peer; return the bytes to send to the peer.

        Args:
            data: Handshake bytes received from the peer; at least one, at most `wanted_bytes`.

        Raises:
            ConnectionRefusedError: The peer's proof of its identity is false, or the peer sent too
                many bytes.
            ssl.SSLError: The TLS handshake of the connection fails.
        """
        self._num_bytes += len(data)
        if self._num_bytes > MOST_HANDSHAKE_BYTES:
            self._enter(HandshakeState.FAILED)
            raise ConnectionRefusedError(
                f"the other end sent more than {MOST_HANDSHAKE_BYTES} bytes in its handshake"
            )
        if self._records is None:
            self._arrived += data
            answer = b""
        else:
            self._records.put(data)
            answer = self._secure(self._records)
        if len(self._arrived) >= PROOF_BYTES:
            self._check()
        return answer

    def wire(self, connected: socket.socket) -> TcpWire:
        """Return the byte stream that carries the connection's frames after the handshake.

        Args:
            connected: Socket of the bulk connection, after the handshake.
        """
        if self._records is None:
            return TcpWire(connected)
        return TlsWire(connected, self._records)

    def _secure(self, records: TlsRecords) -> bytes:
        answer = b""
        try:
            if self.state is HandshakeState.SECURING and records.handshake():
                self._enter(HandshakeState.PROVING)
                if not self._serves:
                    answer = records.take() + records.encrypt(self.proof)
            space = memoryview(bytearray(PROOF_BYTES))
            while self.state is HandshakeState.PROVING and len(self._arrived) < PROOF_BYTES:
                count = records.decrypt_into(space[: PROOF_BYTES - len(self._arrived)])
                if count == 0:
                    raise ConnectionResetError("the other end closed TLS in its handshake")
                if count is None:
                    break
                self._arrived += space[:count]
        except OSError:  # ssl.SSLError is a subclass of OSError.
            self._enter(HandshakeState.FAILED)
            raise
        return answer + records.take()

    def _check(self) -> None:
        if hmac.compare_digest(bytes(self._arrived), self._expected):
            self._enter(HandshakeState.PROVEN)
            return
        self._enter(HandshakeState.FAILED)
        end = "the client" if self._serves else "the shard"
        raise ConnectionRefusedError(
            f"the other end sent a false proof: expected the proof of {end} of the stream"
        )

    def _enter(self, state: HandshakeState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a bulk handshake cannot change from {self.state} to {state}")
        self.state = state


def number_of(first: bytes, key: bytes, attempt: int) -> bytes:
    """Return the 16 bytes that identify one attempt to open the bulk connection that a shard
    offers.

    Args:
        first: Secret number of the client's first attempt to connect, which the shard's offer
            contains.
        key: Secret key of 32 bytes in the shard's offer.
        attempt: Index of the connection attempt, from 0.
    """
    if attempt == 0:
        return first
    text = b"thinwire.v1.bulk attempt" + attempt.to_bytes(4, "big") + first
    return hmac.digest(key, text, "sha256")[:NUMBER_BYTES]


def set_class(connected: socket.socket, dscp: int | None) -> None:
    """Set the class of service (DSCP, 0..63) of a socket's packets; None: the system's default."""
    if dscp is None:
        return
    if connected.family == socket.AF_INET6:
        connected.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        connected.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def connect(
    host: str,
    offered: pb.BulkSession,
    credentials: Credentials,
    server_name: str | None,
    dscp: int | None,
    seconds: float,
    attempt: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> BulkConnection:
    """Open the bulk connection that a shard's Welcome message offers.

    Args:
        host: Host name or address of the shard, as the gRPC stream uses it.
        offered: Offer of a bulk connection from the shard's Welcome.
        credentials: Certificate, key and token of the client.
        server_name: Name that the shard's certificate must have; None: `host`.
        dscp: Class of service (DSCP) of sent packets, 0..63; None: the system's default.
        seconds: Time limit in seconds for name lookup, connecting and the whole handshake of a bulk
            connection.
        attempt: Number of earlier attempts of the client to connect on this offer.
        clock: Function that returns seconds of a monotonic clock.

    Raises:
        NoBulkConnection: The shard's port is not reachable, or the peer at the port is not the
            shard.
    """
    deadline = clock() + seconds

    def left() -> float:
        seconds_left = deadline - clock()
        if seconds_left <= 0:
            raise TimeoutError(f"no answer in {seconds:.3g} s")
        return seconds_left

    try:
        addresses = socket.getaddrinfo(host, offered.port, type=socket.SOCK_STREAM)
        left()
    # A lookup of a host name may succeed later, so another attempt is useful.
    except OSError as error:
        raise NoBulkConnection(
            BulkFailure.TURNED_AWAY, f"the name {host} cannot be resolved: {error}"
        ) from error
    try:
        connected = _dial(addresses, left)
    except TimeoutError as error:
        text = f"nothing answers there within {seconds:.3g} s"
        raise NoBulkConnection(BulkFailure.SILENT, text) from error
    except (OSError, OverflowError) as error:  # A port above 65535 raises OverflowError.
        raise NoBulkConnection(BulkFailure.UNREACHABLE, str(error)) from error
    try:
        set_class(connected, dscp)
        # The client sends the attempt's number first and without delay: an overloaded shard closes
        # the connections that have not sent a number before all other connections.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = number_of(offered.number, offered.key, attempt)
        connected.settimeout(left())
        connected.sendall(number)
        records = None
        if credentials.authority:
            records = TlsRecords(context_of(credentials, serves=False), server_name or host)
        handshake = Handshake(number, offered.key, credentials.token, records, serves=False)
        return _prove(connected, handshake, left)
    except BaseException as error:
        connected.close()
        # ValueError: TLS cannot use the node's credentials, or rejects the shard's certificate
        # (SSLCertVerificationError).
        if isinstance(error, ConnectionRefusedError | ValueError):
            raise NoBulkConnection(BulkFailure.DISTRUSTED, str(error)) from error
        if isinstance(error, OSError):
            raise NoBulkConnection(BulkFailure.TURNED_AWAY, str(error)) from error
        raise


def _dial(addresses: list[Any], left: Callable[[], float]) -> socket.socket:
    """Return a TCP socket that is connected to the shard's port. The connection attempts to all
    addresses of the host from `getaddrinfo` share the remaining time.
    """
    error: OSError = ConnectionError("the host has no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(left() / (len(addresses) - index))
            connected.connect(address)
            return connected
        except BaseException as failure:
            connected.close()
            if not isinstance(failure, OSError):
                raise
            error = failure
    raise error


def _prove(
    connected: socket.socket, handshake: Handshake, left: Callable[[], float]
) -> BulkConnection:
    """Run the client's handshake over a socket."""
    sending = handshake.begin()
    while True:
        if sending:
            connected.settimeout(left())
            connected.sendall(sending)
        if handshake.state is HandshakeState.PROVEN:
            return BulkConnection(handshake.wire(connected))
        connected.settimeout(left())
        data = connected.recv(handshake.wanted_bytes)
        if not data:
            raise ConnectionResetError("the other end closed the connection in its handshake")
        sending = handshake.receive(data)

"""How both ends of a bulk connection show that they are the ends of the gRPC stream.

The client sends the number of the offer, then TLS begins where the run has it, then both prove that
they have the key that came through the stream, and the run's token.

`Handshake` is one end after the number, without a socket or a clock: bytes go in, bytes come out.
So a shard runs all its handshakes in one thread, each with one deadline for the whole, however the
bytes trickle in; and every state can be tested. `connect` is the client's end with its socket.

A number is used once. An offer has a number for each attempt of its client, and only the first one
is sent in clear before it is used: a neighbor who has seen an attempt cannot name the next number,
nor repeat a proof, which holds for one number.
"""

from __future__ import annotations

import enum
import hmac
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection, TcpWire, Wire
from thinwire.proto.bulk.tls import TlsRecords, TlsWire, context_of
from thinwire.runtime.run.credentials import Credentials

NUMBER_BYTES = 16
KEY_BYTES = 32
PROOF_BYTES = 32
#: Bytes that one end takes in for a handshake. OpenSSL itself takes a certificate chain of 100 KiB
#: at most; an honest handshake has 5 KiB.
MOST_HANDSHAKE_BYTES = 128 << 10
_READ_BYTES = 16 << 10


class BulkFailure(enum.Enum):
    """Why a client has no bulk connection."""

    #: The port is refused, or has no route. Another attempt fails as well.
    UNREACHABLE = "unreachable"
    #: Nothing answers a TCP connection: a firewall drops it, or a flood has filled the shard's
    #: queue, which a client cannot distinguish. Another attempt shows which one.
    SILENT = "silent"
    #: The shard, or a machine on the way, closed the connection or left it unanswered, as a shard
    #: does that is crowded. Another attempt may succeed.
    TURNED_AWAY = "turned away"
    #: The other end is not the shard.
    DISTRUSTED = "distrusted"


class NoBulkConnection(OSError):
    """An attempt to get a bulk connection has failed.

    Attributes:
        failure: In which manner.
    """

    def __init__(self, failure: BulkFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


class HandshakeState(enum.Enum):
    """Where one end is."""

    SECURING = "TLS begins"
    PROVING = "the other end's proof is awaited"
    PROVEN = "the other end has proven itself"
    FAILED = "the other end is not the right one, or sends something else"


#: Each state's successors.
TRANSITIONS: dict[HandshakeState, tuple[HandshakeState, ...]] = {
    HandshakeState.SECURING: (HandshakeState.PROVING, HandshakeState.FAILED),
    HandshakeState.PROVING: (HandshakeState.PROVEN, HandshakeState.FAILED),
    HandshakeState.PROVEN: (),
    HandshakeState.FAILED: (),
}


class Handshake:
    """One end of a handshake after the number has been sent.

    The client proves itself first. A shard sends its own proof itself, after it has taken the
    connection over.

    Attributes:
        state: See `HandshakeState`.

    Args:
        number: Of this attempt.
        key: Of the offer.
        token: Of the run; empty: it has none.
        records: TLS that has not begun; None: the run has none.
        serves: Whether this is the shard's end.
    """

    def __init__(
        self, number: bytes, key: bytes, token: bytes, records: TlsRecords | None, serves: bool
    ) -> None:
        secret = hmac.digest(key, b"thinwire.v1.bulk" + token, "sha256")
        ends = (b"server", b"client") if serves else (b"client", b"server")
        self._mine, self._expected = (hmac.digest(secret, e + number, "sha256") for e in ends)
        self._records, self._serves = records, serves
        self.state = HandshakeState.PROVING if records is None else HandshakeState.SECURING
        self._arrived = bytearray()  # of the other end's proof
        self._num_bytes = 0

    @property
    def wanted_bytes(self) -> int:
        """How many bytes to read now, at most: a byte more would belong to a frame."""
        return _READ_BYTES if self._records else PROOF_BYTES - len(self._arrived)

    def begin(self) -> bytes:
        """Return what to send first.

        Raises:
            ssl.SSLError: As `receive` does.
        """
        if self._records is not None:
            return self._secure(self._records)
        return b"" if self._serves else self._mine

    def receive(self, data: bytes) -> bytes:
        """Take in bytes; return what to send.

        Args:
            data: Not empty; at most `wanted_bytes`.

        Raises:
            ConnectionRefusedError: The proof is false, or too many bytes have come.
            ssl.SSLError: TLS fails.
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

    @property
    def proof(self) -> bytes:
        """What proves this end; a shard sends it over `wire`."""
        return self._mine

    def wire(self, connected: socket.socket) -> Wire:
        """Return what carries frames from now on."""
        if self._records is None:
            return TcpWire(connected)
        return TlsWire(connected, self._records)

    def _secure(self, records: TlsRecords) -> bytes:
        answer = b""
        try:
            if self.state is HandshakeState.SECURING and records.handshake():
                self._enter(HandshakeState.PROVING)
                if not self._serves:
                    answer = records.take() + records.encrypt(self._mine)
            space = memoryview(bytearray(PROOF_BYTES))
            while self.state is HandshakeState.PROVING and len(self._arrived) < PROOF_BYTES:
                count = records.decrypt_into(space[: PROOF_BYTES - len(self._arrived)])
                if count == 0:
                    raise ConnectionResetError("the other end closed TLS in its handshake")
                if count is None:
                    break
                self._arrived += space[:count]
        except OSError:  # ssl.SSLError is one
            self._enter(HandshakeState.FAILED)
            raise
        return answer + records.take()

    def _check(self) -> None:
        if hmac.compare_digest(bytes(self._arrived), self._expected):
            self._enter(HandshakeState.PROVEN)
            return
        self._enter(HandshakeState.FAILED)
        end = "the client" if self._serves else "the shard"
        raise ConnectionRefusedError(f"the other end does not prove to be {end} of the stream")

    def _enter(self, state: HandshakeState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a handshake went from {self.state} to {state}")
        self.state = state


def number_of(first: bytes, key: bytes, attempt: int) -> bytes:
    """Return the number of an attempt.

    Args:
        first: Of attempt 0, as the offer has it.
        key: Of the offer.
        attempt: From 0.
    """
    if attempt == 0:
        return first
    text = b"thinwire.v1.bulk attempt" + attempt.to_bytes(4, "big") + first
    return hmac.digest(key, text, "sha256")[:NUMBER_BYTES]


def set_class(connected: socket.socket, dscp: int | None) -> None:
    """Set the class of service of all packets, 0..63; None leaves it to the system."""
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
    """Dial what a Welcome offers.

    Args:
        host: Of the gRPC stream.
        offered: The offer.
        credentials: Of this node.
        server_name: What the shard's certificate must name; None: the host.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        seconds: For everything together: a shard that sends a byte now and then gets no more.
        attempt: How many attempts there were before on this offer.
        clock: Monotonic.

    Raises:
        NoBulkConnection: There is no path, or the other end is not the shard.
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
    except OSError as error:  # names are known again later
        raise NoBulkConnection(
            BulkFailure.TURNED_AWAY, f"{host} is not resolved: {error}"
        ) from error
    try:
        connected = _dial(addresses, left)
    except TimeoutError as error:
        text = f"nothing answers there within {seconds:.3g} s"
        raise NoBulkConnection(BulkFailure.SILENT, text) from error
    except (OSError, OverflowError) as error:  # the latter: a port that no machine has
        raise NoBulkConnection(BulkFailure.UNREACHABLE, str(error)) from error
    try:
        return _prove(connected, host, offered, credentials, server_name, dscp, attempt, left)
    except BaseException as error:
        connected.close()
        if isinstance(error, ssl.SSLCertVerificationError | ConnectionRefusedError):
            raise NoBulkConnection(BulkFailure.DISTRUSTED, str(error)) from error
        if isinstance(error, OSError):
            raise NoBulkConnection(BulkFailure.TURNED_AWAY, str(error)) from error
        if isinstance(error, ValueError):  # credentials that TLS cannot use
            raise NoBulkConnection(BulkFailure.DISTRUSTED, str(error)) from error
        raise


def _dial(addresses: list[Any], left: Callable[[], float]) -> socket.socket:
    """Return a connected socket; the addresses of a host, of `getaddrinfo`, share the time."""
    error: OSError = ConnectionError("the host has no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(left() / (len(addresses) - index))
            connected.connect(address)
            return connected
        except OSError as failure:
            connected.close()
            error = failure
        except BaseException:
            connected.close()
            raise
    raise error


def _prove(
    connected: socket.socket,
    host: str,
    offered: pb.BulkSession,
    credentials: Credentials,
    server_name: str | None,
    dscp: int | None,
    attempt: int,
    left: Callable[[], float],
) -> BulkConnection:
    set_class(connected, dscp)
    # Before the rest: a shard that is crowded sends those away first that have not named an offer.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = number_of(offered.number, offered.key, attempt)
    connected.settimeout(left())
    connected.sendall(number)
    records = None
    if credentials.authority:
        records = TlsRecords(context_of(credentials, serves=False), server_name or host)
    handshake = Handshake(number, offered.key, credentials.token, records, serves=False)
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

"""Admission of clients to a listening node: limits, authentication, and counts of refusals."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from absl import logging

from thinwire.ops.printable import printable
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security import credentials as trust
from thinwire.proto.security.fair_places import FairPlaces, address_of_peer
from thinwire.proto.token_bucket import TokenBucket
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

_LOG_SECONDS = 10.0  # shortest interval in seconds between two log lines for one refusal reason
#: Maximum number of characters of an unauthenticated client's message in a log line.
_LONGEST_TEXT = 500
_NAMES = {pb.REASON_IDENTITY: "identity", pb.REASON_TOKEN: "token"}


class GuardedStream(Protocol):
    """The part of `thinwire.proto.grpc.ServerStream` that the connection guard uses.

    Attributes:
        evidence: Certificate names and random numbers of the client.
        peer: The client's address in gRPC's form, for example ipv4:10.0.0.3:4711.
    """

    evidence: trust.PeerEvidence
    peer: str

    def close(self) -> None:
        """End the gRPC stream of the client."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the client streams of a listening node, far above what honest clients need. A
    listening node ends or rejects client streams that exceed its limits.
    """

    #: Longest time in seconds from the opening of a stream to the client's Hello, which clients
    #: send immediately.
    hello_seconds: float = 10.0
    #: Maximum number of streams whose client's Hello was accepted; None for no limit.
    streams: int | None = None
    #: Maximum number of streams from one address whose client's Hello was accepted; None for no
    #: limit.
    streams_per_address: int | None = None
    #: Maximum number of streams that wait for their client's Hello, from clients that may belong to
    #: the run.
    waiting_streams: int = 64
    #: Maximum number of streams that wait for their client's Hello, from clients that have not
    #: shown the token.
    waiting_strangers: int = 8
    #: Number of streams per second from strangers (clients without the token), on average and in a
    #: burst. Each stream costs threads and a reply. Streams beyond the limit are rejected without
    #: threads and without a reply.
    strangers_per_second: float = 20.0
    #: Largest number of frames per second of one stream, on average and in a burst. A frame is a
    #: message, or up to 1 MiB of a large message. A round trip takes at least 200 us.
    messages_per_second: float = 10_000.0
    burst_messages: float = 20_000.0
    #: Maximum number of replies that one client may have requested and not received. A worker
    #: requests one reply at a time.
    waiting_replies: int = 4


class MessageRate:
    """Limits the message rate of one stream; only the stream's reader thread uses this object.

    Args:
        limits: Admission and rate limits that apply to every client.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bucket = TokenBucket(limits.messages_per_second, limits.burst_messages)

    def exceeded(self) -> str | None:
        """Count a frame of the stream; return a refusal text if the message rate is exceeded, else
        None.
        """
        now = time.monotonic()
        if self._bucket.wait_seconds(now) > 0:
            return f"the client sent over {self._limits.messages_per_second:g} messages a second."
        self._bucket.take(now, 1.0)
        return None


class ConnectionGuard:
    """Limits the client streams of a node, authenticates the clients, and records refusals.

    Thread-safe. The method `admit` adds a stream to the streams that wait for a client's Hello
    message. A stream may wait for its client's Hello message for a bounded time (`end_overdue`).
    The method `hello_received` moves a waiting stream to the accepted streams. The method `release`
    removes a stream that has ended.

    Attributes:
        credentials: Certificate, key and token of the listening node.
        limits: Admission and rate limits that apply to every client.

    Args:
        credentials: Certificate, key and token of the listening node.
        limits: Admission and rate limits that apply to every client; None for the defaults of
            `Limits`.
    """

    def __init__(
        self, credentials: Credentials = NO_CREDENTIALS, limits: Limits | None = None
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        #: Stream whose Hello was accepted -> address of the client.
        self._inside: dict[GuardedStream, str] = {}
        self._waiting: FairPlaces[GuardedStream] = FairPlaces()
        self._strangers: FairPlaces[GuardedStream] = FairPlaces()
        rate = self.limits.strangers_per_second
        self._stranger_rate = TokenBucket(rate, rate)
        self._refused: collections.Counter[str] = collections.Counter()
        # Refusal reason -> time of the reason's last log line, and the number of refusals at that
        # time.
        self._logged: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    @property
    def refused(self) -> dict[str, int]:
        """Number of client streams that were rejected or ended by the node, by reason."""
        with self._lock:
            return dict(self._refused)

    @property
    def most_streams(self) -> int | None:
        """Maximum number of client streams, with streams before their Hello; None: unlimited."""
        limits = self.limits
        if limits.streams is None:
            return None
        return limits.streams + limits.waiting_streams + limits.waiting_strangers

    def known_peers(self) -> set[str]:
        """Return the addresses of all clients with an admitted stream, except clients without the
        token.
        """
        with self._lock:
            return {stream.peer for stream in [*self._inside, *self._waiting.holders()]}

    def is_heeded(self, metadata: Iterable[tuple[str, bytes]]) -> bool:
        """Return True if a gRPC call gets a thread, False if strangers (clients without the token)
        make too many calls.

        Args:
            metadata: gRPC metadata of the client's call.
        """
        if trust.shows_token(metadata, self.credentials):
            return True
        now = time.monotonic()
        with self._lock:
            if self._stranger_rate.wait_seconds(now) <= 0:
                self._stranger_rate.take(now, 1.0)
                return True
            self._refused["crowded"] += 1
        return False

    def admit(self, stream: GuardedStream) -> str | None:
        """Let a stream wait for its client's Hello; return the reason if it is rejected, else None.

        If too many client streams wait for their Hello message, `admit` closes another waiting
        stream.
        """
        limits, address = self.limits, address_of_peer(stream.peer)
        is_known = not self.credentials.token or stream.evidence.shows_token
        places, most = self._strangers, limits.waiting_strangers
        if is_known:
            places, most = self._waiting, limits.waiting_streams
        with self._lock:
            full = self._full(address)
            lost = [] if full else places.take(stream, address, time.monotonic(), most)
        if full is not None:
            self.record_refusal(full[0], stream.peer, full[1])
            return full[1]
        for other in lost:
            self.record_refusal("crowded", other.peer, "no client Hello before newer streams came")
            other.close()
        return None

    def hello_received(self, stream: GuardedStream) -> tuple[str, str] | None:
        """Move a waiting stream whose client's Hello is accepted to the accepted streams.

        Returns:
            (reason, text) of a refusal, which the caller must record and send. None if the stream
            is accepted, or has already been closed.
        """
        address = address_of_peer(stream.peer)
        with self._lock:
            if not self._waiting.leave(stream) | self._strangers.leave(stream):
                return None  # the stream has ended, or the guard has closed it for a new stream
            full = self._full(address)
            if full is None:
                self._inside[stream] = address
            return full

    def release(self, stream: GuardedStream) -> None:
        """Remove a stream that has ended from the node's waiting and accepted streams."""
        with self._lock:
            self._inside.pop(stream, None)
            self._waiting.leave(stream)
            self._strangers.leave(stream)

    def end_overdue(self, now: float) -> None:
        """Close the streams whose client's Hello has not arrived within the time limit."""
        seconds = self.limits.hello_seconds
        with self._lock:
            late = self._waiting.overdue(now - seconds) + self._strangers.overdue(now - seconds)
        for stream in late:
            self.record_refusal("silent", stream.peer, f"the client sent no Hello in {seconds:g} s")
            stream.close()

    def _full(self, address: str) -> tuple[str, str] | None:
        """Return why a new stream from an address is refused, as (reason, text); None if
        accepted.
        """
        most, most_of_one = self.limits.streams, self.limits.streams_per_address
        if most is not None and len(self._inside) >= most:
            return "no_room", f"all {most} streams of this node are taken"
        num_same = sum(other == address for other in self._inside.values())
        if most_of_one is not None and num_same >= most_of_one:
            return "streams", f"all {most_of_one} streams that one address may have are taken"
        return None

    def authenticate(
        self, stream: GuardedStream, part: str, proof: bytes, claims: Sequence[str]
    ) -> tuple[pb.Reason, str] | None:
        """Authenticate the client of a stream; record and return a refusal, or return None.

        The docstring of `credentials.check_client` describes the arguments and the result of
        `authenticate`.
        """
        credentials = self.credentials
        if not (credentials.authority or credentials.token):
            return None
        refusal = trust.check_client(stream.evidence, credentials, part, proof, claims)
        if refusal is not None:
            self.record_refusal(_NAMES[refusal[0]], stream.peer, refusal[1])
        return refusal

    def count_refusal(self, reason: str) -> None:
        """Count a refused client stream without a log line."""
        with self._lock:
            self._refused[reason] += 1

    def record_refusal(self, reason: str, peer: str, text: str) -> None:
        """Count the refusal of a client; log at most one refusal for each reason in 10 s."""
        now = time.monotonic()
        with self._lock:
            self._refused[reason] += 1
            count = self._refused[reason]
            logged_at, logged = self._logged.get(reason, (-_LOG_SECONDS, 0))
            if now - logged_at < _LOG_SECONDS:
                return
            self._logged[reason] = now, count
        more = f" (and {count - logged - 1} like it before)" if count - logged > 1 else ""
        shown = printable(text, _LONGEST_TEXT)  # `text` may quote unprintable bytes of the client
        logging.warning("refused the client %s for the reason %s: %s%s", peer, reason, shown, more)

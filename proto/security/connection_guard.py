"""Admission to a listening node: limits, authentication, and a count of the clients rejected."""

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

_LOG_SECONDS = 10.0  # between two lines for one reason
_LONGEST_TEXT = 500  # of a stranger's message, in the log
_NAMES = {pb.REASON_IDENTITY: "identity", pb.REASON_TOKEN: "token"}


class GuardedStream(Protocol):
    """What the guard needs of a `thinwire.proto.grpc.ServerStream`."""

    evidence: trust.PeerEvidence
    peer: str

    def close(self) -> None:
        """End the stream."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits that no client of a run comes near; a client that exceeds one is cut off."""

    #: From the opening of a stream to its Hello, which clients send immediately.
    hello_seconds: float = 10.0
    #: Streams after their Hello; None: as many as there are.
    streams: int | None = None
    #: The same of one address at a time.
    streams_per_address: int | None = None
    #: Streams before their Hello, of clients that may belong to the run.
    waiting_streams: int = 64
    #: The same of clients that do not, for they have not shown that they have its token.
    waiting_strangers: int = 8
    #: Of these clients' streams in a second, on average and in a burst: each costs threads and a
    #: sentence. What is beyond is refused without either.
    strangers_per_second: float = 20.0
    #: Frames of one stream, on average and in a burst: a message, or up to 1 MiB of a large one. A
    #: round trip takes 200 us at best.
    messages_per_second: float = 10_000.0
    burst_messages: float = 20_000.0
    #: Replies that one client may have requested and not received; a worker requests one at a time.
    waiting_replies: int = 4


class MessageRate:
    """Bounds the messages of one stream; for its reader thread.

    Args:
        limits: Of every client.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bucket = TokenBucket(limits.messages_per_second, limits.burst_messages)

    def exceeded(self) -> str | None:
        """Count a frame; return the refusal's text if it is one too many."""
        now = time.monotonic()
        if self._bucket.wait_seconds(now) > 0:
            return f"more than {self._limits.messages_per_second:g} messages a second."
        self._bucket.take(now, 1.0)
        return None


class ConnectionGuard:
    """Counts streams, authenticates their clients, and records why some were rejected.

    Thread-safe. A stream is admitted by `admit`, then has a place among those that wait, for a
    bounded time (`end_overdue`), until `hello_received`; it is counted out by `release`.

    Args:
        credentials: Of the listening node.
        limits: Of every client.
    """

    def __init__(
        self, credentials: Credentials = NO_CREDENTIALS, limits: Limits | None = None
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self._inside: dict[GuardedStream, str] = {}  # streams after their Hello -> address
        self._waiting: FairPlaces[GuardedStream] = FairPlaces()
        self._strangers: FairPlaces[GuardedStream] = FairPlaces()
        rate = self.limits.strangers_per_second
        self._stranger_rate = TokenBucket(rate, rate)
        self._refused: collections.Counter[str] = collections.Counter()
        self._logged: dict[str, tuple[float, int]] = {}  # reason -> when, and how many by then
        self._lock = threading.Lock()

    @property
    def refused(self) -> dict[str, int]:
        """How many streams were rejected or cut off, by reason."""
        with self._lock:
            return dict(self._refused)

    @property
    def most_streams(self) -> int | None:
        """How many streams there may be, with those that wait; None: not bounded."""
        limits = self.limits
        if limits.streams is None:
            return None
        return limits.streams + limits.waiting_streams + limits.waiting_strangers

    def known_peers(self) -> set[str]:
        """Return the clients with a place, strangers excepted, as `GuardedStream.peer` has them."""
        with self._lock:
            return {stream.peer for stream in [*self._inside, *self._waiting.holders()]}

    def is_heeded(self, metadata: Iterable[tuple[str, bytes]]) -> bool:
        """Return whether a call gets a thread: not if there are too many of strangers.

        Args:
            metadata: Of the call.
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
        """Let a stream wait for its Hello; return why it is rejected, if it is.

        Others may lose their place to it: their streams are closed.
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
            self.record_refusal("crowded", other.peer, "no Hello before others came")
            other.close()
        return None

    def hello_received(self, stream: GuardedStream) -> tuple[str, str] | None:
        """Let a stream stay whose Hello is accepted.

        Returns:
            (reason, text) of why it must not; to be recorded and sent. None: it stays.
        """
        address = address_of_peer(stream.peer)
        with self._lock:
            if not self._waiting.leave(stream) | self._strangers.leave(stream):
                return None  # it has ended, or its place is another's: it is closed already
            full = self._full(address)
            if full is None:
                self._inside[stream] = address
            return full

    def release(self, stream: GuardedStream) -> None:
        """Count a stream out that has ended."""
        with self._lock:
            self._inside.pop(stream, None)
            self._waiting.leave(stream)
            self._strangers.leave(stream)

    def end_overdue(self, now: float) -> None:
        """Close the streams whose Hello has not come in time."""
        seconds = self.limits.hello_seconds
        with self._lock:
            late = self._waiting.overdue(now - seconds) + self._strangers.overdue(now - seconds)
        for stream in late:
            self.record_refusal("silent", stream.peer, f"no Hello within {seconds:g} s")
            stream.close()

    def _full(self, address: str) -> tuple[str, str] | None:
        """Return (reason, text) of why no further stream of an address may stay."""
        most, most_of_one = self.limits.streams, self.limits.streams_per_address
        if most is not None and len(self._inside) >= most:
            return "no_room", f"all {most} streams of this node are taken"
        of_one = sum(its == address for its in self._inside.values())
        if most_of_one is not None and of_one >= most_of_one:
            return "streams", f"all {most_of_one} streams that one address may have are taken"
        return None

    def authenticate(
        self, stream: GuardedStream, part: str, proof: bytes, claims: Sequence[str]
    ) -> tuple[pb.Reason, str] | None:
        """Check the client of a stream and record a refusal; see `credentials.check_client`."""
        mine = self.credentials
        if not (mine.authority or mine.token):
            return None
        refusal = trust.check_client(stream.evidence, mine, part, proof, claims)
        if refusal is not None:
            self.record_refusal(_NAMES[refusal[0]], stream.peer, refusal[1])
        return refusal

    def count_refusal(self, reason: str) -> None:
        """Count a refusal that is logged elsewhere, or that is not worth a line."""
        with self._lock:
            self._refused[reason] += 1

    def record_refusal(self, reason: str, peer: str, text: str) -> None:
        """Count a refusal; log it, unless one for the same reason has just been logged."""
        now = time.monotonic()
        with self._lock:
            self._refused[reason] += 1
            count = self._refused[reason]
            logged_at, logged = self._logged.get(reason, (-_LOG_SECONDS, 0))
            if now - logged_at < _LOG_SECONDS:
                return
            self._logged[reason] = now, count
        more = f" (and {count - logged - 1} like it before)" if count - logged > 1 else ""
        shown = printable(text, _LONGEST_TEXT)  # it may quote the client
        logging.warning("refused %s, %s: %s%s", peer, reason, shown, more)

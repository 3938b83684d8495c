"""Admission to a listening node: limits, authentication, and a count of the clients rejected."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from absl import logging

from thinwire.ops.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security import credentials as trust
from thinwire.proto.token_bucket import TokenBucket

_LOG_SECONDS = 10.0  # between two lines for one reason
_LONGEST_TEXT = 500  # of a stranger's message, in the log
_NAMES = {pb.REASON_IDENTITY: "identity", pb.REASON_TOKEN: "token"}


class GuardedStream(Protocol):
    """What the guard needs of a `thinwire.proto.grpc.ServerStream`."""

    evidence: trust.PeerEvidence
    hello_received: bool
    peer: str

    def close(self) -> None:
        """End the stream."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits that no client of a run comes near; a client that exceeds one is cut off."""

    #: From the opening of a stream to its Hello; clients give up after as long.
    hello_seconds: float = 30.0
    #: Streams that one address may hold at a time; None: as many as there are.
    streams_per_address: int | None = None
    #: Frames of one stream, on average and in a burst: a message, or up to 1 MiB of a large one. A
    #: round trip takes 200 us at best.
    messages_per_second: float = 10_000.0
    burst_messages: float = 20_000.0
    #: Replies that one client may have requested and not received; a worker requests one at a time.
    waiting_replies: int = 16


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

    Thread-safe. A stream is admitted by `admit`, has a bounded time until `hello_received`, and is
    counted out by `release`.

    Args:
        credentials: Of the listening node.
        limits: Of every client.
    """

    def __init__(
        self, credentials: Credentials = NO_CREDENTIALS, limits: Limits | None = None
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self._inside: collections.Counter[str] = collections.Counter()  # streams by address
        self._refused: collections.Counter[str] = collections.Counter()
        self._logged: dict[str, tuple[float, int]] = {}  # reason -> when, and how many by then
        self._awaited: dict[GuardedStream, threading.Timer] = {}
        self._lock = threading.Lock()

    @property
    def refused(self) -> dict[str, int]:
        """How many streams were rejected or cut off, by reason."""
        with self._lock:
            return dict(self._refused)

    def admit(self, peer: str) -> str | None:
        """Count a stream in; return why it is rejected, if it is."""
        address, most = _address(peer), self.limits.streams_per_address
        with self._lock:
            if most is None or self._inside[address] < most:
                self._inside[address] += 1
                return None
        refusal = f"all {most} streams that one address may have are taken"
        self.record_refusal("streams", peer, refusal)
        return refusal

    def release(self, peer: str) -> None:
        """Count an admitted stream out."""
        address = _address(peer)
        with self._lock:
            self._inside[address] -= 1
            if self._inside[address] <= 0:
                del self._inside[address]

    def await_hello(self, stream: GuardedStream) -> None:
        """Close the stream unless its Hello arrives in time."""
        timer = threading.Timer(self.limits.hello_seconds, self._give_up, (stream,))
        timer.daemon = True
        with self._lock:
            if not stream.hello_received:  # its reader may have been faster
                self._awaited[stream] = timer
                timer.start()

    def hello_received(self, stream: GuardedStream) -> None:
        """Stop the timer of a stream whose Hello is accepted, or that has ended."""
        with self._lock:
            stream.hello_received = True
            timer = self._awaited.pop(stream, None)
        if timer is not None:
            timer.cancel()

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
        logging.warning("refused %s, %s: %s%s", peer, reason, text[:_LONGEST_TEXT], more)

    def _give_up(self, stream: GuardedStream) -> None:
        with self._lock:
            if self._awaited.pop(stream, None) is None:
                return
        seconds = self.limits.hello_seconds
        self.record_refusal("silent", stream.peer, f"no Hello within {seconds:g} s")
        stream.close()


def _address(peer: str) -> str:
    """Return the address of a peer such as ipv4:10.0.0.3:4711, without its port."""
    return peer.rpartition(":")[0]

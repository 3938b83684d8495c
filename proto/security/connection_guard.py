"""Who is let in to a listening node, and what becomes of those who are not."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from thinwire.ops.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security import credentials as trust
from thinwire.proto.token_bucket import TokenBucket

_LOG_SECONDS = 10.0  # between two lines for one reason
_LONGEST_TEXT = 500  # of what a stranger said, in the log
_NAMES = {pb.REASON_IDENTITY: "identity", pb.REASON_TOKEN: "token"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What no client of a run comes near; who goes beyond is cut off."""

    #: From the opening of a stream to its Hello; clients give up after as long.
    hello_seconds: float = 30.0
    #: Streams that one address may hold at a time; None: as many as there are.
    streams_per_address: int | None = None
    #: Frames of one stream, on average and at once: a message, or up to 1 MiB of a large one. A
    #: round trip takes 200 us at best.
    messages_per_second: float = 10_000.0
    burst_messages: float = 20_000.0
    #: Replies that one client may have asked for and not taken; a worker asks for one at a time.
    waiting_replies: int = 16


class Rate:
    """What is left to one stream of its messages; for its reader thread.

    Args:
        limits: Of every client.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bucket = TokenBucket(limits.messages_per_second, limits.burst_messages)

    def exceeded(self) -> str | None:
        """Count a frame; return what to say if it is one too many."""
        now = time.monotonic()
        if self._bucket.wait_seconds(now) > 0:
            return f"more than {self._limits.messages_per_second:g} messages a second."
        self._bucket.take(now, 1.0)
        return None


class ConnectionGuard:
    """Counts who comes, asks for their papers, and remembers why some were refused.

    Thread-safe.

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
        self._told: dict[str, tuple[float, int]] = {}  # reason -> when, and how many by then
        self._awaited: dict[Any, threading.Timer] = {}
        self._lock = threading.Lock()

    @property
    def refused(self) -> dict[str, int]:
        """How many were refused or cut off, by reason."""
        with self._lock:
            return dict(self._refused)

    def enter(self, peer: str) -> str | None:
        """Count a stream in; return why it must not stay, if so."""
        address, most = _address(peer), self.limits.streams_per_address
        with self._lock:
            if most is None or self._inside[address] < most:
                self._inside[address] += 1
                return None
        refusal = f"all {most} streams that one address may have are taken"
        self.note("streams", peer, refusal)
        return refusal

    def leave(self, peer: str) -> None:
        """Count a stream out that was let in."""
        address = _address(peer)
        with self._lock:
            self._inside[address] -= 1
            if self._inside[address] <= 0:
                del self._inside[address]

    def await_hello(self, stream: Any) -> None:
        """Close a stream that says nothing in time.

        Args:
            stream: A `thinwire.proto.grpc.ServerStream`.
        """
        timer = threading.Timer(self.limits.hello_seconds, self._give_up, (stream,))
        timer.daemon = True
        with self._lock:
            if not stream.introduced:  # its reader may have been faster
                self._awaited[stream] = timer
                timer.start()

    def introduced(self, stream: Any) -> None:
        """Hear that a stream has said Hello, or has ended."""
        with self._lock:
            stream.introduced = True
            timer = self._awaited.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def judge(
        self, stream: Any, part: str, proof: bytes, words: Sequence[str]
    ) -> tuple[int, str] | None:
        """Judge who says to play a part; see `thinwire.proto.security.credentials.refusal`."""
        mine = self.credentials
        if not (mine.authority or mine.token):
            return None
        refusal = trust.refusal(stream.evidence, mine, part, proof, words)
        if refusal is not None:
            self.note(_NAMES[refusal[0]], stream.peer, refusal[1])
        return refusal

    def count(self, reason: str) -> None:
        """Count a refusal that somebody else has logged, or that is not worth a line."""
        with self._lock:
            self._refused[reason] += 1

    def note(self, reason: str, peer: str, text: str) -> None:
        """Count a refusal; log it, unless one for the same reason has just been."""
        now = time.monotonic()
        with self._lock:
            self._refused[reason] += 1
            count = self._refused[reason]
            told_at, told = self._told.get(reason, (-_LOG_SECONDS, 0))
            if now - told_at < _LOG_SECONDS:
                return
            self._told[reason] = now, count
        more = f" (and {count - told - 1} like it before)" if count - told > 1 else ""
        logging.warning("refused %s, %s: %s%s", peer, reason, text[:_LONGEST_TEXT], more)

    def _give_up(self, stream: Any) -> None:
        with self._lock:
            if self._awaited.pop(stream, None) is None:
                return
        seconds = self.limits.hello_seconds
        self.note("silent", stream.peer, f"no Hello within {seconds:g} s")
        stream.close()


def _address(peer: str) -> str:
    """Return where a peer such as ipv4:10.0.0.3:4711 is, without its port."""
    return peer.rpartition(":")[0]

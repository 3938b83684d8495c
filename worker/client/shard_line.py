"""A worker's line to one shard: one stream after another, dialled again when it is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from absl import logging

from thinwire.ops.failure_detector import Backoff
from thinwire.ops.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.grpc import ClientStream, StreamLost, Unreachable
from thinwire.proto.grpc.session import (
    ClientSession,
    Dialler,
    RequestRejected,
    beat_seconds,
    rhythm,
)
from thinwire.proto.security.credentials import UntrustedPeer
from thinwire.worker.client.datagrams import DatagramChannel

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0


class Expelled(StreamLost):
    """The shard has let this worker go; the stream stands, and a Hello on another one helps."""


class ShardLine:
    """Keeps a stream to one shard, and counts over all of them.

    Attributes:
        is_expelled: The shard has let this worker go, and has not heard its Hello since.
        on_expelled: Called when it says so.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        max_payload_bytes: int,
        link: EmulatedSender | None,
        reconnect_timeout_seconds: float,
        closing: threading.Event,
        leg: DatagramChannel | None = None,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            address: ``host:port``.
            hello: This worker's introduction to this shard; gets run id and incarnation.
            max_payload_bytes: Larger replies are refused.
            link: The worker's emulated up-link.
            reconnect_timeout_seconds: After this long without an answer, Unreachable.
            closing: Set when the worker is asked to stop.
            leg: What goes in datagrams, if the method sends any.
            dscp: Class of service that the stream's packets ask for.
            credentials: Of this worker.
        """
        self.address, self.hello, self._link = address, hello, link
        self.leg, self._dscp, self._credentials = leg, dscp, credentials
        self._max_payload_bytes = max_payload_bytes
        self._patience_seconds = reconnect_timeout_seconds
        self._closing = closing
        self._arrivals = rhythm()
        self._dialler = Dialler(f"the PS at {address}", self._new_session, closing)
        self._session: ClientSession | None = None
        self._bytes_before = 0
        self._received_before = 0
        self._send_seconds_before = 0.0
        self.welcome = pb.Welcome()
        self.halt_cause = ""
        self.is_expelled = False
        self.on_expelled: Callable[[], None] = lambda: None
        self._asking = False
        self._turn = threading.Lock()  # held by who may replace the stream
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._try_again_at = 0.0

    # -- figures ----------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Training bytes over all streams to this shard."""
        session = self._session
        open_bytes = session.stream.bytes_sent if session else 0
        beside = self.leg.bytes_sent if self.leg is not None else 0
        return self._bytes_before + open_bytes + beside

    @property
    def bytes_received(self) -> int:
        """Bytes received over all streams from this shard."""
        session = self._session
        return self._received_before + (session.stream.bytes_received if session else 0)

    @property
    def send_seconds(self) -> float:
        """Seconds from `ask` to the last byte out, over all streams."""
        session = self._session
        open_seconds = session.stream.send_seconds if session else 0.0
        return self._send_seconds_before + open_seconds

    @property
    def asking(self) -> bool:
        """Whether a question is open."""
        return self._asking

    @property
    def connected(self) -> bool:
        """Whether the stream stands, as far as is known."""
        return self._session is not None

    @property
    def alive(self) -> bool:
        """Whether the stream stands, and the shard was heard in the time of two of its beats."""
        session = self._session
        seconds = 2 * beat_seconds(self.welcome.lease_seconds)
        return session is not None and session.received_within(seconds)

    # -- the stream -------------------------------------------------------------------------

    def connect(self) -> pb.Welcome:
        """Dial until welcomed.

        Raises:
            Unreachable: Nobody answered for the whole patience.
            Refused: The shard said no for good.
        """
        return self._adopt(*self._dialler.dial(self._patience_seconds))

    def say(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message that needs no answer, if the stream stands."""
        session = self._session  # another thread may drop it
        if session is not None:
            session.send_control(message, counted)

    def attend(self, may_rejoin: Callable[[], bool] = lambda: True) -> None:
        """Look after the stream while nothing is asked (heartbeat thread).

        Whoever computes for long, or waits for another shard, hears here that this one has let it
        go or is lost, and is back before its lease ends, or soon after.

        Args:
            may_rejoin: Whether to say Hello again where this worker was let go.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not (self._asking or self._closing.is_set() or self.halt_cause):
                self._overhear()
                lost = self._session is None and time.monotonic() >= self._try_again_at
                if lost and (not self.is_expelled or may_rejoin()):
                    self._revive()
        finally:
            self._turn.release()

    def answers(self, timeout_seconds: float) -> bool:
        """Return whether anything listens at the shard's address."""
        probe = ClientStream(self.address, credentials=self._credentials)
        try:
            probe.open(timeout_seconds)
        except (Unreachable, UntrustedPeer):
            return False
        probe.close(0.0)
        return True

    def close(self) -> None:
        """End the stream after what has been queued."""
        if self._session is not None:
            self._session.close()
        if self.leg is not None:
            self.leg.close()

    def _new_session(self) -> ClientSession:
        return ClientSession(
            self.address,
            self.hello,
            self._max_payload_bytes,
            self._link,
            self._dscp,
            self._credentials,
            self._arrivals,
        )

    def _adopt(self, session: ClientSession, welcome: pb.Welcome) -> pb.Welcome:
        """Go on with another stream."""
        self._session, self.welcome, self.is_expelled = session, welcome, False
        self.hello.run_id, self.hello.incarnation = welcome.run_id, welcome.incarnation
        if self.leg is not None:
            self.leg.opened(self.address, welcome)
        return welcome

    def _overhear(self) -> None:
        """Take in what the shard says unasked; drop the stream if it is lost."""
        try:
            while self._session is not None and (heard := self._session.poll(0.0)) is not None:
                self._note(heard[0])
            if self._session is not None and self._session.silent:
                self._arrivals.note_alarm()
                raise StreamLost(f"{self.address} sent nothing for too long")
        except StreamLost as error:
            logging.warning("stream to %s lost (%s)", self.address, error)
            self._pauses.num_pauses, self._try_again_at = 0, 0.0
            self._drop()

    def _note(self, message: pb.ToClient) -> None:
        """Take in what may come at any time.

        Raises:
            Expelled: This worker is no member any more.
        """
        body = message.WhichOneof("body")
        if body == "halt" and self.hello.shard == 0:  # the end of the run is shard 0's to declare
            self.halt_cause = message.halt.cause
        if body == "refusal" and message.refusal.reason == pb.REASON_NOT_MEMBER:
            self.is_expelled = True
            self.on_expelled()
            raise Expelled(message.refusal.message)

    def _revive(self) -> None:
        """Try once to open the stream again; a refusal is told to who asks next."""
        try:
            self._adopt(*self._dialler.attempt())
        except (Unreachable, StreamLost, RequestRejected):
            self._try_again_at = time.monotonic() + self._pauses.next_seconds(random.random())

    def _drop(self) -> None:
        if self._session is None:
            return
        self._bytes_before += self._session.stream.bytes_sent
        self._received_before += self._session.stream.bytes_received
        self._send_seconds_before += self._session.stream.send_seconds
        self._session.close(0.0)
        self._session = None

"""A worker's client of one shard: the thread and the socket around `ShardProtocol`.

The training thread opens a request and waits for its reply, through reconnections; meanwhile the
heartbeat thread looks after the stream whenever nothing is requested on it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.grpc import ClientStream, StreamLost, Unreachable
from thinwire.proto.grpc.session import (
    ClientSession,
    Dialler,
    MakeOffer,
    RequestRejected,
    beat_seconds,
    jitter,
    rhythm,
)
from thinwire.proto.security.credentials import UntrustedPeer
from thinwire.runtime.failure_detector import Backoff
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.protocol import (
    Action,
    Answered,
    Ended,
    NewestEpoch,
    Rejoin,
    Replied,
    Send,
    ShardProtocol,
    State,
    Trigger,
)
from thinwire.worker.core.messages import PushRequest

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0
#: How long a query whose answer is not waited for waits for its turn.
_QUERY_TURN_SECONDS = 0.05
#: How long to listen to one shard before a look at the others.
_POLL_SECONDS = 0.1


class PushRefused(Exception):
    """A request was refused for good, for `reason`. The stream stands."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason


class ShardGone(Exception):
    """The run has ended and the shard is gone."""


class ShardClient:
    """One shard as a worker sees it; it reconnects by itself.

    Attributes:
        protocol: Decides what is sent, sent again and given up.
        welcome: Of the newest stream.
        before_rejoining: Called where this worker was expelled, before it sends another Hello.
        on_expelled: Called when the shard reports that.
        on_welcome: Called with the Welcome of each stream.

    Args:
        address: ``host:port``.
        hello: This worker's introduction to this shard; gets run id and incarnation.
        max_payload_bytes: Larger replies are refused.
        link: The worker's emulated uplink.
        reconnect_timeout_seconds: After this long without an answer, Unreachable.
        closing: Set when the worker is to stop.
        encoder: Of pushes to this shard.
        epochs: Shared by all clients of the worker.
        dscp: Class of service that the stream's packets request; None: the system's default.
        credentials: Of this worker.
        make_offer: Makes this worker's offer to the shard if that has no model; None: no offer.
        leader: Address of shard 0, which knows where others have come back; empty: not known.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        max_payload_bytes: int,
        link: EmulatedSender | None,
        reconnect_timeout_seconds: float,
        closing: threading.Event,
        encoder: PushEncoder,
        epochs: NewestEpoch,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        make_offer: MakeOffer | None = None,
        leader: str = "",
    ) -> None:
        self._make_offer = make_offer
        self.address, self.hello, self._link = address, hello, link
        self._encoder, self._dscp, self._credentials = encoder, dscp, credentials
        self._max_payload_bytes = max_payload_bytes
        self._patience_seconds = reconnect_timeout_seconds
        self._closing = closing
        self.protocol = ShardProtocol(hello.shard, epochs)
        self._arrivals = rhythm()
        self._dialler = Dialler(f"the PS at {address}", self._new_session, closing, leader=leader)
        self._session: ClientSession | None = None
        self.welcome = pb.Welcome()
        self._bytes_before = self._received_before = 0
        self._send_seconds_before = 0.0
        self._turn = threading.Lock()  # held by whoever may replace the stream
        self._in_use = False  # by the training thread: a request or a query is under way
        self._abandons = False  # the push, as soon as the training thread gets to it
        self._replied: Replied | None = None
        self._payload = memoryview(b"")  # of the newest message
        self._answered: Answered | None = None
        self._ended: Ended | None = None
        self._lost_by: StreamLost | None = None  # for the log, at the next reconnection
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._try_again_at = 0.0
        self.before_rejoining: Callable[[], None] = lambda: None
        self.on_expelled: Callable[[], None] = lambda: None
        self.on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None

    # -- figures ----------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Training bytes over all streams to this shard."""
        session, channel = self._session, self._encoder.channel
        open_bytes = session.stream.bytes_sent if session else 0
        beside = channel.bytes_sent if channel is not None else 0
        return self._bytes_before + open_bytes + beside

    @property
    def bytes_received(self) -> int:
        """Bytes received over all streams from this shard."""
        session = self._session
        return self._received_before + (session.stream.bytes_received if session else 0)

    @property
    def send_seconds(self) -> float:
        """Seconds from a request to its last byte out, over all streams."""
        session = self._session
        open_seconds = session.stream.send_seconds if session else 0.0
        return self._send_seconds_before + open_seconds

    @property
    def is_in_use(self) -> bool:
        """Whether the training thread waits for something of this shard."""
        return self._in_use

    @property
    def connected(self) -> bool:
        """Whether the stream stands, as far as is known."""
        return self._session is not None

    @property
    def is_member(self) -> bool:
        """Whether the shard takes this worker's queries, as far as is known."""
        return self.protocol.state in (State.READY, State.REQUESTING)

    @property
    def alive(self) -> bool:
        """Whether the stream stands, and something came in the time of two of its beats."""
        session = self._session
        seconds = 2 * beat_seconds(self.welcome.lease_seconds)
        return session is not None and session.received_within(seconds)

    @property
    def halt_cause(self) -> str:
        """Why the run has ended, by this shard; empty while it goes on."""
        return self.protocol.halt_cause

    # -- requests (training thread) -----------------------------------------------------------

    def pull(self, pull: pb.Pull | None = None) -> None:
        """Request the model."""
        self._open(lambda: self.protocol.pull(pull))

    def push(self, request: PushRequest) -> None:
        """Push the shard's part; it must not change until it is settled."""
        self._open(lambda: self.protocol.push(request))

    def _open(self, request: Callable[[], list[Action]]) -> None:
        with self._turn:
            self._in_use, self._abandons, self._replied = True, False, None
            self._perform(request())

    def wait_for_reply(
        self, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Replied, memoryview]:
        """Wait until the open request is settled, through reconnections.

        Args:
            meanwhile: Called now and then; looks after what is requested elsewhere.

        Returns:
            What came of it, and the reply's payload.

        Raises:
            PushRefused: The shard refused the request for good.
            Unreachable, RequestRejected: The shard is gone for good.
            ShardGone: It is gone because the run has ended.
        """
        try:
            while self._replied is None:
                self.poll(math.inf if meanwhile is None else _POLL_SECONDS)
                if meanwhile is not None:
                    meanwhile()
            return self._replied, self._payload
        finally:
            self._in_use, self._replied = False, None

    def poll(self, seconds: float = 0.0) -> None:
        """Take in one message of the shard, if one comes in this time.

        What comes may need the worker to do something, such as to send a push again: others may be
        waiting for it at this shard while the worker waits at another one.

        Raises:
            PushRefused, Unreachable, RequestRejected, ShardGone: As `wait_for_reply` does.
        """
        if self._replied is not None or not self._in_use:
            return
        self._raise_if_ended()
        if self._abandons:
            self._abandon()
        try:
            if self._session is None:
                raise self._lost_by or StreamLost("not connected")
            received = self._session.listen_for(seconds)
        except StreamLost as error:
            self._reconnect(error)
            return
        if received is not None:
            self._receive(*received)
        self._perform(self.protocol.tick(time.monotonic()))
        self._raise_if_ended()

    def abandon_push(self) -> None:
        """Give up the push that is open, if one is, and pull instead (any thread)."""
        self._abandons = self.protocol.is_requesting and self.protocol.step > 0

    def _abandon(self) -> None:
        self._abandons = False
        logging.warning(
            "this worker was expelled in the middle of an exchange; %s may lack its part of it",
            self.address,
        )
        self._perform(self.protocol.abandon_push())

    # -- queries (training thread) ------------------------------------------------------------

    def notify(self, query: pb.Query) -> None:
        """Send the state server a query that is not answered."""
        self.send(pb.ToServer(query=query), counted=True)

    def query(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        """Query the state server.

        Args:
            query: The question.
            patience_seconds: How long to wait for its answer; None: as long as the shard lives.

        Returns:
            The answer, or an earlier "push" of this round; None where neither came,
            or the stream is lost: it is opened again meanwhile, or by the next push.
        """
        if not self._turn.acquire(timeout=_QUERY_TURN_SECONDS):  # it is being dialled again
            return None
        self._in_use, self._answered = True, None
        try:
            self._perform(self.protocol.query(query))
        finally:
            self._turn.release()
        try:
            self._wait_for_answer(patience_seconds)
            return self._answered.answer if self._answered is not None else None
        finally:
            self.protocol.cancel_query()
            self._in_use = False

    def _wait_for_answer(self, patience_seconds: float | None) -> None:
        """Receive until the query is settled or the patience is over."""
        waited_from = time.monotonic()
        while self._answered is None and (session := self._session) is not None:
            try:
                received = (
                    session.listen()
                    if patience_seconds is None
                    else session.poll(waited_from + patience_seconds - time.monotonic())
                )
            except StreamLost as error:
                logging.warning("stream to %s lost (%s); training on", self.address, error)
                self._lose(error)
                return
            if received is None:
                return
            self._receive(*received)

    # -- the protocol's actions ---------------------------------------------------------------

    def _receive(self, message: pb.ToClient, payload: memoryview) -> None:
        self._payload = payload
        if message.refusal.reason == pb.REASON_QUARANTINED:
            logging.warning("%s", message.refusal.message)
        elif message.refusal.reason == pb.REASON_OUTLIER:
            why = message.refusal.message
            logging.log_every_n_seconds(logging.WARNING, "%s: %s", 60, self.address, why)
        self._perform(self.protocol.receive(message, time.monotonic()))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Replied():
                    self._replied = action
                case Answered():
                    self._answered = action
                case Ended():
                    self._ended = action
                case Rejoin(after=Trigger.LOST):
                    pass  # whoever waits for this shard opens the next stream
                case Rejoin():
                    self._leave_stream(action.after)

    def _send(self, action: Send) -> None:
        session, request = self._session, action.request
        if session is None:
            return
        if isinstance(request, pb.Query):
            session.send_control(pb.ToServer(query=request), counted=True)
            return
        if isinstance(request, pb.Pull):
            session.send_control(pb.ToServer(pull=request), counted=True)
            return
        for message, pieces in self._encoder.encode(request, action.incarnation, action.epoch):
            if message.WhichOneof("body") == "push":
                session.send(message, pieces)
            else:
                session.send_control(message, counted=True)
        for message, _ in self._encoder.finish():
            session.send_control(message, counted=True)

    def _leave_stream(self, after: Trigger) -> None:
        """Drop a stream on which the shard takes nothing of this worker any more."""
        if after is Trigger.EXPEL:
            self._lost_by = StreamLost("this worker is no member any more")
            self.on_expelled()
        else:
            self._lost_by = StreamLost("the quarantine of this worker is over")
        if not self._in_use:
            logging.warning("stream to %s lost (%s)", self.address, self._lost_by)
            self._pauses.num_pauses, self._try_again_at = 0, 0.0
        self._drop()

    def _raise_if_ended(self) -> None:
        if self._ended is None:
            return
        if self._ended.refusal is not None:
            raise PushRefused(self._ended.refusal)
        raise ShardGone(self._ended.cause)

    # -- the stream -------------------------------------------------------------------------

    def connect(self) -> pb.Welcome:
        """Dial until welcomed.

        Raises:
            Unreachable: Nobody answered for the whole patience.
            RequestRejected: The shard refused for good.
        """
        return self._join(lambda: self._dialler.dial(self._patience_seconds))

    def ensure_connected(self) -> None:
        """Open the stream again if the shard seems away; an open request is sent again.

        Raises:
            Unreachable, RequestRejected: The shard is gone for good.
            ShardGone: It is gone because the run has ended.
        """
        if not self.alive:
            self._reconnect(StreamLost("nothing comes from it"))

    def send(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message that needs no answer, if the stream stands."""
        session = self._session  # another thread may drop it
        if session is not None:
            session.send_control(message, counted)

    def attend(self, may_rejoin: Callable[[], bool] = lambda: True) -> None:
        """Look after the stream while nothing is requested on it (heartbeat thread).

        A worker that computes for long, or waits for another shard, finds here that it was expelled
        or that the stream is lost, and is back before its lease ends, or soon after.

        Args:
            may_rejoin: Whether to send a Hello where this worker was expelled.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._in_use or self._closing.is_set() or self.halt_cause:
                return
            self._receive_unrequested()
            if self.protocol.halt_cause:  # it has just come, and the stream ends with the run
                return
            lost = self._session is None and time.monotonic() >= self._try_again_at
            if lost and (not self.protocol.is_expelled or may_rejoin()):
                self._revive()
        finally:
            self._turn.release()

    def probe(self, timeout_seconds: float) -> bool:
        """Return whether anything listens at the shard's address."""
        stream = ClientStream(self.address, credentials=self._credentials)
        try:
            stream.open(timeout_seconds)
        except (Unreachable, UntrustedPeer):
            return False
        stream.close(0.0)
        return True

    def close(self) -> None:
        """End the stream after what has been queued."""
        if self._session is not None:
            self._session.close()
        if self._encoder.channel is not None:
            self._encoder.channel.close()

    def _new_session(self) -> ClientSession:
        return ClientSession(
            self.address,
            self.hello,
            self._max_payload_bytes,
            self._link,
            self._dscp,
            self._credentials,
            self._arrivals,
            self._make_offer,
        )

    def _join(self, dial: Callable[[], tuple[ClientSession, pb.Welcome]]) -> pb.Welcome:
        """Open a stream and go on with it."""
        self.protocol.join()
        try:
            self._session, self.welcome = dial()
        except BaseException:
            self._perform(self.protocol.lost())
            raise
        self.hello.run_id = self.welcome.run_id
        self.hello.incarnation = self.welcome.incarnation
        if self._encoder.channel is not None:
            self._encoder.channel.open(self.address, self.welcome)
        self.on_welcome(self.welcome)
        welcome = pb.ToClient(welcome=self.welcome)
        self._perform(self.protocol.receive(welcome, time.monotonic()))
        return self.welcome

    def _receive_unrequested(self) -> None:
        """Take in what the shard sends by itself; drop the stream if it is lost."""
        try:
            while self._session is not None and (received := self._session.poll(0.0)) is not None:
                self._receive(*received)
            if self._session is not None and self._session.silent:
                self._arrivals.record_alarm()
                raise StreamLost(f"{self.address} sent nothing for too long")
        except StreamLost as error:
            logging.warning("stream to %s lost (%s)", self.address, error)
            self._pauses.num_pauses, self._try_again_at = 0, 0.0
            self._lose(error)
        self._perform(self.protocol.tick(time.monotonic()))

    def _revive(self) -> None:
        """Try once to open the stream again; a refusal is left to the next request to report."""
        try:
            self._join(self._dialler.attempt)
        except (Unreachable, StreamLost, RequestRejected):
            self._try_again_at = time.monotonic() + self._pauses.next_seconds(jitter())

    def _reconnect(self, error: StreamLost) -> None:
        with self._turn:
            self._lose(error)
            self._raise_if_ended()
            if self._closing.is_set():
                raise Unreachable(f"stopped while waiting for {self.address}") from error
            logging.warning("stream to %s lost (%s); reconnecting", self.address, error)
            if self.protocol.is_expelled:
                self.before_rejoining()
            if self._abandons:
                self._abandon()
            self.connect()

    def _lose(self, error: StreamLost) -> None:
        self._lost_by = error
        self._drop()
        self._perform(self.protocol.lost())

    def _drop(self) -> None:
        if self._session is None:
            return
        self._bytes_before += self._session.stream.bytes_sent
        self._received_before += self._session.stream.bytes_received
        self._send_seconds_before += self._session.stream.send_seconds
        self._session.close(0.0)
        self._session = None

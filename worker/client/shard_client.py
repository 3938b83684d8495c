"""A worker's client of one shard, which drives `ShardProtocol` with threads and a socket.

The training thread opens a request and waits for the reply, reconnecting if the stream is lost.
While no request is open, the heartbeat thread services the stream to the shard.
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
#: Longest time, in seconds, that a query to the state server waits for the stream's lock while the
#: heartbeat thread reconnects the stream.
_QUERY_TURN_SECONDS = 0.05
#: Length, in seconds, of one wait for a shard's reply. The worker services the other shards'
#: requests between two waits.
_POLL_SECONDS = 0.1


class PushRefused(Exception):
    """Raised if a shard rejected a push or pull for good; the stream to the shard stays open."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason


class ShardGone(Exception):
    """Raised if the run has ended and the shard has closed its stream to this worker."""


class ShardClient:
    """A worker's connection to one shard, with automatic reconnection.

    Attributes:
        protocol: State machine that decides which requests to the shard are sent, repeated or given
            up.
        welcome: Welcome message that the shard sent on the newest stream.
        before_rejoining: Function that is called before an expelled worker sends a new Hello
            message.
        on_expelled: Function that is called when the shard reports that this worker is expelled.
        on_welcome: Function that is called with the shard's Welcome on each new stream.

    Args:
        address: Address ``host:port`` of the shard.
        hello: Hello message, the first message of each stream. The client stores run id and
            incarnation in it.
        max_payload_bytes: Largest payload of a shard's reply that the client accepts, in bytes.
        link: The worker's emulated uplink; None if no link is emulated.
        reconnect_timeout_seconds: Seconds without an answer after which the client raises
            Unreachable.
        closing: Event that is set when the worker must stop.
        encoder: Encoder that turns this worker's pushes to the shard into messages.
        epochs: Newest membership epoch from any shard; all shard clients of the worker share this
            object.
        dscp: Class of service of the stream's packets; None for the operating system's default.
        credentials: Credentials with which this worker connects to the shard.
        make_offer: Function that makes this worker's offer (model description and weights) for a
            shard without a model; None to offer nothing.
        leader: Address of shard 0, which knows the new addresses of moved shards; empty if unknown.
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
        # lock held by the thread that may replace the stream to the shard
        self._turn = threading.Lock()
        # True while the training thread waits for a reply to a request or an answer to a query
        self._in_use = False
        self._abandons = False  # True if the training thread must replace the open push by a pull
        self._replied: Replied | None = None
        self._payload = memoryview(b"")  # payload of the shard's newest message
        self._answered: Answered | None = None
        self._ended: Ended | None = None
        # Cause of the stream's loss, for the log; None if the stream is not lost.
        self._lost_by: StreamLost | None = None
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._try_again_at = 0.0
        self.before_rejoining: Callable[[], None] = lambda: None
        self.on_expelled: Callable[[], None] = lambda: None
        self.on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None

    # -- counters ---------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Number of training bytes sent to this shard, in streams and datagrams so far."""
        session, channel = self._session, self._encoder.channel
        open_bytes = session.stream.bytes_sent if session else 0
        datagram_bytes = channel.bytes_sent if channel is not None else 0
        return self._bytes_before + open_bytes + datagram_bytes

    @property
    def bytes_received(self) -> int:
        """Number of bytes received from this shard, over all streams."""
        session = self._session
        return self._received_before + (session.stream.bytes_received if session else 0)

    @property
    def send_seconds(self) -> float:
        """Total time from each request to its last byte sent, in seconds, over all streams."""
        session = self._session
        open_seconds = session.stream.send_seconds if session else 0.0
        return self._send_seconds_before + open_seconds

    @property
    def connected(self) -> bool:
        """True if the stream to the shard is open, as far as this client knows."""
        return self._session is not None

    @property
    def is_member(self) -> bool:
        """True if this worker is a member, whose queries the shard accepts, as far as it knows."""
        return self.protocol.state in (State.READY, State.REQUESTING)

    @property
    def alive(self) -> bool:
        """True if the stream is open and the shard sent a message in two heartbeat intervals."""
        session = self._session
        seconds = 2 * beat_seconds(self.welcome.lease_seconds)
        return session is not None and session.received_within(seconds)

    @property
    def halt_cause(self) -> str:
        """Reason why the run ended, from this shard; an empty text while the run continues."""
        return self.protocol.halt_cause

    # -- requests (training thread) -----------------------------------------------------------

    def pull(self, pull: pb.Pull | None = None) -> None:
        """Request the shard's part of the model; `wait_for_reply` returns the reply."""
        self._open(lambda: self.protocol.pull(pull))

    def push(self, request: PushRequest) -> None:
        """Push the shard's part of an update, whose buffers must not change before the reply."""
        self._open(lambda: self.protocol.push(request))

    def _open(self, request: Callable[[], list[Action]]) -> None:
        with self._turn:
            self._in_use, self._abandons, self._replied = True, False, None
            self._perform(request())

    def wait_for_reply(
        self, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Replied, memoryview]:
        """Wait for the reply to the open request; reconnect if the stream is lost.

        Args:
            meanwhile: Function that is called about every 0.1 s during the wait, to service the
                requests to other shards.

        Returns:
            The result of the push or pull, and the payload of the shard's reply.

        Raises:
            PushRefused: The shard rejected the pull or push for good.
            Unreachable, RequestRejected: The shard stayed unreachable, or rejected this worker.
            ShardGone: The run has ended, and the shard has closed its stream to this worker.
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
        """Receive and process at most one message of the shard; wait at most `seconds` for it.

        A shard's message may require an action of this worker, for example a repeated push. Other
        workers may wait for this worker's repeated push at one shard while this worker waits for
        another shard.

        Raises:
            PushRefused, Unreachable, RequestRejected, ShardGone: The shard rejected the request,
                stayed unreachable, rejected this worker, or closed the stream after the run's end.
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
        """Make the training thread replace the unanswered push by a pull (from any thread)."""
        self._abandons = self.protocol.is_requesting and self.protocol.step > 0

    def _abandon(self) -> None:
        self._abandons = False
        logging.warning(
            "expelled during an exchange: the worker abandons its push; shard %s may lack a part",
            self.address,
        )
        self._perform(self.protocol.abandon_push())

    # -- queries (training thread) ------------------------------------------------------------

    def notify(self, query: pb.Query) -> None:
        """Send a query to the state server (in shard 0) without waiting for an answer."""
        self.send(pb.ToServer(query=query), counted=True)

    def query(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        """Send a query to the state server and wait for the answer.

        Args:
            query: Query to the state server whether this worker must push in the current round.
            patience_seconds: Longest time to wait for the answer, in seconds; None waits while the
                shard is alive.

        Returns:
            The answer, or an earlier answer "push" of this round. None if no answer arrived in time
            or the stream is lost; the heartbeat thread or the next push reconnects a lost stream.
        """
        if not self._turn.acquire(
            timeout=_QUERY_TURN_SECONDS
        ):  # the heartbeat thread holds the stream's lock while it reconnects
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
        """Receive the shard's messages until the query is answered or the time limit has passed."""
        waited_from = time.monotonic()
        while self._answered is None and (session := self._session) is not None:
            try:
                received = (
                    session.listen()
                    if patience_seconds is None
                    else session.poll(waited_from + patience_seconds - time.monotonic())
                )
            except StreamLost as error:
                logging.warning(
                    "stream to shard %s lost (%s); continuing local steps", self.address, error
                )
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
                    # no new stream is opened now, because `poll` or `attend` opens the next one
                    pass
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
        """Drop the stream to a shard that has expelled or quarantined this worker."""
        if after is Trigger.EXPEL:
            self._lost_by = StreamLost("the shard has expelled this worker")
            self.on_expelled()
        else:
            self._lost_by = StreamLost("the quarantine of this worker is over")
        if not self._in_use:
            logging.warning("lost the gRPC stream to PS shard %s (%s)", self.address, self._lost_by)
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
        """Try to connect to the shard until it sends a Welcome message.

        Raises:
            Unreachable: The shard did not answer within the time limit for reconnecting.
            RequestRejected: The shard rejected this worker for good.
        """
        return self._join(lambda: self._dialler.dial(self._patience_seconds))

    def ensure_connected(self) -> None:
        """Reconnect if the shard has sent nothing recently; send the open request again.

        Raises:
            Unreachable, RequestRejected: The shard stayed unreachable, or rejected this worker.
            ShardGone: The run has ended, and the shard has closed its stream to this worker.
        """
        if not self.alive:
            self._reconnect(StreamLost("the shard sends no heartbeats"))

    def send(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message that needs no answer; drop it if there is no stream to the shard."""
        session = self._session  # use a local variable, because another thread may drop the session
        if session is not None:
            session.send_control(message, counted)

    def attend(self, may_rejoin: Callable[[], bool] = lambda: True) -> None:
        """Service the shard's stream while no request is open (called in the heartbeat thread).

        A worker may compute for a long time, or wait long for another shard. While the worker
        computes or waits for another shard, the method `attend` notices that the shard has expelled
        the worker or that the stream is lost, and reconnects before the worker's lease ends or soon
        after.

        Args:
            may_rejoin: Function that returns True if an expelled worker may send a Hello message
                now.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._in_use or self._closing.is_set() or self.halt_cause:
                return
            self._receive_unrequested()
            # The message with the run's end has just arrived, after which the shard closes the
            # stream.
            if self.protocol.halt_cause:
                return
            lost = self._session is None and time.monotonic() >= self._try_again_at
            if lost and (not self.protocol.is_expelled or may_rejoin()):
                self._revive()
        finally:
            self._turn.release()

    def probe(self, timeout_seconds: float) -> bool:
        """Return True if any server accepts connections at the shard's address."""
        stream = ClientStream(self.address, credentials=self._credentials)
        try:
            stream.open(timeout_seconds)
        except (Unreachable, UntrustedPeer):
            return False
        stream.close(0.0)
        return True

    def close(self) -> None:
        """Close the stream to the shard after sending the queued messages."""
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
        """Open a stream to the shard, and send the unanswered request on the stream."""
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
        """Process the shard's arrived messages; drop the stream if it is lost or silent."""
        try:
            while self._session is not None and (received := self._session.poll(0.0)) is not None:
                self._receive(*received)
            if self._session is not None and self._session.silent:
                self._arrivals.record_alarm()
                raise StreamLost(f"{self.address} sent nothing for too long")
        except StreamLost as error:
            logging.warning("lost the gRPC stream to PS shard %s (%s)", self.address, error)
            self._pauses.num_pauses, self._try_again_at = 0, 0.0
            self._lose(error)
        self._perform(self.protocol.tick(time.monotonic()))

    def _revive(self) -> None:
        """Try once to reconnect to the shard; after a failure, the next request tries again."""
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
            logging.warning("stream to shard %s lost (%s); reconnecting", self.address, error)
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

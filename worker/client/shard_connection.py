"""A worker's stream to one shard, on which it carries out the actions of `ShardProtocol`."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.framing import frames
from thinwire.proto.grpc import ClientStream, StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, Dialler, MakeOffer, beat_seconds, rhythm
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
    Trigger,
)
from thinwire.worker.core.messages import PushRequest

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0


@dataclasses.dataclass(eq=False)
class ShardConnection:
    """A worker's stream to one shard, and the next stream after each lost one.

    The connection carries out the actions of the protocol with the shard: it sends the requests,
    and stores the results.

    Attributes:
        address: Address ``host:port`` of the shard.
        hello: Hello message, the first message of each stream. The client stores run id and
            incarnation in it.
        max_payload_bytes: Largest payload of a shard's reply that the client accepts, in bytes.
        link: The worker's emulated uplink; None if no link is emulated.
        patience_seconds: Seconds without an answer after which the client raises Unreachable.
        closing: Event that is set when the worker must stop.
        encoder: Encoder that turns this worker's pushes to the shard into messages.
        epochs: Newest membership epoch from any shard; all shard clients of the worker share this
            object.
        dscp: Class of service of the stream's packets; None for the operating system's default.
        credentials: Credentials with which this worker connects to the shard.
        make_offer: Function that makes this worker's offer (model description and weights) for a
            shard without a model; None to offer nothing.
        leader: Address of shard 0, which knows the new addresses of moved shards; empty if unknown.
        welcome: Welcome message that the shard sent on the newest stream.
        on_welcome: Function that is called with the shard's Welcome on each new stream.
        on_expelled: Function that is called when the shard reports that this worker is expelled.
        before_rejoining: Function that is called before an expelled worker sends a new Hello
            message.
        protocol: State machine that decides which requests to the shard are sent, repeated or given
            up.
    """

    address: str
    hello: pb.Hello
    max_payload_bytes: int
    link: EmulatedSender | None
    patience_seconds: float
    closing: threading.Event
    encoder: PushEncoder
    epochs: NewestEpoch
    dscp: int | None = None
    credentials: Credentials = NO_CREDENTIALS
    make_offer: MakeOffer | None = None
    leader: str = ""
    welcome: pb.Welcome = dataclasses.field(default_factory=pb.Welcome)
    on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None
    on_expelled: Callable[[], None] = lambda: None
    before_rejoining: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.protocol = ShardProtocol(self.hello.shard, self.epochs)
        # lock held by the thread that may replace the stream to the shard
        self._turn = threading.Lock()
        self._abandons = False  # True if the training thread must replace the open push by a pull
        # True while the training thread waits for a reply to a request or an answer to a query
        self._in_use = False
        self._replied: Replied | None = None
        self._payload = memoryview(b"")  # payload of the shard's newest message
        self._answered: Answered | None = None
        self._ended: Ended | None = None
        # Cause of the stream's loss, for the log; None if the stream is not lost.
        self._lost_by: StreamLost | None = None
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._try_again_at = 0.0
        self._arrivals = rhythm()
        name = f"the PS at {self.address}"
        self._dialler = Dialler(name, self._new_session, self.closing, leader=self.leader)
        self._session: ClientSession | None = None
        self._bytes_before = self._received_before = 0
        self._send_seconds_before = 0.0

    @property
    def bytes_sent(self) -> int:
        """Number of training bytes sent to this shard, in streams and datagrams so far."""
        session, channel = self._session, self.encoder.channel
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
    def alive(self) -> bool:
        """True if the stream is open and the shard sent a message in two heartbeat intervals."""
        session = self._session
        seconds = 2 * beat_seconds(self.welcome.lease_seconds)
        return session is not None and session.received_within(seconds)

    def pull(self, pull: pb.Pull | None = None) -> None:
        """Request the shard's part of the model; `wait_for_reply` returns the reply."""
        with self._turn:
            self._begin_request()
            self._perform(self.protocol.pull(pull))

    def push(self, request: PushRequest) -> None:
        """Push the shard's part of an update, whose buffers must not change before the reply."""
        with self._turn:
            self._begin_request()
            self._perform(self.protocol.push(request))

    def _begin_request(self) -> None:
        self._in_use, self._abandons, self._replied = True, False, None

    def send(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message that needs no answer; drop it if there is no stream to the shard."""
        session = self._session  # use a local variable, because another thread may drop the session
        if session is not None:
            session.send_control(message, counted)

    def probe(self, timeout_seconds: float) -> bool:
        """Return True if any server accepts connections at the shard's address."""
        stream = ClientStream(self.address, credentials=self.credentials)
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
        if self.encoder.channel is not None:
            self.encoder.channel.close()

    def _new_session(self) -> ClientSession:
        return ClientSession(
            self.address,
            self.hello,
            self.max_payload_bytes,
            self.link,
            self.dscp,
            self.credentials,
            self._arrivals,
            self.make_offer,
        )

    def _join(self, dial: Callable[[], tuple[ClientSession, pb.Welcome]]) -> pb.Welcome:
        """Open a stream to the shard, and send the unanswered request on the stream."""
        self.protocol.join()
        try:
            session, welcome = dial()
        except BaseException:
            self._perform(self.protocol.lost())
            raise
        self._session, self.welcome = session, welcome
        self.hello.run_id, self.hello.incarnation = welcome.run_id, welcome.incarnation
        if self.encoder.channel is not None:
            self.encoder.channel.open(self.address, welcome)
        self.on_welcome(welcome)
        self._perform(self.protocol.receive(pb.ToClient(welcome=welcome), time.monotonic()))
        return welcome

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
        for message, pieces in self.encoder.encode(request, action.incarnation, action.epoch):
            if message.WhichOneof("body") == "push":
                session.stream.send(frames(message, pieces, session.chunk_bytes))
            else:
                session.send_control(message, counted=True)
        for message, _ in self.encoder.finish():
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

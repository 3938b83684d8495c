"""A client's session with one shard, from its Hello to its Leave message, and retries to open it.

Workers, supervisors and shards other than shard 0 all use a `ClientSession`, but send different
messages. A `Dialler` opens sessions one after another until a shard accepts a session or a time
limit expires.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.ops.types import ConfigurationError, Link, ShardLayout
from thinwire.proto import messages, versions
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import switching
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.framing import (
    BytesLike,
    Malformed,
    MessageAssembler,
    chunk_bytes_for,
    frame,
    frames,
)
from thinwire.proto.grpc import ClientStream, NoProgress, StreamLost, Unreachable
from thinwire.proto.grpc.common import ChunkPace
from thinwire.proto.moved import note_announced
from thinwire.proto.security.credentials import UntrustedPeer, claims_of
from thinwire.runtime.failure_detector import Backoff, RetryDeadline, RtoEstimator
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.resuming import OtherRun

#: Bytes that `payload_limit` adds for the coding overhead of a reply with a dense float32 shard.
_SLACK_BYTES = 4096
#: Time limit for a shard's answer to a Hello, in seconds. The limit is constant, because no delay
#: of the shard has been measured before its first answer.
_HELLO_TIMEOUT_SECONDS = 30.0
_LOOK_SECONDS = 0.2  # seconds between two calls of `given_up` while a client waits for an answer
#: Longest time for which a live shard may be silent: in seconds while the lease is unknown or
#: short, in leases if the lease is long.
_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE = 10.0, 3.0
#: Shortest silence of a shard, in seconds, that counts as a failure, because a busy machine may
#: pause for a moment.
_LEAST_SILENCE_SECONDS = 2.0
_BEATS_PER_LEASE, _LONGEST_BEAT_SECONDS = 3.0, 3.0
#: Seconds by which a wait must exceed its time limit to show that this process was suspended.
_STALL_SECONDS = 1.0
#: Time limit of the first attempt to open a session, in seconds. The client reports an address
#: without answer after this time at the earliest. Later attempts may take longer.
_FIRST_ATTEMPT_SECONDS = 2.0
#: Minimum number of attempts to open a session within the time limit of `Dialler.dial`.
_LEAST_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
#: Random generator for the pauses between connection attempts. Draws from the global generator of
#: `random` would change the random numbers of the user's script, and if the launcher has seeded it,
#: all workers would draw equal pauses.
jitter = random.SystemRandom().random
#: Longest pause between connection attempts, as a fraction of the lease, so that a client
#: reconnects before its lease ends after a short network failure.
_PAUSE_PER_LEASE = 1 / 4
#: Reasons of a rejected Hello after which the client should send the Hello again.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)
#: Roles of clients whose messages are large enough to need a bulk connection.
_TAKES_BULK = (pb.ROLE_WORKER, pb.ROLE_SUPERVISOR)
#: Role in a Hello that only requests another shard's address from shard 0. A worker and a
#: supervisor use a role that does not make them join the run.
_LOCATES_AS = {pb.ROLE_WORKER: pb.ROLE_SCRIPT, pb.ROLE_SUPERVISOR: pb.ROLE_EVALUATOR}


class RequestRejected(Exception):
    """Error: a shard has rejected a client's Hello or a worker's push."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason
        self.step: int = refusal.step
        self.epoch: int = refusal.epoch
        self.retry_after_seconds: float = refusal.retry_after_seconds
        self.phase: int = refusal.phase


class OfferAccepted(RequestRejected):
    """Raised when a shard has accepted the model that a worker offers and expects a new Hello."""


#: Function that returns the document and the payload (byte buffers in order) of an offered model.
MakeOffer = Callable[[], tuple[str, Sequence[BytesLike]]]


def payload_limit(layout: ShardLayout, aux_count: int = 0) -> int:
    """Return the maximum payload bytes of a valid push to a shard or reply from the shard.

    Args:
        layout: Layout of the shard (the variable slices that the shard stores).
        aux_count: Number of auxiliary float32 values at the payload's end.
    """
    return 5 * layout.size + _SLACK_BYTES + 64 * len(layout.slices) + 4 * aux_count


def beat_seconds(lease_seconds: float) -> float:
    """Return the time between two heartbeat messages of a shard, in seconds."""
    return min(_LONGEST_BEAT_SECONDS, lease_seconds / _BEATS_PER_LEASE)


def rhythm(lease_seconds: float = 0.0) -> RtoEstimator:
    """Return an estimator of the time for which a live shard may send nothing.

    The timeout for a silent shard is at least two heartbeat intervals and 2 s, and at most the
    longer of 10 s and three leases. Between its bounds, the timeout for a silent shard is estimated
    from the intervals between the shard's messages.

    Args:
        lease_seconds: Lease of the run, in seconds; 0 if it is not known yet.
    """
    least = max(_LEAST_SILENCE_SECONDS, 2 * beat_seconds(lease_seconds))
    return RtoEstimator(least, max(_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE * lease_seconds))


def chunk_bytes(emulated: Link, chunks: ChunkPace) -> int | Callable[[], int]:
    """Return the size of payload pieces: fixed by an emulated link's rate, else adaptive."""
    if emulated.mbps > 0:
        return chunk_bytes_for(emulated)
    return lambda: chunks.num_bytes


class ClientSession:
    """A client's session with one shard over one gRPC stream.

    Attributes:
        address: Network address ``host:port`` of the shard.
        arrivals: Estimator of the timeout in seconds after which a silent shard counts as lost.
        chunk_bytes: Size of the pieces of a payload: a number of bytes, or a function that returns
            the number.

    Args:
        address: Network address ``host:port`` of the shard.
        hello: Hello message, the first message of the session, which adds the client's proof and
            its request for a bulk connection.
        max_payload_bytes: Maximum payload of a reply, in bytes. A larger reply is rejected before
            memory is allocated.
        link: The worker's emulated uplink; None to send frames without an emulated link.
        dscp: DSCP class of service of the stream's packets, 0..63. None: the system's default.
        credentials: This node's certificate, key and token.
        arrivals: Estimator of the shard's timeout that earlier sessions with the shard used; None
            for a new estimator.
        make_offer: Function that returns the script's model as an offer for a shard without a
            model; None if the client has no model.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        max_payload_bytes: int,
        link: EmulatedSender | None = None,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        arrivals: RtoEstimator | None = None,
        make_offer: MakeOffer | None = None,
    ) -> None:
        self.address, self._make_offer, self._credentials = address, make_offer, credentials
        self.arrivals = arrivals or rhythm()
        self._hello = hello
        self._stream = ClientStream(address, link, dscp=dscp, credentials=credentials)
        link_message = hello.link
        emulated = Link(link_message.mbps, link_message.delay_ms, link_message.loss)
        reachable = self._stream.address not in switching.UNREACHABLE
        hello.bulk = hello.role in _TAKES_BULK and not emulated.active and reachable
        self.chunk_bytes = chunk_bytes(emulated, self._stream.chunks)
        self._assembler = MessageAssembler(pb.ToClient, lambda message: max_payload_bytes)

    @property
    def stream(self) -> ClientStream:
        """The client's gRPC stream, from which callers read byte counters."""
        return self._stream

    @property
    def silent(self) -> bool:
        """True if the shard's stream has ended, or the shard was silent for longer than its
        timeout.
        """
        newest_at = max(self.arrivals.last_arrival_at, self._stream.newest_frame_at)
        overdue = time.monotonic() > newest_at + self.arrivals.timeout_seconds
        return self._stream.ended or overdue

    def received_within(self, seconds: float) -> bool:
        """Return True if the stream is open and a frame arrived from the shard in the last
        ``seconds``.
        """
        return not self._stream.ended and time.monotonic() - self._stream.newest_frame_at < seconds

    def open(
        self, timeout_seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> pb.Welcome:
        """Connect to the shard, send a Hello and return the shard's Welcome.

        Args:
            timeout_seconds: Time limit to connect, in seconds. The shard has another 30 s to answer
                the Hello.
            given_up: Function that returns True if the caller no longer wants the session.

        Raises:
            Unreachable: No shard accepts the stream within the time limit.
            RequestRejected: The shard rejects the Hello or the offered model, or the client does
                not trust the shard.
            OfferAccepted: The shard has accepted the offered model; the client must open another
                session.
            OtherRun: This worker id has trained in the run with another program (script).
            ConfigurationError: The model is too large to be offered.
            StreamLost: The stream ended, or the server is not a Thinwire shard.
        """
        try:
            self._stream.open(timeout_seconds, given_up)
        except UntrustedPeer as error:
            refusal = pb.Refusal(reason=pb.REASON_IDENTITY, message=str(error))
            raise RequestRejected(refusal) from error
        self._hello.proof = self._stream.peer.prove(claims_of(self._hello))
        self.send_control(pb.ToServer(hello=self._hello))
        has_offered = False
        while True:
            message = self._answer(given_up)
            if message.WhichOneof("body") == "welcome":
                if why := versions.unknown_fields(message.welcome, self.address):
                    self.close()
                    raise RequestRejected(
                        pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message=why)
                    )
                bounds = rhythm(message.welcome.lease_seconds)
                self.arrivals.least_seconds = bounds.least_seconds
                self.arrivals.most_seconds = bounds.most_seconds
                self.arrivals.begin(self._stream.arrived_at)
                if self._hello.bulk and message.welcome.HasField("bulk"):
                    self._stream.switch(message.welcome.bulk, message.welcome.lease_seconds)
                return message.welcome
            if message.WhichOneof("body") != "refusal":
                continue
            reason = message.refusal.reason
            if reason == pb.REASON_NO_MODEL and self._make_offer is not None and not has_offered:
                has_offered = True
                self._send_offer(self._make_offer)
                continue
            self.close()
            if reason == pb.REASON_OTHER_PROGRAM:
                raise OtherRun(message.refusal.message)
            is_accepted = has_offered and reason == pb.REASON_STARTING
            raise (OfferAccepted if is_accepted else RequestRejected)(message.refusal)

    def locate(self, leader: str, given_up: Callable[[], bool] = lambda: False) -> None:
        """Request the present address of this session's shard from shard 0.

        The next session with the shard uses the address that shard 0 has sent. Failures are
        ignored.

        Args:
            leader: ``host:port`` of shard 0.
            given_up: Function that returns True if the caller no longer needs the shard's address.
        """
        own_hello = self._hello
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=_LOCATES_AS.get(own_hello.role, own_hello.role),
            id=own_hello.id,
            run_id=own_hello.run_id,
            num_shards=own_hello.num_shards,
        )
        session = ClientSession(leader, hello, 0, credentials=self._credentials)
        try:
            addresses = session.open(_FIRST_ATTEMPT_SECONDS, given_up).addresses
            session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
        except (Unreachable, StreamLost, RequestRejected):  # shard 0 may be unreachable, too
            return
        finally:
            session.close(0.0)
        if own_hello.shard <= len(addresses) and addresses[own_hello.shard - 1]:
            note_announced(self.address, self._stream.address, addresses[own_hello.shard - 1])

    @property
    def shard(self) -> int:
        """Id of the shard that the client expects at the session's address."""
        return self._hello.shard

    def _answer(self, given_up: Callable[[], bool]) -> pb.ToClient:
        """Return the shard's next message, which may be the Welcome or a refusal of the Hello.

        Raises:
            StreamLost: The stream ended, a frame is malformed, the shard sent nothing for 30 s, or
                the caller no longer wants the session.
        """
        deadline = time.monotonic() + _HELLO_TIMEOUT_SECONDS
        while (message := self.poll(_LOOK_SECONDS)) is None:
            if given_up():
                self.close(0.0)
                raise StreamLost(f"{self.address}: canceled while waiting for an answer to Hello")
            if time.monotonic() >= deadline:
                self.close()
                raise StreamLost(f"{self.address} sent nothing for {_HELLO_TIMEOUT_SECONDS:g} s")
        return message[0]

    def _send_offer(self, make_offer: MakeOffer) -> None:
        document, pieces = make_offer()
        message = pb.ToServer(offer=pb.Offer(document=document))
        try:
            parts = frames(message, pieces, self.chunk_bytes)
        except ValueError as error:
            self.close()
            raise ConfigurationError(
                f"this script's model cannot be sent to {self.address}: {error}. Set a larger "
                "--nb_ps, or start the servers with a model (thinwire.init_server)."
            ) from error
        self._stream.send(parts, counted=False)

    def send_control(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message without payload to the shard; if `counted`, count its bytes as training
        traffic.
        """
        self._stream.send((frame(message),), counted)

    def receive(self, progress_seconds: float) -> tuple[pb.ToClient, memoryview]:
        """Return the shard's next whole message and the message's payload.

        Raises:
            StreamLost: The shard's stream ended, a frame is malformed, or no byte arrived for
                `progress_seconds`.
        """
        while True:
            try:
                complete = self._feed_frame(progress_seconds)
            except NoProgress as error:
                self.close()
                raise StreamLost(str(error)) from error
            if complete is not None:
                return complete

    def listen(self) -> tuple[pb.ToClient, memoryview]:
        """Wait for the shard's next whole message; return the message and its payload.

        Raises:
            StreamLost: The shard's stream ended, a frame is malformed, or the shard was silent for
                longer than the estimated timeout.
        """
        while (message := self.listen_for(math.inf)) is None:
            pass
        return message

    def listen_for(self, seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the shard's next message and its payload, or None if no byte arrives in time.

        Raises:
            StreamLost: The shard's stream ended, a frame is malformed, or the shard was silent for
                longer than the estimated timeout.
        """
        while True:
            began = time.monotonic()
            patience = max(0.0, self.arrivals.deadline - began)
            try:
                complete = self._feed_frame(min(patience, seconds))
            except NoProgress as error:
                if seconds < patience:
                    return None
                late = time.monotonic() - began - patience
                # A wait that ends much too late means that this process was suspended. Frames that
                # arrived in that time are still unread, so the silence does not show a dead shard.
                if late > _STALL_SECONDS:
                    self.arrivals.excuse(late + _STALL_SECONDS, time.monotonic())
                    continue
                self.arrivals.record_alarm()
                self.close(0.0)
                silent = time.monotonic() - self.arrivals.last_arrival_at
                raise StreamLost(f"{self.address} sent nothing for {silent:.3g} s") from error
            if complete is not None:
                return complete

    def poll(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the shard's next message and its payload, or None if no byte arrives in time.

        With `poll`, a silent shard is not an error and does not end the session.

        Raises:
            StreamLost: The shard's stream ended, or a frame is malformed.
        """
        while True:
            try:
                complete = self._feed_frame(patience_seconds)
            except NoProgress:
                return None
            if complete is not None:
                return complete

    def _feed_frame(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Receive one frame; return the completed message, or None if parts of the message are
        missing.

        Raises:
            NoProgress: No byte arrived from the shard within the time limit.
            StreamLost: The shard's stream ended, or the frame is malformed.
        """
        try:
            complete = self._assembler.feed(self._stream.receive(patience_seconds))
        except Malformed as error:
            self.close()
            raise StreamLost(f"{self.address}: malformed message: {error}") from error
        is_beat = complete is not None and complete[0].WhichOneof("body") == "waiting"
        record = self.arrivals.record_beat if is_beat else self.arrivals.record_arrival
        record(self._stream.arrived_at)
        return complete

    def close(self, grace_seconds: float = 1.0) -> None:
        """Send the queued frames, then end the stream; cancel the stream after the grace time."""
        self._stream.close(grace_seconds)


class Dialler:
    """Opens a client's sessions with one shard, one session after another.

    Args:
        name: Name of the shard, for log lines and errors.
        make: Function that returns a new session with the shard, which is not open yet.
        closing: Event that is set when the client must stop.
        transient: Rejection reasons after which the client sends a Hello again. After a rejection
            with a retry time, the client always sends a Hello again.
        leader: ``host:port`` of shard 0, which knows the present addresses of restarted shards;
            empty if the address of shard 0 is not known.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], ClientSession],
        closing: threading.Event,
        transient: tuple[int, ...] = _TRANSIENT,
        leader: str = "",
    ) -> None:
        self._name, self._make, self._leader = name, make, leader
        self._closing, self._transient = closing, transient
        self._attempts = RetryDeadline(_FIRST_ATTEMPT_SECONDS, _FIRST_ATTEMPT_SECONDS)
        self._longest_pause_seconds = _LONGEST_PAUSE_SECONDS

    def dial(self, patience_seconds: float) -> tuple[ClientSession, pb.Welcome]:
        """Try to connect until the shard accepts a session; return the session and the shard's
        Welcome.

        Args:
            patience_seconds: Time limit in seconds for all attempts to open a session. The time
                starts again when a shard accepts a model offer or sends a retry time.

        Raises:
            Unreachable: No shard accepted a session within the time limit, or the client must stop.
            RequestRejected: The shard rejected the Hello for a reason that a retry does not change.
        """
        deadline = time.monotonic() + patience_seconds
        self._attempts.most_seconds = max(
            _FIRST_ATTEMPT_SECONDS, patience_seconds / _LEAST_ATTEMPTS
        )
        pauses = Backoff(_FIRST_PAUSE_SECONDS, self._longest_pause_seconds)
        while True:
            try:
                accepted = self.attempt(deadline - time.monotonic())
                if pauses.num_pauses:
                    logging.info("found %s", self._name)
                return accepted
            except OfferAccepted:
                logging.info("%s accepted the model that this worker sent", self._name)
                deadline = time.monotonic() + patience_seconds
                continue
            except (Unreachable, StreamLost, RequestRejected) as error:
                if isinstance(error, RequestRejected) and error.retry_after_seconds > 0:
                    is_starting = error.reason == pb.REASON_STARTING
                    if is_starting:
                        logging.log_every_n_seconds(logging.INFO, "%s: %s", 10, self._name, error)
                    else:
                        logging.warning("%s", error)
                    self._closing.wait(error.retry_after_seconds)
                    deadline = time.monotonic() + patience_seconds
                    if is_starting and not self._closing.is_set():
                        continue  # the shard runs and has sent the pause, so no backoff is needed
                elif isinstance(error, RequestRejected) and error.reason not in self._transient:
                    raise
                if not pauses.num_pauses:
                    logging.info(
                        "connecting to %s for up to %g s: %s", self._name, patience_seconds, error
                    )
                pause = pauses.next_seconds(jitter())
                if self._closing.is_set() or time.monotonic() + pause >= deadline:
                    raise Unreachable(f"{self._name}: {error}") from error
            self._closing.wait(pause)

    def attempt(
        self, most_seconds: float = _FIRST_ATTEMPT_SECONDS
    ) -> tuple[ClientSession, pb.Welcome]:
        """Try once to open a session with the shard; return the session and the shard's Welcome.

        Args:
            most_seconds: Approximate time limit of the attempt to open a session, in seconds.

        Raises:
            Unreachable, StreamLost: The attempt to open a session failed.
            RequestRejected: The shard rejected the client's Hello.
        """
        session, began = self._make(), time.monotonic()
        timeout = min(self._attempts.timeout_seconds, max(0.5, most_seconds))
        try:
            welcome = session.open(timeout, self._closing.is_set)
        except (Unreachable, StreamLost, RequestRejected) as error:
            session.close(0.0)
            if time.monotonic() - began >= timeout:
                self._attempts.fail()
            if isinstance(error, Unreachable) and self._leader and session.shard:
                session.locate(self._leader, self._closing.is_set)
            raise
        self._attempts.succeed(time.monotonic() - began)
        if welcome.lease_seconds > 0:
            pause = max(_FIRST_PAUSE_SECONDS, _PAUSE_PER_LEASE * welcome.lease_seconds)
            self._longest_pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause)
        return session, welcome

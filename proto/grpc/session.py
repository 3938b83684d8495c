"""A client's session with one shard, from Hello to Leave, and the retries until it is accepted.

Workers, supervisors and following shards all use a `ClientSession`; their messages differ. A
`Dialler` opens one session after another until one is accepted or its patience ends.
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

#: A reply may use every byte of a dense float32 shard, plus coding overhead per slice.
_SLACK_BYTES = 4096
#: How long a shard may take to answer a Hello. A constant: nothing is known yet of a peer that sent
#: nothing.
_HELLO_TIMEOUT_SECONDS = 30.0
_LOOK_SECONDS = 0.2  # between two looks whether anybody still wants the answer
#: The longest silence before a shard has sent the length of its leases, and in leases after that.
_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE = 10.0, 3.0
#: A machine that is busy for a moment is not dead.
_LEAST_SILENCE_SECONDS = 2.0
_BEATS_PER_LEASE, _LONGEST_BEAT_SECONDS = 3.0, 3.0
#: A wait that took so much longer than planned means that this process stood still.
_STALL_SECONDS = 1.0
#: The first attempt's time, so also the least time until a silent address is reported; later
#: attempts may take longer.
_FIRST_ATTEMPT_SECONDS = 2.0
#: How many attempts there should be at least.
_LEAST_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
#: Draws how long to pause. What the `random` module draws is the script's, and where the launcher
#: has seeded it, all workers would draw the same pauses.
jitter = random.SystemRandom().random
#: Of a lease: a client that finds the shard again after a short cut returns before its lease ends.
_PAUSE_PER_LEASE = 1 / 4
#: A Hello rejected for these reasons may be accepted a little later.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)
#: Whose messages are worth a connection of their own.
_TAKES_BULK = (pb.ROLE_WORKER, pb.ROLE_SUPERVISOR)
#: Who only requests the address of another shard from shard 0 takes no part in the run by that.
_LOCATES_AS = {pb.ROLE_WORKER: pb.ROLE_SCRIPT, pb.ROLE_SUPERVISOR: pb.ROLE_EVALUATOR}


class RequestRejected(Exception):
    """The shard did not accept a Hello or a push."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason
        self.step: int = refusal.step
        self.epoch: int = refusal.epoch
        self.retry_after_seconds: float = refusal.retry_after_seconds
        self.phase: int = refusal.phase


class OfferAccepted(RequestRejected):
    """The shard has taken this worker's offer, and waits for another Hello."""


#: Makes the document of an offer and its payload, as buffers of bytes in order.
MakeOffer = Callable[[], tuple[str, Sequence[BytesLike]]]


def payload_limit(layout: ShardLayout, aux_count: int = 0) -> int:
    """Return the most payload bytes that any legal push or reply of a shard may have.

    Args:
        layout: Of the shard.
        aux_count: Auxiliary values that may come with it.
    """
    return 5 * layout.size + _SLACK_BYTES + 64 * len(layout.slices) + 4 * aux_count


def beat_seconds(lease_seconds: float) -> float:
    """Return the time between two signs of life of a shard."""
    return min(_LONGEST_BEAT_SECONDS, lease_seconds / _BEATS_PER_LEASE)


def rhythm(lease_seconds: float = 0.0) -> RtoEstimator:
    """Return an estimator of how long a shard may be silent.

    The time-out is two of its beats at least and three leases at most; in between it follows the
    arrivals seen so far.

    Args:
        lease_seconds: Of the run; 0: not known yet.
    """
    least = max(_LEAST_SILENCE_SECONDS, 2 * beat_seconds(lease_seconds))
    return RtoEstimator(least, max(_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE * lease_seconds))


def chunk_bytes(emulated: Link, chunks: ChunkPace) -> int | Callable[[], int]:
    """Return the size of a payload's pieces: from an emulated link's rate, or adapted to them."""
    if emulated.mbps > 0:
        return chunk_bytes_for(emulated)
    return lambda: chunks.num_bytes


class ClientSession:
    """One stream to one shard.

    Attributes:
        arrivals: Estimates how often the shard sends; outlives the session where it was given.

    Args:
        address: ``host:port``.
        hello: The first message.
        max_payload_bytes: Larger replies are rejected before anything is allocated.
        link: The worker's emulated uplink, if it has one.
        dscp: Class of service that the stream's packets request; None: the system's default.
        credentials: Of this node.
        arrivals: The estimator of earlier sessions with the shard.
        make_offer: Called where the shard has no model; None: this client has none either.
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
        given = hello.link
        emulated = Link(given.mbps, given.delay_ms, given.loss)
        reachable = self._stream.address not in switching.UNREACHABLE
        hello.bulk = hello.role in _TAKES_BULK and not emulated.active and reachable
        self._chunk_bytes = chunk_bytes(emulated, self._stream.chunks)
        self._assembler = MessageAssembler(pb.ToClient, lambda message: max_payload_bytes)

    @property
    def stream(self) -> ClientStream:
        """The stream, for its counters."""
        return self._stream

    @property
    def silent(self) -> bool:
        """Whether to give the shard up: the stream has ended, or nothing arrives any more."""
        newest_at = max(self.arrivals.last_arrival_at, self._stream.newest_frame_at)
        overdue = time.monotonic() > newest_at + self.arrivals.timeout_seconds
        return self._stream.ended or overdue

    def received_within(self, seconds: float) -> bool:
        """Return whether the stream is open and anything arrived in the last ``seconds``."""
        return not self._stream.ended and time.monotonic() - self._stream.newest_frame_at < seconds

    def open(
        self, timeout_seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> pb.Welcome:
        """Connect, send Hello and return the Welcome.

        Args:
            timeout_seconds: To connect; the answer to the Hello has a time of its own.
            given_up: Whether nobody wants the session any more.

        Raises:
            Unreachable: Nothing answers in time.
            RequestRejected: The shard rejects the Hello or the offer, or is not trusted itself.
            OfferAccepted: It has taken the offer; open another session.
            OtherRun: This worker has trained the run with another program.
            ConfigurationError: The model is too large to be offered.
            StreamLost: The stream broke, or another program than a Thinwire shard answered.
        """
        try:
            self._stream.open(timeout_seconds, given_up)
        except UntrustedPeer as error:
            refusal = pb.Refusal(reason=pb.REASON_IDENTITY, message=str(error))
            raise RequestRejected(refusal) from error
        self._hello.proof = self._stream.prove(claims_of(self._hello))
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
        """Request from shard 0 where this session's shard is now; the next session looks there.

        Args:
            leader: ``host:port`` of shard 0.
            given_up: Whether nobody wants to know any more.
        """
        mine = self._hello
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=_LOCATES_AS.get(mine.role, mine.role),
            id=mine.id,
            run_id=mine.run_id,
            num_shards=mine.num_shards,
        )
        session = ClientSession(leader, hello, 0, credentials=self._credentials)
        try:
            found = session.open(_FIRST_ATTEMPT_SECONDS, given_up).addresses
            session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
        except (Unreachable, StreamLost, RequestRejected):  # it may be away as well
            return
        finally:
            session.close(0.0)
        if mine.shard <= len(found) and found[mine.shard - 1]:
            note_announced(self.address, self._stream.address, found[mine.shard - 1])

    @property
    def shard(self) -> int:
        """The number of the shard that is expected at the address."""
        return self._hello.shard

    def _answer(self, given_up: Callable[[], bool]) -> pb.ToClient:
        """Return the next message of a shard that has not welcomed this client yet.

        Raises:
            StreamLost: As `receive` does, or nobody wants the session any more.
        """
        deadline = time.monotonic() + _HELLO_TIMEOUT_SECONDS
        while (found := self.poll(_LOOK_SECONDS)) is None:
            if given_up():
                self.close(0.0)
                raise StreamLost(f"{self.address}: given up while it was to answer a Hello")
            if time.monotonic() >= deadline:
                self.close()
                raise StreamLost(f"{self.address} sent nothing for {_HELLO_TIMEOUT_SECONDS:g} s")
        return found[0]

    def _send_offer(self, make_offer: MakeOffer) -> None:
        document, pieces = make_offer()
        message = pb.ToServer(offer=pb.Offer(document=document))
        try:
            parts = frames(message, pieces, self._chunk_bytes)
        except ValueError as error:
            self.close()
            raise ConfigurationError(
                f"this script's model cannot be offered to {self.address}: {error}. Set a larger "
                "--nb_ps, or start the servers with a model of their own (thinwire.init_server)."
            ) from error
        self._stream.send(parts, counted=False)

    def send_control(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message without payload; `counted` if it belongs to training."""
        self._stream.send((frame(message),), counted)

    def send(self, message: pb.ToServer, pieces: Sequence[BytesLike]) -> None:
        """Queue a push with its payload; `pieces` must not change until it is answered."""
        self._stream.send(frames(message, pieces, self._chunk_bytes))

    def receive(self, progress_seconds: float) -> tuple[pb.ToClient, memoryview]:
        """Return the next whole message and its payload.

        Raises:
            StreamLost: The stream ended, what arrived is malformed, or nothing at all arrived for
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
        """Return the next whole message and its payload, as long as the shard lives.

        Raises:
            StreamLost: As `listen_for` does.
        """
        while (message := self.listen_for(math.inf)) is None:
            pass
        return message

    def listen_for(self, seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the next whole message, or None if nothing at all arrives in this time.

        Raises:
            StreamLost: The stream ended, a frame is malformed, or the shard was silent for longer
                than the estimated time-out.
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
                if late > _STALL_SECONDS:  # we stood still; arrivals meanwhile are not read yet
                    self.arrivals.excuse(late + _STALL_SECONDS, time.monotonic())
                    continue
                self.arrivals.record_alarm()
                self.close(0.0)
                silent = time.monotonic() - self.arrivals.last_arrival_at
                raise StreamLost(f"{self.address} sent nothing for {silent:.3g} s") from error
            if complete is not None:
                return complete

    def poll(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the next whole message if it arrives soon; silence is no error.

        Raises:
            StreamLost: As `receive` does.
        """
        while True:
            try:
                complete = self._feed_frame(patience_seconds)
            except NoProgress:
                return None
            if complete is not None:
                return complete

    def _feed_frame(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Receive one frame; return the message that it completes, if any.

        Raises:
            NoProgress: None arrived in time.
            StreamLost: The stream ended, or the frame is malformed.
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
        """End the stream after what has been queued."""
        self._stream.close(grace_seconds)


class Dialler:
    """Opens one session after another to the same shard.

    Args:
        name: Of the shard, for messages.
        make: Makes a session that is not open yet.
        closing: Set when the client is to stop.
        transient: Reasons after which to send a rejected Hello again; a refusal that names a time
            for that always allows it.
        leader: Address of shard 0, which knows where others have come back; empty: not known.
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
        """Return an accepted session and its Welcome.

        Raises:
            Unreachable: Nobody answered for the whole patience, or the client is to stop.
            RequestRejected: The shard rejected the Hello for good.
        """
        deadline = time.monotonic() + patience_seconds
        self._attempts.most_seconds = max(
            _FIRST_ATTEMPT_SECONDS, patience_seconds / _LEAST_ATTEMPTS
        )
        pauses = Backoff(_FIRST_PAUSE_SECONDS, self._longest_pause_seconds)
        while True:
            try:
                found = self.attempt(deadline - time.monotonic())
                if pauses.num_pauses:
                    logging.info("found %s", self._name)
                return found
            except OfferAccepted:
                logging.info("%s has taken the model from this worker", self._name)
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
                        continue  # it is there, and has kept us waiting as long as is good
                elif isinstance(error, RequestRejected) and error.reason not in self._transient:
                    raise
                if not pauses.num_pauses:
                    logging.info(
                        "looking for %s, for up to %g s: %s", self._name, patience_seconds, error
                    )
                pause = pauses.next_seconds(jitter())
                if self._closing.is_set() or time.monotonic() + pause >= deadline:
                    raise Unreachable(f"{self._name}: {error}") from error
            self._closing.wait(pause)

    def attempt(
        self, most_seconds: float = _FIRST_ATTEMPT_SECONDS
    ) -> tuple[ClientSession, pb.Welcome]:
        """Try once, for about this long at most.

        Raises:
            Unreachable, StreamLost: The attempt failed.
            RequestRejected: The shard rejected the Hello.
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

"""A client's conversation with one shard, from Hello to Leave.

Workers, supervisors and following shards all speak through a Session; what they say differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ops.arrivals import Arrivals
from ops.credentials import NO_CREDENTIALS, Credentials
from ops.types import Link, ShardLayout
from proto import convert, versions
from proto import thinwire_pb2 as pb
from proto.channel_emulated import EmulatedSender
from proto.channel_grpc import ClientStream, NoProgress, StreamLost
from proto.credentials import NotTrusted, words_of
from proto.framing import BytesLike
from proto.pace import ChunkPace

#: A reply may use every byte of a dense float32 shard, plus coding overhead per slice.
_SLACK_BYTES = 4096
#: How long a shard may take to answer a Hello. A constant, and the same as on the shard's side
#: (`proto.door`): nothing is known of a peer that has not been heard.
_HELLO_TIMEOUT_SECONDS = 30.0
#: Before a shard has said how long its leases are, and at least after that.
_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE = 10.0, 3.0
#: A machine that is busy for a moment is not dead.
_LEAST_SILENCE_SECONDS = 2.0
_BEATS_PER_LEASE, _LONGEST_BEAT_SECONDS = 3.0, 3.0
#: Waiting that took so much longer than it was to means that this process stood still.
_STALL_SECONDS = 1.0


class Refused(Exception):
    """The shard did not accept a Hello or a push."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason
        self.step: int = refusal.step
        self.epoch: int = refusal.epoch
        self.retry_after_seconds: float = refusal.retry_after_seconds


def payload_limit(layout: ShardLayout, aux_count: int = 0) -> int:
    """Return the most payload bytes that any legal push or reply of a shard may have.

    Args:
        layout: Of the shard.
        aux_count: Auxiliary values that may come with it.
    """
    return 5 * layout.size + _SLACK_BYTES + 64 * len(layout.slices) + 4 * aux_count


def beat_seconds(lease_seconds: float) -> float:
    """Return how often a shard says that it lives."""
    return min(_LONGEST_BEAT_SECONDS, lease_seconds / _BEATS_PER_LEASE)


def rhythm(lease_seconds: float = 0.0) -> Arrivals:
    """Return what learns how often a shard is heard.

    It may be silent for two of its beats at least and for three leases at most; in between counts
    what was seen of it.

    Args:
        lease_seconds: Of the run; 0: not known yet.
    """
    least = max(_LEAST_SILENCE_SECONDS, 2 * beat_seconds(lease_seconds))
    return Arrivals(least, max(_MOST_SILENCE_SECONDS, _LEASES_OF_SILENCE * lease_seconds))


def chunk_bytes(emulated: Link, chunks: ChunkPace) -> int | Callable[[], int]:
    """Return how large pieces of payloads should be: by an emulated link's rate, or as they go."""
    if emulated.mbps > 0:
        return convert.chunk_bytes_for(emulated)
    return lambda: chunks.num_bytes


class Session:
    """One stream to one shard.

    Attributes:
        arrivals: How often the shard is heard; outlives the session where it was given.

    Args:
        address: ``host:port``.
        hello: How to introduce oneself.
        max_payload_bytes: Larger replies are refused before anything is allocated.
        link: The worker's emulated up-link, if it has one.
        dscp: Class of service that the stream's packets ask for; None: as the system has it.
        credentials: Of this node.
        arrivals: What earlier sessions have learnt of the shard.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        max_payload_bytes: int,
        link: EmulatedSender | None = None,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.address = address
        self.arrivals = arrivals or rhythm()
        self._hello = hello
        self._stream = ClientStream(address, link, dscp=dscp, credentials=credentials)
        given = hello.link
        emulated = Link(given.mbps, given.delay_ms, given.loss)
        self._chunk_bytes = chunk_bytes(emulated, self._stream.chunks)
        self._assembler = convert.Assembler(pb.ToClient, lambda message: max_payload_bytes)

    @property
    def stream(self) -> ClientStream:
        """The stream, for its counters."""
        return self._stream

    @property
    def silent(self) -> bool:
        """Whether the shard is to be given up: the stream has ended, or nothing comes any more."""
        heard_at = max(self.arrivals.heard_at, self._stream.heard_at)
        overdue = time.monotonic() > heard_at + self.arrivals.timeout_seconds
        return self._stream.ended or overdue

    def heard_within(self, seconds: float) -> bool:
        """Return whether the stream stands, and anything came so lately."""
        return not self._stream.ended and time.monotonic() - self._stream.heard_at < seconds

    def open(
        self, timeout_seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> pb.Welcome:
        """Connect and introduce oneself.

        Args:
            timeout_seconds: To connect; the answer to the Hello has a time of its own.
            given_up: Whether nobody wants it any more.

        Raises:
            Unreachable: Nothing answers in time.
            Refused: The shard says no, or is not trusted itself.
            StreamLost: The stream broke, or what answers is not a Thinwire shard.
        """
        try:
            self._stream.open(timeout_seconds, given_up)
        except NotTrusted as error:
            refusal = pb.Refusal(reason=pb.REASON_IDENTITY, message=str(error))
            raise Refused(refusal) from error
        self._hello.proof = self._stream.prove(words_of(self._hello))
        self.say(pb.ToServer(hello=self._hello))
        deadline = time.monotonic() + _HELLO_TIMEOUT_SECONDS
        while True:
            message, _ = self.receive(max(0.0, deadline - time.monotonic()))
            if message.WhichOneof("body") == "welcome":
                if why := versions.strange_fields(message.welcome, self.address):
                    self.close()
                    raise Refused(pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message=why))
                bounds = rhythm(message.welcome.lease_seconds)
                self.arrivals.least_seconds = bounds.least_seconds
                self.arrivals.most_seconds = bounds.most_seconds
                self.arrivals.begin(self._stream.arrived_at)
                return message.welcome
            if message.WhichOneof("body") == "refusal":
                self.close()
                raise Refused(message.refusal)

    def say(self, message: pb.ToServer, counted: bool = False) -> None:
        """Queue a message without payload; `counted` if it belongs to training."""
        self._stream.send((convert.frame(message),), counted)

    def send(self, message: pb.ToServer, pieces: Sequence[BytesLike]) -> None:
        """Queue a push with its payload; `pieces` must not change until it is answered."""
        self._stream.send(convert.frames(message, pieces, self._chunk_bytes))

    def receive(self, progress_seconds: float) -> tuple[pb.ToClient, memoryview]:
        """Return the next whole message and its payload.

        Raises:
            StreamLost: The stream ended, what arrived is malformed, or nothing at all arrived for
                `progress_seconds`.
        """
        while True:
            try:
                complete = self._take(progress_seconds)
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
        while (heard := self.listen_for(math.inf)) is None:
            pass
        return heard

    def listen_for(self, seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the next whole message, or None if nothing at all comes in this time.

        Raises:
            StreamLost: The stream ended, what arrived is malformed, or the shard was silent for so
                long as it never is.
        """
        while True:
            began = time.monotonic()
            patience = max(0.0, self.arrivals.deadline - began)
            try:
                complete = self._take(min(patience, seconds))
            except NoProgress as error:
                if seconds < patience:
                    return None
                late = time.monotonic() - began - patience
                if late > _STALL_SECONDS:  # we stood still; what came meanwhile is not read yet
                    self.arrivals.excuse(late + _STALL_SECONDS, time.monotonic())
                    continue
                self.arrivals.note_alarm()
                self.close(0.0)
                silent = time.monotonic() - self.arrivals.heard_at
                raise StreamLost(f"{self.address} sent nothing for {silent:.3g} s") from error
            if complete is not None:
                return complete

    def poll(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Return the next whole message if it is here soon; silence is no error.

        Raises:
            StreamLost: As `receive` does.
        """
        while True:
            try:
                complete = self._take(patience_seconds)
            except NoProgress:
                return None
            if complete is not None:
                return complete

    def _take(self, patience_seconds: float) -> tuple[pb.ToClient, memoryview] | None:
        """Take in one frame; return the message that it completes, if any.

        Raises:
            NoProgress: None came in time.
            StreamLost: The stream ended, or the frame is malformed.
        """
        try:
            complete = self._assembler.feed(self._stream.receive(patience_seconds))
        except convert.Malformed as error:
            self.close()
            raise StreamLost(f"{self.address}: malformed message: {error}") from error
        is_beat = complete is not None and complete[0].WhichOneof("body") == "waiting"
        (self.arrivals.beat if is_beat else self.arrivals.hear)(self._stream.arrived_at)
        return complete

    def close(self, grace_seconds: float = 1.0) -> None:
        """End the stream after what has been queued."""
        self._stream.close(grace_seconds)

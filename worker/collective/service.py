"""The Peer service of a worker: it receives parts of sums and queries for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.ops.types import Link
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto import versions
from thinwire.proto.framing import BytesLike, Malformed, MessageAssembler, frame, frames
from thinwire.proto.grpc import GrpcServer, ServerStream
from thinwire.proto.grpc.common import PEER_SERVICE
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits, MessageRate
from thinwire.proto.security.credentials import part_of_worker
from thinwire.runtime.run.credentials import Credentials
from thinwire.worker.collective.mailbox import Mailbox, PartName, RoundId

#: Number of streams that a Peer service admits in addition to one per worker. A peer that
#: reconnects may open a new stream before its old stream ends.
_SPARE_STREAMS = 16
#: Number of streams that a Peer service reserves for other addresses when one address has opened
#: its largest number of streams.
_STREAMS_OF_OTHERS = 64

#: Function that returns the reply to a peer's query: the message, and the pieces of the payload.
QueryHandler = Callable[[peers.ModelQuery], tuple[peers.Holding, Sequence[BytesLike]]]


class PeerServer:
    """The gRPC service to which the other workers send parts of sums and queries.

    Attributes:
        run_id: Id of the run; empty before shard 0 has answered this worker's Hello.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        answer: QueryHandler,
        max_part_bytes: int,
        link: Link | None = None,
        guard: ConnectionGuard | None = None,
    ) -> None:
        """Store the arguments of the Peer service, which `listen` starts.

        Args:
            mailbox: Store of the parts of sums that this worker has received.
            answer: Function that replies to queries for this worker's model, called in the threads
                of the streams.
            max_part_bytes: Largest accepted part of a sum, in bytes. The service refuses larger
                parts before it allocates memory.
            link: Emulated network link of this worker, which limits the rate of each stream; None
                for no limit.
            guard: Connection guard that limits and authenticates connections of peers; None to
                admit every peer.
        """
        self._guard = guard or ConnectionGuard()
        self._mailbox, self._answer, self._link = mailbox, answer, link
        self._max_part_bytes = max_part_bytes
        self._streams: list[ServerStream] = []
        # worker ids of the peers whose greetings were accepted, one for each stream
        self._authenticated: list[int] = []
        self._closed_bytes = self._closed_bytes_received = 0
        self._server: GrpcServer | None = None
        self.run_id = ""

    def listen(self, address: str, port: int) -> int:
        """Listen for connections of peers; return the port at which the service listens.

        Args:
            address: Address of this machine at which the service listens.
            port: TCP port at which the Peer service listens; 0 chooses a free port.

        Raises:
            thinwire.proto.grpc.PortInUse: Another process uses the port, or the address belongs to
                another machine.
        """
        self._server = GrpcServer(
            address, port, self._read, service=PEER_SERVICE, guard=self._guard
        )
        return self._server.port

    def close(self) -> None:
        """Stop the Peer service and end its streams."""
        if self._server is not None:
            self._server.stop()

    def has_stream_of(self, worker: int) -> bool:
        """Return True if a peer's stream is open, so that the peer's parts of sums can arrive."""
        return worker in self._authenticated

    @property
    def bytes_sent(self) -> int:
        """Total number of bytes of models that this service has sent to peers."""
        return self._closed_bytes + sum(stream.bytes_sent for stream in self._streams.copy())

    @property
    def bytes_received(self) -> int:
        """Total number of bytes that this service has received in parts of sums and queries."""
        received = sum(stream.bytes_received for stream in self._streams.copy())
        return self._closed_bytes_received + received

    def _read(self, stream: ServerStream) -> None:
        assembler = MessageAssembler(peers.ToPeer, lambda message: self._max_part_bytes)
        self._streams.append(stream)
        if self._link is not None:
            stream.pace(self._link, 1.0, 0)
        sender, rate = 0, MessageRate(self._guard.limits)
        try:
            for data in stream.incoming():
                if (beyond := rate.exceeded()) is not None:
                    self._guard.record_refusal("rate", stream.peer, beyond)
                    self._refuse(stream, pb.REASON_LIMIT, beyond)
                    break
                complete = assembler.feed(data)
                if complete is not None:
                    sender = self._handle(stream, sender, *complete)
        except Malformed as error:
            self._guard.record_refusal("malformed", stream.peer, f"malformed message: {error}")
        finally:
            self._streams.remove(stream)
            if sender:
                self._authenticated.remove(sender)
            self._closed_bytes += stream.bytes_sent
            self._closed_bytes_received += stream.bytes_received

    def _handle(
        self, stream: ServerStream, sender: int, message: peers.ToPeer, payload: memoryview
    ) -> int:
        """Process a peer's message; return the peer's worker id, or 0 before authentication."""
        body = message.WhichOneof("body")
        if (sender == 0) != (body == "greeting"):
            raise Malformed(
                f"a worker sent a message of kind {body}; expected exactly one greeting, first"
            )
        if body == "greeting":
            return self._greet(stream, message.greeting)
        if body == "part":
            part = message.part
            if len(payload) % 4:
                raise Malformed(
                    f"a worker's part has {len(payload)} bytes; expected a multiple of 4 (float32)"
                )
            name = PartName(RoundId(part.generation, part.round), part.view, sender, part.number)
            self._mailbox.put(name, payload)
        else:
            if stream.num_waiting >= self._guard.limits.waiting_replies:
                raise Malformed(f"a worker sent a query with {stream.num_waiting} replies unread")
            holding, pieces = self._answer(message.query)
            stream.send(frames(peers.FromPeer(holding=holding), pieces))
        return sender

    def _greet(self, stream: ServerStream, greeting: peers.Greeting) -> int:
        """Check a peer's greeting (its first message), and return the peer's worker id.

        Raises:
            Malformed: The Peer service refused the peer's greeting.
        """
        refusal = versions.difference(greeting.protocol_version, "the peer", "this worker")
        refusal = refusal or versions.unknown_fields(greeting, "the peer")
        part = part_of_worker(greeting.worker)
        claims = (part, greeting.run_id)
        # Check the protocol's version before the proof of the secret. With another version the
        # proof may fail too, and the refusal must name the version as the cause.
        if refusal is not None:
            reason = pb.REASON_PROTOCOL_VERSION
        elif stranger := self._guard.authenticate(stream, part, greeting.proof, claims):
            reason, refusal = stranger
        elif greeting.run_id != self.run_id:
            reason = pb.REASON_RUN if self.run_id else pb.REASON_STARTING
            refusal = f"run_id: this worker has {self.run_id!r}, the peer has {greeting.run_id!r}"
        elif not greeting.worker:
            reason, refusal = pb.REASON_ID_RANGE, "worker: expected an id from 1"
        elif full := self._guard.hello_received(stream):
            reason, refusal = pb.REASON_FULL, full[1]
            self._guard.record_refusal(full[0], stream.peer, refusal)
        if refusal is None:
            self._authenticated.append(greeting.worker)
            return greeting.worker
        self._refuse(stream, reason, refusal)
        raise Malformed(refusal)

    def _refuse(self, stream: ServerStream, reason: int, why: str) -> None:
        refusal = pb.Refusal(reason=reason, message=why)  # type: ignore[arg-type]
        message = peers.FromPeer(refusal=refusal)
        stream.send((frame(message),), counted=False)


def guard_of(credentials: Credentials, nb_workers: int) -> ConnectionGuard:
    """Return a Peer service's guard (connection limits), which admits all peers at one address."""
    per_address = nb_workers + _SPARE_STREAMS
    limits = Limits(streams=per_address + _STREAMS_OF_OTHERS, streams_per_address=per_address)
    return ConnectionGuard(credentials, limits)

"""Opens the gRPC streams from a worker to its peers (the other workers)."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.types import ConfigurationError
from thinwire.proto import messages
from thinwire.proto import peers_pb2 as peers
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.framing import Malformed, MessageAssembler, frame, frames
from thinwire.proto.grpc import ClientStream, NoProgress, StreamLost, Unreachable, is_loopback
from thinwire.proto.grpc.common import PEER_SERVICE
from thinwire.proto.security.credentials import UntrustedPeer, part_of_worker, server_name_of_worker
from thinwire.runtime.run.credentials import NO_CREDENTIALS, NOT_PROTECTED, Credentials, Protection
from thinwire.worker.collective.mailbox import CollectiveMember

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_DIAL_SECONDS = 2.0


class PeerLost(Exception):
    """Raised if a peer (another worker) cannot be reached, or the stream to it has broken."""


@dataclasses.dataclass
class _PeerConnection:
    """A worker's gRPC stream to one peer."""

    member: CollectiveMember
    stream: ClientStream
    assembler: MessageAssembler[peers.FromPeer]

    def receive(self, progress_seconds: float) -> tuple[peers.Holding, memoryview] | None:
        """Return the peer's next reply, or None if no byte arrives for `progress_seconds`.

        Raises:
            PeerLost: The stream to the peer has ended, or the peer refused it.
        """
        who = f"worker {self.member.worker} at {self.member.address}"
        try:
            while True:
                complete = self.assembler.feed(self.stream.receive(progress_seconds))
                if complete is None:
                    continue
                message, payload = complete
                if message.WhichOneof("body") == "holding":
                    return message.holding, payload
                raise PeerLost(f"{who} refused the stream: {message.refusal.message}")
        except NoProgress:
            return None
        except (StreamLost, Malformed) as error:
            raise PeerLost(f"{who}: {error}") from error


class Peers:
    """gRPC streams that this worker has opened to peers; only one thread may use a `Peers`."""

    def __init__(
        self,
        worker: int,
        sender: EmulatedSender | None,
        chunk_bytes: int,
        max_model_bytes: int,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """Store the arguments; the first message to a peer opens the gRPC stream to that peer.

        Args:
            worker: Id of this worker.
            sender: Emulated uplink of this worker; None if no link is emulated.
            chunk_bytes: Largest number of bytes of values in one message to a peer.
            max_model_bytes: Largest accepted size of a peer's weights and optimizer slots, in
                bytes.
            credentials: Credentials with which this worker connects to its peers.
        """
        self._credentials = credentials
        self._worker, self._sender, self._chunk_bytes = worker, sender, chunk_bytes
        self._max_model_bytes = max_model_bytes
        self._open: dict[CollectiveMember, _PeerConnection] = {}
        self._closed_bytes = self._closed_bytes_received = 0
        self.run_id = ""

    @property
    def bytes_sent(self) -> int:
        """Total number of training bytes that this worker has sent to its peers."""
        return self._closed_bytes + sum(c.stream.bytes_sent for c in self._open.copy().values())

    @property
    def bytes_received(self) -> int:
        """Total number of bytes received from peers in replies to queries, including models."""
        received = sum(c.stream.bytes_received for c in self._open.copy().values())
        return self._closed_bytes_received + received

    def send(self, member: CollectiveMember, part: peers.Part, values: Float32) -> None:
        """Queue a part of a sum for a peer; `values` must not change before the delivery.

        Args:
            member: Peer (another worker) to which the message is sent.
            part: Header of the message with a part of the sum: round, algorithm and number of the
                part.
            values: [k] float32 entries of the sum's buffer, which are the content of the part.

        Raises:
            PeerLost: The peer cannot be reached.
        """
        stream = self._to(member).stream
        message = peers.ToPeer(part=part)
        stream.send(frames(message, [values.data.cast("B")], self._chunk_bytes))

    def check(self) -> None:
        """Check that all open streams to peers work.

        Raises:
            PeerLost: The gRPC stream to a peer has broken.
        """
        for member, connection in list(self._open.items()):
            try:
                connection.receive(0.0)
            except PeerLost:
                self._drop(member)
                raise

    def query(
        self, member: CollectiveMember, query: peers.ModelQuery, timeout_seconds: float
    ) -> tuple[peers.Holding, memoryview]:
        """Return a peer's version, and the peer's model if the model has the queried version.

        Args:
            member: Peer (another worker) to which the message is sent.
            query: Query for the peer's model, with the version that this worker needs.
            timeout_seconds: Longest time without a byte from the peer, in seconds.

        Raises:
            PeerLost: The peer does not reply in time, or the stream to it has broken.
        """
        connection = self._to(member)
        connection.stream.send((frame(peers.ToPeer(query=query)),))
        try:
            reply = connection.receive(timeout_seconds)
        except PeerLost:
            self._drop(member)
            raise
        # Close the stream to a peer after a missing reply. Replies have no number, so a late reply
        # would be taken for the reply to the next query.
        if reply is None:
            self._drop(member)
            raise PeerLost(f"worker {member.worker} was silent for {timeout_seconds:g} s")
        return reply

    def forget(self, members: Sequence[CollectiveMember]) -> None:
        """Close the streams to peers that are not in `members`, the present members of the run."""
        for member in [member for member in self._open if member not in members]:
            self._drop(member)

    def close(self) -> None:
        """Send the queued messages to peers, for at most a second per stream; close all streams."""
        for member in list(self._open):
            self._drop(member, 1.0)

    def _to(self, member: CollectiveMember) -> _PeerConnection:
        if member not in self._open:
            self._open[member] = self._dial(member)
        return self._open[member]

    def _dial(self, member: CollectiveMember) -> _PeerConnection:
        stream = ClientStream(
            member.address,
            self._sender,
            service=PEER_SERVICE,
            credentials=self._credentials,
            server_name=server_name_of_worker(member.worker),
        )
        try:
            stream.open(_DIAL_SECONDS)
        except Unreachable as error:
            raise PeerLost(f"worker {member.worker} at {member.address} does not answer") from error
        except UntrustedPeer as error:
            raise PeerLost(f"worker {member.worker}: {error}") from error
        greeting = peers.Greeting(
            protocol_version=messages.PROTOCOL_VERSION, run_id=self.run_id, worker=self._worker
        )
        greeting.proof = stream.peer.prove((part_of_worker(self._worker), self.run_id))
        stream.send((frame(peers.ToPeer(greeting=greeting)),))
        most = self._max_model_bytes
        return _PeerConnection(
            member, stream, MessageAssembler(peers.FromPeer, lambda message: most)
        )

    def _drop(self, member: CollectiveMember, grace_seconds: float = 0.0) -> None:
        connection = self._open.pop(member)
        connection.stream.close(grace_seconds)
        self._closed_bytes += connection.stream.bytes_sent
        self._closed_bytes_received += connection.stream.bytes_received


def listening_address(
    shard_address: str, insecure: bool, protection: Protection = NOT_PROTECTED
) -> str:
    """Return this machine's address on the route to shard 0, for peers to connect to.

    The function `listening_address` finds the route by connecting a UDP socket, which sends no
    packet.

    Args:
        shard_address: Address host:port of shard 0.
        insecure: True if unprotected connections from other machines are allowed.
        protection: Protection (TLS, secret) of the connections between workers.

    Raises:
        ConfigurationError: Other machines could reach the address without protection, or there is
            no route to shard 0.
    """
    host, _, port = shard_address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port) or 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"--ip_PS or --ps_hosts: there is no route to {shard_address} ({error}), so a worker "
            "does not know the address at which others can reach it."
        ) from error
    if not (insecure or protection.authenticated or is_loopback(address)):
        raise ConfigurationError(
            f"with --collective a worker listens for other workers, here at {address}, but the "
            "connections are neither encrypted nor authenticated. Give certificates (--tls_cert, "
            "--tls_key, --tls_ca) or a token (--token_file), add --insecure if every machine that "
            "can reach this address is trusted, or set --collective=ps."
        )
    return address

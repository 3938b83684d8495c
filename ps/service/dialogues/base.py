"""Interface between the reader of a client's stream and the dialogues; refusals of a client."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from thinwire.ops.buffers import buffer
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed, frame
from thinwire.proto.grpc import ServerStream
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.containment import ClientRequest
from thinwire.ps.service.stream_state import ClientStreamState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.proto.security.connection_guard import ConnectionGuard
    from thinwire.ps.service.writer import ShardWriter

#: Limit on the characters of a refusal's message, which may quote a long message of a client, and
#: of an explanation that a client sends.
LONGEST_MESSAGE = 2000


class EndOfStream(Exception):
    """Raised by a dialogue to end its client's stream, after the dialogue has sent a refusal."""


def send_refusal(
    stream: ServerStream,
    reason: int,
    message: str,
    step: int = 0,
    phase: int = 0,
    retry_after_seconds: float = 0.0,
) -> None:
    """Send a client a refusal, which does not end the client's stream.

    Args:
        stream: Stream of the refused client.
        reason: Reason of the refusal, a `pb.Reason`.
        message: Explanation for people; cut at `LONGEST_MESSAGE` characters.
        step: Step of the refused push; 0 if the refused message was not a push.
        phase: Phase (number of the script's model) of the shard; only with REASON_PHASE.
        retry_after_seconds: Delay in seconds before the client's retry; 0 lets the client choose.
    """
    refusal: Any = pb.Refusal(
        reason=reason,  # type: ignore[arg-type]
        message=message[:LONGEST_MESSAGE],
        step=step,
        phase=phase,
        retry_after_seconds=retry_after_seconds,
    )
    stream.send((frame(pb.ToClient(refusal=refusal)),), counted=False)


class RemoteClient:
    """A client of a shard's network port, before and after its Hello.

    Attributes:
        stream: Stream of messages of the client.
        guard: Object that authenticates the port's clients and counts their refusals.
    """

    def __init__(self, stream: ServerStream, guard: ConnectionGuard) -> None:
        self.stream, self.guard = stream, guard

    def refuse(self, reason: int, message: str, step: int = 0, phase: int = 0) -> None:
        """Send the client a refusal that the guard does not count, as `send_refusal`."""
        send_refusal(self.stream, reason, message, step, phase)

    def reject(self, why: str, refusal: tuple[int, str]) -> NoReturn:
        """Send the client a refusal (reason, message), count it under the name `why`, and end the
        stream.

        Raises:
            EndOfStream: In every case.
        """
        self.refuse(*refusal)
        self.guard.record_refusal(why, self.stream.peer, refusal[1])
        raise EndOfStream


class Dialogue(abc.ABC):
    """Exchange of messages with one client, between two transitions of its stream's state.

    The thread that reads the client's stream calls all methods. A dialogue refers neither to its
    reader nor to its own bound methods: such a circle would keep the buffer of a half-received
    payload in memory after the end of the stream, until Python's garbage collector runs.

    Attributes:
        messages: Name of a message's body -> method that handles the message. The method is called
            with (dialogue, body, payload), and returns the size in bytes of the decoded data that
            it has queued in addition to the payload, or None.
    """

    messages: ClassVar[Mapping[str, Any]] = {}

    @property
    @abc.abstractmethod
    def state(self) -> ClientStreamState:
        """State of the client's stream."""

    @abc.abstractmethod
    def refusal_of(self, body: str) -> str:
        """Return why a message is malformed whose body is not in `messages`."""

    @abc.abstractmethod
    def on_frame(self, num_bytes: int) -> None:
        """Note that `num_bytes` bytes of the client have arrived, a message or a part of one.

        Raises:
            Malformed, EndOfStream: The client must not send a message now.
        """

    def payload_limit(self, message: pb.ToServer) -> int:
        """Return the largest legal payload of a message, in bytes; called before the payload's
        memory is allocated.

        Raises:
            Malformed, EndOfStream: The message must not have a payload.
        """
        raise Malformed("a message has a payload, but no payload is expected")

    def payload_memory(self, num_bytes: int) -> NDArray[Any]:
        """Return the memory of a payload, a [num_bytes] uint8 array."""
        return buffer(num_bytes)

    @abc.abstractmethod
    def end(self) -> None:
        """Note that the client's stream has ended; called once, after the last message."""


class Admission(Dialogue):
    """Dialogue before the client's Hello: decides which dialogue the Hello begins."""

    @property
    def state(self) -> ClientStreamState:
        """State of the client's stream."""
        return ClientStreamState.BEFORE_HELLO

    def on_frame(self, num_bytes: int) -> None:
        """Do nothing: the guard limits the time until the Hello."""

    def end(self) -> None:
        """Do nothing: the shard does not know the client yet."""

    @abc.abstractmethod
    def admit(self, hello: pb.Hello, client: RemoteClient) -> Dialogue:
        """Return the dialogue that the Hello of an authenticated client begins.

        Raises:
            EndOfStream: The Hello is refused; the client has got the refusal.
            Malformed: A value in the Hello is out of its bounds.
        """


class ConnectedDialogue(Dialogue):
    """Dialogue with a client whose Hello fits the shard's model.

    A dialogue refers to no part of the served model that holds weights, because the client's stream
    may last longer than the model.

    Attributes:
        connection: The client's connection, which the shard's writer thread uses, too.

    Args:
        client: The client, whose Hello fits the shard.
        hello: Hello message of the client.
        writer: Handler of the client's messages on the shard's writer thread.
    """

    def __init__(self, client: RemoteClient, hello: pb.Hello, writer: ShardWriter) -> None:
        self._client, self._hello = client, hello
        self._writer, self._shard = writer, writer.shard
        self.connection = Connection(client.stream, hello, hello.incarnation)
        self._largest_payload = writer.shard.served.largest_push

    @property
    def state(self) -> ClientStreamState:
        """State of the client's stream."""
        return self.connection.state

    @abc.abstractmethod
    def begin(self) -> None:
        """Register the client with the shard; called once, before the client's first message.

        Raises:
            EndOfStream: The client is refused; the client has got the refusal.
        """

    def refusal_of(self, body: str) -> str:
        """Return why a message is malformed whose body is not in `messages`."""
        return f"a {body} message is not allowed from a client of this role"

    def payload_limit(self, message: pb.ToServer) -> int:
        """Return the largest legal payload of every client's messages, in bytes."""
        return self._largest_payload

    def payload_memory(self, num_bytes: int) -> NDArray[Any]:
        """Return the memory of a payload, a [num_bytes] uint8 array."""
        return self._shard.payloads(num_bytes)

    def _serve(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Queue work for this client in the writer thread. If the work fails, `Containment` refuses
        only this client.
        """
        request = ClientRequest(self.connection, what, functools.partial(work, *arguments))
        self._shard.queue.put(request)

    def _heartbeat(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Do nothing: a frame of any message shows that the client is alive."""

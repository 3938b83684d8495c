"""Reader thread of one client's stream: joins frames, limits rates, passes messages to a dialogue.

A stream is in one dialogue at a time. An `Admission` is the dialogue before the client's Hello. The
reader makes the checks of a Hello that do not depend on the client's role. The admission then makes
the other checks, and chooses the dialogue for the rest of the stream. The module `stream_state`
lists the states of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto import versions
from thinwire.proto.framing import Arriving, Malformed, MessageAssembler
from thinwire.proto.grpc import ServerStream
from thinwire.proto.security.connection_guard import MessageRate
from thinwire.proto.security.credentials import claims_of, part_of
from thinwire.ps.service.backlog import Backlog
from thinwire.ps.service.dialogues.base import Admission, Dialogue, EndOfStream, RemoteClient
from thinwire.ps.service.handshake import REQUESTS, check_address, unanswered
from thinwire.ps.service.stream_state import ClientStreamState

if TYPE_CHECKING:
    from thinwire.proto.security.connection_guard import ConnectionGuard


class StreamReader:
    """Reader of one client's stream, which runs in a thread of its own.

    Invalid input from a client raises at most Malformed, which ends only that client's stream.

    Args:
        stream: Stream of messages of the client.
        guard: Object that authenticates the port's clients and limits their streams and messages.
        put: Function that queues a call for the thread that handles the stream's messages; the
            reader waits for the call while too many messages of the client are queued.
        admission: Dialogue before the client's Hello.
    """

    def __init__(
        self,
        stream: ServerStream,
        guard: ConnectionGuard,
        put: Callable[[Callable[[], None]], None],
        admission: Admission,
    ) -> None:
        self._stream, self._guard, self._admission = stream, guard, admission
        self._client = RemoteClient(stream, guard)
        self._rate = MessageRate(guard.limits)
        self._backlog = Backlog(put, lambda: stream.num_replies)
        self._begin(admission)

    @property
    def state(self) -> ClientStreamState:
        """State of the client's stream."""
        return self._dialogue.state

    def read(self) -> None:
        """Handle the frames of a client's stream until the stream ends; then end its dialogue."""
        try:
            for frame in self._stream.incoming():
                if not self.receive(frame):
                    return
        except Malformed as error:
            self._refuse_malformed(error)
        finally:
            self.forget()

    def receive(self, frame: bytes | Arriving) -> bool:
        """Process one received frame, or a part of a frame; return True if the client's stream
        continues.
        """
        try:
            self._take(frame)
            return True
        except EndOfStream:
            return False
        except Malformed as error:
            self._refuse_malformed(error)
            return False

    def forget(self) -> None:
        """End the stream's dialogue; called once, after the stream's last frame."""
        self._dialogue.end()

    def _refuse_malformed(self, error: Malformed) -> None:
        text = f"malformed message: {error}"
        self._client.refuse(pb.REASON_MALFORMED, text)
        self._guard.record_refusal("malformed", self._stream.peer, text)

    def _begin(self, dialogue: Dialogue) -> None:
        # No message is half received at a change of the dialogue, so a new assembler loses nothing.
        self._dialogue: Dialogue = dialogue
        self._assembler = MessageAssembler(
            pb.ToServer, dialogue.payload_limit, dialogue.payload_memory
        )

    def _take(self, frame: bytes | Arriving) -> None:
        if isinstance(frame, bytes) and (beyond := self._rate.exceeded()) is not None:
            self._client.reject("rate", (pb.REASON_LIMIT, beyond))
        self._backlog.wait(lambda: self._stream.lost)
        complete = self._assembler.feed(frame)
        dialogue = self._dialogue
        dialogue.on_frame(len(frame))
        if complete is None:
            return
        message, payload = complete
        body = message.WhichOneof("body") or ""
        if (beyond := unanswered(body, self._stream, self._guard.limits)) is not None:
            self._client.reject("unanswered", (pb.REASON_LIMIT, beyond))
        content: Any = getattr(message, body)
        handler = dialogue.messages.get(body)
        if handler is not None:
            num_decoded = handler(dialogue, content, payload) or 0
        elif body == "hello" and dialogue.state is ClientStreamState.BEFORE_HELLO:
            self._begin(self._admit(content))
            num_decoded = 0
        else:
            raise Malformed(dialogue.refusal_of(body))
        is_request = body in REQUESTS and not getattr(content, "more", False)
        self._backlog.add(len(frame) + len(payload) + num_decoded, is_request)

    def _admit(self, hello: pb.Hello) -> Dialogue:
        """Authenticate the client, and return the dialogue that its Hello begins."""
        client = self._client
        # Check the protocol version before the client's proof: another version may compute the
        # proof differently.
        if (other_version := versions.refusal(hello)) is not None:
            client.reject("hello", other_version)
        stranger = self._guard.authenticate(
            self._stream, part_of(hello), hello.proof, claims_of(hello)
        )
        if stranger is not None:
            client.refuse(*stranger)
            raise EndOfStream
        check_address(hello.peer_address)
        return self._admission.admit(hello, client)

"""One stream's reader thread: introductions, validation, decoding, queueing."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from ops.types import Link
from proto import convert
from proto import thinwire_pb2 as pb
from proto.channel_grpc import ServerStream
from proto.session import payload_limit
from ps import events
from ps.connections import Connection
from ps.handshake import judge
from ps.pushes import NonFinite, PushDecoder

if TYPE_CHECKING:
    from ps.server import ShardServer

#: A longer metrics document is not believed.
_MAX_DOCUMENT_BYTES = 256 << 10


class _Bye(Exception):
    """The stream is to be ended."""


class StreamReader:
    """Reads one stream to its end."""

    def __init__(self, server: ShardServer, decoder: PushDecoder, stream: ServerStream) -> None:
        """Read `stream` for `server`."""
        self.server, self.decoder, self.stream = server, decoder, stream
        self.connection: Connection | None = None
        self.number = 0  # of an observer
        limit = payload_limit(server.layout)
        self.assembler = convert.Assembler(pb.ToServer, lambda message: limit)

    def read(self) -> None:
        """Handle frames until the stream ends; then say that it is lost."""
        try:
            for frame in self.stream.incoming():
                self._take(frame)
        except _Bye:
            pass
        except convert.Malformed as error:
            self._complain(pb.REASON_MALFORMED, f"malformed message: {error}")
            logging.warning("%s: malformed message: %s", self.stream.peer, error)
        finally:
            self._forget()

    def _take(self, frame: bytes) -> None:
        complete = self.assembler.feed(frame)
        connection = self.connection
        if connection is not None and connection.role == pb.ROLE_WORKER:
            self.server.queue.put(events.Alive(connection.id))
        if complete is None:
            return
        message, payload = complete
        body = message.WhichOneof("body")
        if connection is None and body != "hello":
            raise convert.Malformed(f"{body} before hello")
        handler = self._handlers.get((connection.role if connection else 0, body))
        if handler is None:
            raise convert.Malformed(f"a {body} message is not allowed here")
        handler(self, getattr(message, str(body)), payload)

    # -- hello ------------------------------------------------------------------------------

    def _hello(self, hello: pb.Hello, payload: memoryview) -> None:
        del payload
        mine = self.server.identity
        if mine is None:
            self._complain(pb.REASON_STARTING, "this PS has not reached shard 0 yet; try again.")
            raise _Bye
        refusal = judge(hello, mine)
        if refusal is not None:
            self._complain(*refusal)
            logging.warning("refused %s: %s", self.stream.peer, refusal[1])
            raise _Bye
        if hello.role == pb.ROLE_WORKER:
            self._meet_worker(hello)
        else:
            self.connection = Connection(self.stream, hello, 0)
            self.number = self.server.connections.add_observer(self.connection)
            self.server.welcome_observer(self.connection)

    def _meet_worker(self, hello: pb.Hello) -> None:
        incarnation = hello.incarnation or secrets.randbits(63) + 1
        self.connection = Connection(self.stream, hello, incarnation)
        link = Link(hello.link.mbps, hello.link.delay_ms, hello.link.loss)
        if not (link.mbps >= 0 and link.delay_ms >= 0 and 0 <= link.loss < 1):
            raise convert.Malformed(f"link {link}: expected mbps >= 0, delay >= 0, 0 <= loss < 1")
        self.stream.pace(link, self.server.share, hello.link.seed + self.server.identity_shard)
        self.server.expect(incarnation, self.connection)
        self.server.queue.put(
            events.Join(hello.id, incarnation, bool(hello.incarnation), self.stream.peer)
        )

    # -- workers ----------------------------------------------------------------------------

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        del payload
        base = pull.base_version if pull.has_base else None
        self.server.queue.put(
            events.Pull(self._worker.id, self._worker.incarnation, base, pull.generation)
        )

    def _push(self, push: pb.Push, payload: memoryview) -> None:
        try:
            event = self.decoder.decode(self._worker.id, push, payload)
        except NonFinite as error:
            self.server.queue.put(events.Refused(self._worker.id, "non_finite"))
            self._complain(pb.REASON_NON_FINITE, str(error), push.step)
            return
        except convert.Malformed as error:
            self.server.queue.put(events.Refused(self._worker.id, "malformed"))
            self._complain(pb.REASON_MALFORMED, f"push of step {push.step}: {error}", push.step)
            return
        self.server.queue.put(event)

    def _heartbeat(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Being heard is all there is to it."""

    def _leave(self, leave: pb.Leave, payload: memoryview) -> None:
        del payload
        worker = self._worker
        worker.left = True
        self.server.queue.put(events.Leave(worker.id, worker.incarnation, leave.cause))

    def _observer_leaves(self, leave: pb.Leave, payload: memoryview) -> None:
        del leave, payload
        self._worker.left = True

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        del payload
        if len(report.document) > _MAX_DOCUMENT_BYTES:
            raise convert.Malformed(f"a report of {len(report.document)} characters")
        self.server.reports[(self._worker.role, self._worker.id)] = report.document

    # -- observers --------------------------------------------------------------------------

    def _observe(self, pull: pb.Pull, payload: memoryview) -> None:
        del pull, payload
        self.server.queue.put(events.Observe(self.number))

    def _halt(self, halt: pb.Halt, payload: memoryview) -> None:
        del payload
        self.server.queue.put(events.Stop(halt.cause or "interrupted"))

    @property
    def _worker(self) -> Connection:
        if self.connection is None:
            raise convert.Malformed("nobody has said hello")
        return self.connection

    def _complain(self, reason: int, message: str, step: int = 0) -> None:
        refusal = pb.Refusal(reason=reason, message=message, step=step)  # type: ignore[arg-type]
        self.stream.send((convert.frame(pb.ToClient(refusal=refusal)),), counted=False)

    def _forget(self) -> None:
        connection = self.connection
        if connection is None:
            return
        if connection.role != pb.ROLE_WORKER:
            self.server.connections.drop_observer(self.number)
            return
        if self.server.connections.drop_worker(connection):
            self.server.queue.put(events.Lost(connection.id, connection.incarnation))

    _handlers: ClassVar[dict[tuple[int, str], Any]] = {
        (0, "hello"): _hello,
        (pb.ROLE_WORKER, "pull"): _pull,
        (pb.ROLE_WORKER, "push"): _push,
        (pb.ROLE_WORKER, "heartbeat"): _heartbeat,
        (pb.ROLE_WORKER, "leave"): _leave,
        (pb.ROLE_WORKER, "report"): _report,
        (pb.ROLE_SUPERVISOR, "pull"): _observe,
        (pb.ROLE_SUPERVISOR, "halt"): _halt,
        (pb.ROLE_SUPERVISOR, "heartbeat"): _heartbeat,
        (pb.ROLE_SUPERVISOR, "leave"): _observer_leaves,
        (pb.ROLE_SUPERVISOR, "report"): _report,
        (pb.ROLE_SHARD, "heartbeat"): _heartbeat,
        (pb.ROLE_SHARD, "report"): _report,
        (pb.ROLE_SHARD, "leave"): _observer_leaves,
    }

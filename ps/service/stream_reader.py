"""One stream's reader thread: introductions, validation, decoding, queueing."""

from __future__ import annotations

import functools
import secrets
import time
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.proto import framing, versions
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed, MessageAssembler
from thinwire.proto.grpc import ServerStream
from thinwire.proto.grpc.session import payload_limit
from thinwire.proto.security.connection_guard import MessageRate
from thinwire.proto.security.credentials import claims_of, part_of
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.handshake import checked_link, judge, unanswered
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder

if TYPE_CHECKING:
    from thinwire.ps.service.server import ShardServer

#: A longer metrics document is not believed.
_MAX_DOCUMENT_BYTES = 256 << 10
#: A refusal quotes what the client said; that may be long.
_LONGEST_COMPLAINT = 2000
_RENEWALS_PER_LEASE = 10
#: What a supervisor may end a run for.
_HALT_CAUSES = ("iter_max", "epochs", "max_seconds", "target_accuracy", "interrupted", "diverged")
_SHARD_HALT_CAUSES = (STOP_REASON,)


class _Bye(Exception):
    """The stream is to be ended."""


class StreamReader:
    """Reads one stream to its end.

    Nothing that a client sends raises more than Malformed, which ends its stream, and nothing is
    taken in the name of a worker before the core has welcomed this stream as the worker's, or
    after another stream has taken its place.
    """

    def __init__(self, server: ShardServer, decoder: PushDecoder, stream: ServerStream) -> None:
        """Read `stream` for `server`."""
        self.server, self.decoder, self.stream = server, decoder, stream
        self.connection: Connection | None = None
        self.number = 0  # of an observer
        self.rate = MessageRate(server.guard.limits)
        self._renewed_at = 0.0
        limit = payload_limit(server.layout, server.core.averages.size)
        self.assembler = MessageAssembler(pb.ToServer, lambda message: limit)

    def read(self) -> None:
        """Handle frames until the stream ends; then say that it is lost."""
        try:
            for frame in self.stream.incoming():
                if not self.hear(frame):
                    return
        finally:
            self.forget()

    def hear(self, frame: bytes) -> bool:
        """Handle one frame; return whether more are wanted."""
        try:
            self._take(frame)
            return True
        except _Bye:
            return False
        except Malformed as error:
            text = f"malformed message: {error}"
            self._complain(pb.REASON_MALFORMED, text)
            self.server.guard.record_refusal("malformed", self.stream.peer, text)
            return False

    def _take(self, frame: bytes) -> None:
        if (beyond := self.rate.exceeded()) is not None:
            self._turn_away("rate", (pb.REASON_LIMIT, beyond))
        complete = self.assembler.feed(frame)
        connection = self.connection
        if connection is not None and connection.role == pb.ROLE_WORKER:
            self._check_current(connection)
            self._renew_lease(connection)
        if complete is None:
            return
        message, payload = complete
        body = message.WhichOneof("body")
        if (beyond := unanswered(body, self.stream, self.server.guard.limits)) is not None:
            self._turn_away("unanswered", (pb.REASON_LIMIT, beyond))
        if connection is None and body != "hello":
            raise Malformed(f"{body} before hello")
        handler = self._handlers.get((connection.role if connection else 0, body))
        if handler is None:
            raise Malformed(f"a {body} message is not allowed here")
        handler(self, getattr(message, str(body)), payload)

    # -- hello ------------------------------------------------------------------------------

    def _hello(self, hello: pb.Hello, payload: memoryview) -> None:
        del payload
        mine, guard = self.server.identity, self.server.guard
        if (other := versions.refusal(hello)) is not None:  # its proof may be another one, too
            self._turn_away("hello", other)
        stranger = guard.authenticate(self.stream, part_of(hello), hello.proof, claims_of(hello))
        if stranger is not None:
            self._complain(*stranger)
            raise _Bye
        if mine is None:
            self._complain(pb.REASON_STARTING, "this PS is not ready yet; try again.")
            raise _Bye
        refusal = judge(hello, mine)
        if refusal is not None:
            self._turn_away("hello", refusal)
        guard.hello_received(self.stream)
        if hello.role == pb.ROLE_WORKER:
            self._meet_worker(hello, mine.shard)
        else:
            checked_link(hello.link)
            self.connection = Connection(self.stream, hello, 0)
            self.number = self.server.connections.add_observer(self.connection)
            self.server.welcome_observer(self.connection)

    def _meet_worker(self, hello: pb.Hello, shard: int) -> None:
        link = checked_link(hello.link)
        incarnation = hello.incarnation or secrets.randbits(63) + 1
        self.connection = Connection(self.stream, hello, incarnation)
        self.stream.pace(link, self.server.share, hello.link.seed + shard)
        self.server.expect(incarnation, self.connection)
        self.server.queue.put(
            events.Join(
                hello.id, incarnation, bool(hello.incarnation), self.stream.peer, hello.epoch
            )
        )

    # -- workers ----------------------------------------------------------------------------

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        del payload
        self.server.bounds.check_pull(pull)
        base = pull.base_version if pull.has_base else None
        self.server.queue.put(
            events.Pull(self._worker.id, self._worker.incarnation, base, pull.generation)
        )

    def _push(self, push: pb.Push, payload: memoryview) -> None:
        worker, beside = self._worker.id, self.server.datagrams
        try:
            if beside is None:
                self.server.queue.put(self.decoder.decode(worker, push, payload))
            else:
                beside.receiver.on_push(worker, push, payload)
        except NonFinite as error:
            self.server.queue.put(events.PushRejected(worker, "non_finite"))
            self._complain(pb.REASON_NON_FINITE, str(error), push.step)
        except Malformed as error:
            self.server.queue.put(events.PushRejected(worker, "malformed"))
            self._complain(pb.REASON_MALFORMED, f"push of step {push.step}: {error}", push.step)

    def _datagrams(self, datagrams: pb.Datagrams, payload: memoryview) -> None:
        del payload
        beside = self.server.datagrams
        if beside is None or not datagrams.size:
            raise Malformed("datagrams in a run without, or of no size")
        beside.receiver.receive_from_stream(memoryview(datagrams.data), datagrams.size)

    def _query(self, query: pb.Query, payload: memoryview) -> None:
        del payload
        self.server.bounds.check_query(query)
        seconds = (query.step_seconds, query.age_seconds, query.query_seconds)
        worker = self._worker
        self.server.queue.put(
            events.Query(worker.id, query.incarnation, query.step, query.local_steps, *seconds)
        )

    def _heartbeat(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Being heard is all there is to it."""

    def _shard_lives(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Hear whom a following shard misses."""
        del payload
        for member in heartbeat.unreachable:
            life = events.WorkerIncarnation(member.worker, member.incarnation)
            self.server.queue.put(events.WorkerUnreachable(life))

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
            raise Malformed(f"a report of {len(report.document)} characters")
        if report.rounds:
            self._take_rounds(report.rounds)
        elif self._worker.role != pb.ROLE_SUPERVISOR:
            self.server.reports[(self._worker.role, self._worker.id)] = report.document

    def _take_rounds(self, batch: str) -> None:
        if self._worker.role != pb.ROLE_WORKER:
            raise Malformed("rounds of a client that is no worker")
        if len(batch) > _MAX_DOCUMENT_BYTES:
            raise Malformed(f"rounds of {len(batch)} characters")
        pass_on = self.server.observers.pass_on_rounds
        self.server.queue.put(functools.partial(pass_on, self._worker.id, batch))

    # -- observers --------------------------------------------------------------------------

    def _observe(self, pull: pb.Pull, payload: memoryview) -> None:
        del pull, payload
        self.server.queue.put(events.EvaluationPull(self.number))

    def _halt(self, halt: pb.Halt, payload: memoryview) -> None:
        del payload
        known = _SHARD_HALT_CAUSES if self._worker.role == pb.ROLE_SHARD else _HALT_CAUSES
        if halt.cause not in known:
            raise Malformed(f"halt for {halt.cause!r:.80}; known: {known}")
        self.server.queue.put(events.Stop(halt.cause))

    @property
    def _worker(self) -> Connection:
        if self.connection is None:
            raise Malformed("nobody has said hello")
        return self.connection

    def _check_current(self, connection: Connection) -> None:
        """Let a worker speak on the one stream that is its own."""
        if not connection.welcomed:
            raise Malformed("a message before the hello was welcomed")
        if self.server.connections.workers.get(connection.id) is not connection:
            self.server.guard.count_refusal("replaced")
            raise _Bye

    def _renew_lease(self, connection: Connection) -> None:
        """Any chunk renews the lease, but the writer thread need not be woken for each."""
        now = time.monotonic()
        if now - self._renewed_at >= self.server.lease_seconds / _RENEWALS_PER_LEASE:
            self._renewed_at = now
            self.server.queue.put(events.WorkerAlive(connection.id))

    def _complain(self, reason: int, message: str, step: int = 0) -> None:
        message = message[:_LONGEST_COMPLAINT]
        refusal = pb.Refusal(reason=reason, message=message, step=step)  # type: ignore[arg-type]
        self.stream.send((framing.frame(pb.ToClient(refusal=refusal)),), counted=False)

    def _turn_away(self, why: str, refusal: tuple[int, str]) -> None:
        """End the stream; `why` is the name under which it is counted."""
        self._complain(*refusal)
        self.server.guard.record_refusal(why, self.stream.peer, refusal[1])
        raise _Bye

    def forget(self) -> None:
        """Say that the stream has ended; once, after the last frame."""
        connection = self.connection
        if connection is None:
            return
        if connection.role != pb.ROLE_WORKER:
            self.server.connections.drop_observer(self.number)
            return
        self.server.lose(connection)

    _handlers: ClassVar[dict[tuple[int, str], Any]] = {
        (0, "hello"): _hello,
        (pb.ROLE_WORKER, "pull"): _pull,
        (pb.ROLE_WORKER, "push"): _push,
        (pb.ROLE_WORKER, "datagrams"): _datagrams,
        (pb.ROLE_WORKER, "query"): _query,
        (pb.ROLE_WORKER, "heartbeat"): _heartbeat,
        (pb.ROLE_WORKER, "leave"): _leave,
        (pb.ROLE_WORKER, "report"): _report,
        (pb.ROLE_SUPERVISOR, "pull"): _observe,
        (pb.ROLE_SUPERVISOR, "halt"): _halt,
        (pb.ROLE_SUPERVISOR, "heartbeat"): _heartbeat,
        (pb.ROLE_SUPERVISOR, "leave"): _observer_leaves,
        (pb.ROLE_SUPERVISOR, "report"): _report,
        (pb.ROLE_SHARD, "heartbeat"): _shard_lives,
        (pb.ROLE_SHARD, "halt"): _halt,
        (pb.ROLE_SHARD, "report"): _report,
        (pb.ROLE_SHARD, "leave"): _observer_leaves,
    }

"""Reader thread of one client's stream: checks the Hello message, decodes and queues messages."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from thinwire.ops.printable import printable
from thinwire.proto import framing, versions
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Arriving, Malformed, MessageAssembler
from thinwire.proto.grpc import ServerStream
from thinwire.proto.grpc.session import payload_limit
from thinwire.proto.security.connection_guard import MessageRate
from thinwire.proto.security.credentials import claims_of, part_of
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.scripts.barriers import BarrierArrival
from thinwire.ps.service.backlog import Backlog
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.containment import ClientRequest, WriterQueue
from thinwire.ps.service.handshake import (
    REQUESTS,
    Identity,
    check_hello,
    checked_link,
    program_of,
    unanswered,
)
from thinwire.ps.wire import reports
from thinwire.ps.wire.claims import MOST_COUNTED
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.runtime.run.settings import LIMIT_REASONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import ShardLayout
    from thinwire.proto.moved import ShardDirectory
    from thinwire.proto.security.connection_guard import ConnectionGuard
    from thinwire.ps.datagrams.port import DatagramPort
    from thinwire.ps.programs import Programs
    from thinwire.ps.scripts.run_control import RunControl
    from thinwire.ps.service.connections import Connections, Observers
    from thinwire.ps.wire.claims import ClaimBounds

#: Size limit of the metrics document that a node sends, in bytes; a longer document is malformed.
MAX_DOCUMENT_BYTES = 256 << 10
#: Limit on the characters of a refusal's message, which may quote a long message of a client.
_LONGEST_MESSAGE = 2000
_RENEWALS_PER_LEASE = 10
#: Limits on the number of barriers in one message of a script, and on the length of a barrier's
#: name in characters.
_MOST_BARRIERS, _LONGEST_BARRIER = 20_000, 100
#: Upper limit for the numbers of calls of fit and of epochs in a script's messages.
_MOST_COUNTED = 1 << 31
#: Limits on the number of metrics and values of one evaluation, and on the characters of the
#: training history of one call of fit.
_MOST_METRICS, _MOST_VALUES, _LONGEST_HISTORY = 1000, 100_000, 900_000
#: Bytes of one value (float64) of a metric's state.
_STATE_BYTES = 8
#: Size limit, in bytes, of a message that the shard relays to other clients. The relayed message
#: must fit into a message of the maximum size together with a few additional bytes.
_MOST_RELAYED_BYTES = framing.MAX_MESSAGE_BYTES - 1024
#: Limits on the characters of a node's address, of the cause in a Leave message, and of a metric's
#: name. The names of a metric's entries may be slightly longer than the metric's name.
_LONGEST_ADDRESS, _LONGEST_CAUSE, _LONGEST_METRIC = 300, 100, 900
#: Causes that a supervisor's request to end the run may name.
_HALT_CAUSES = (*LIMIT_REASONS, "interrupted", "diverged")
_SHARD_HALT_CAUSES = (STOP_REASON,)


class _EndOfStream(Exception):
    """Raised inside the module `stream_reader` to end a client's stream."""


class OfferingStream(Protocol):
    """Reader of the stream of a worker that offers a model or waits for another worker's offer."""

    def admit(self, hello: pb.Hello) -> bool:
        """Process the Hello message of an authenticated worker; return True to continue reading its
        stream.
        """

    def receive(self, data: bytes | Arriving) -> bool:
        """Process one received frame of a client's stream; return True to continue reading the
        stream.
        """

    def forget(self) -> None:
        """Record that the stream of an offering worker has ended."""


class PhaseGate(Protocol):
    """Interface through which a stream reader passes on workers that have the script's next
    model.
    """

    def reader(self, phase: int, stream: ServerStream) -> OfferingStream | None:
        """Return a reader for the stream of a worker whose script already has its next model.

        `reader` returns None if the scripts have not agreed on the worker's model yet.
        """

    def tick(self) -> None:
        """Send heartbeats to waiting workers; make workers that wait too long retry (called on the
        writer thread).
        """


class StreamOwner(Protocol):
    """Interface through which the reader of a client's stream uses the shard's server.

    Attributes:
        reports: (role, id) of a node -> newest JSON document that the node sent.
        payloads: Function that returns an array for a payload of the given number of bytes.
    """

    reports: dict[tuple[int, int], str]
    payloads: Callable[[int], NDArray[Any]]

    @property
    def guard(self) -> ConnectionGuard:
        """Object that authenticates clients and limits their streams and messages."""

    @property
    def identity(self) -> Identity | None:
        """Identity of the shard (settings and model); None before the shard can accept a client's
        Hello.
        """

    @property
    def layout(self) -> ShardLayout:
        """Layout of the shard: the slices of variables that it holds."""

    @property
    def share(self) -> float:
        """Fraction of the model's values that the shard holds (0 to 1), for emulated links."""

    @property
    def lease_seconds(self) -> float:
        """Time in seconds without a message of a worker, after which the shard expels the
        worker.
        """

    @property
    def bounds(self) -> ClaimBounds:
        """Limits of the numbers that workers may report in messages, for example batch sizes."""

    @property
    def queue(self) -> WriterQueue:
        """Queue of events and calls for the shard's writer thread."""

    @property
    def datagrams(self) -> DatagramPort | None:
        """Port of the shard that receives UDP datagrams; None if the training method sends no
        datagrams.
        """

    @property
    def connections(self) -> Connections:
        """All open client connections of the PS shard."""

    @property
    def observers(self) -> Observers:
        """Object that sends status reports to supervisors, and membership epochs to other
        shards.
        """

    @property
    def directory(self) -> ShardDirectory:
        """Network addresses of the other shards of the run."""

    @property
    def programs(self) -> Programs:
        """Program (script and versions) of each worker of the run."""

    @property
    def version(self) -> int:
        """Number of updates that the shard has applied so far."""

    @property
    def phases(self) -> PhaseGate | None:
        """Object that accepts the script's next model from workers; None if the model cannot
        change.
        """

    def expect(self, incarnation: int, connection: Connection) -> None:
        """Store the stream of a worker's Hello until the shard's state machine admits or rejects
        the worker.
        """

    def lose(self, connection: Connection) -> None:
        """Record that a worker's stream to the shard has ended."""

    @property
    def scripts(self) -> RunControl:
        """The control streams between the shard and the workers' scripts."""

    def welcome_observer(self, connection: Connection) -> None:
        """Admit a supervisor, an evaluator or another shard as an observer of this shard."""

    def observe(self, connection: Connection, number: int) -> None:
        """Send an observer the whole model, or an evaluator the model that it evaluates (called on
        the writer thread).
        """

    def welcome_script(self, connection: Connection) -> None:
        """Admit the control stream of a worker's script (called on the writer thread)."""

    def send_slots(self, connection: Connection, weights: bool) -> None:
        """Send a worker's script the optimizer's state and, if `weights` is True, the weights."""


class StreamReader:
    """Reader of one client's stream, which runs in a thread of its own.

    Invalid input from a client raises at most Malformed, which ends only that client's stream.
    `StreamReader` accepts a worker's messages only after the shard has admitted the worker on the
    stream, and only until a newer stream of the worker replaces the stream.
    """

    def __init__(self, server: StreamOwner, decoder: PushDecoder, stream: ServerStream) -> None:
        """Prepare to read a client's `stream` for the shard's `server`."""
        self.server, self.decoder, self.stream = server, decoder, stream
        self.connection: Connection | None = None
        # Running number of the observer (such as a supervisor) in `Connections`; 0 for a worker.
        self.number = 0
        self._offers: OfferingStream | None = None
        self.rate = MessageRate(server.guard.limits)
        self._renewed_at = 0.0
        self._backlog = Backlog(server.queue.put, lambda: stream.num_replies)
        limit = payload_limit(server.layout, decoder.aux_count)
        if server.bounds.takes_changes:
            limit += payload_limit(server.layout)
        self.assembler = MessageAssembler(pb.ToServer, lambda message: limit, server.payloads)

    def read(self) -> None:
        """Handle the frames of a client's stream until the stream ends; then notify the server."""
        try:
            for frame in self.stream.incoming():
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
        if self._offers is not None:
            return self._offers.receive(frame)
        try:
            self._take(frame)
            return True
        except _EndOfStream:
            return False
        except Malformed as error:
            self._refuse_malformed(error)
            return False

    def _refuse_malformed(self, error: Malformed) -> None:
        text = f"malformed message: {error}"
        self._refuse(pb.REASON_MALFORMED, text)
        self.server.guard.record_refusal("malformed", self.stream.peer, text)

    def _take(self, frame: bytes | Arriving) -> None:
        if isinstance(frame, bytes) and (beyond := self.rate.exceeded()) is not None:
            self._reject_stream("rate", (pb.REASON_LIMIT, beyond))
        self._backlog.wait(lambda: self.stream.lost)
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
            self._reject_stream("unanswered", (pb.REASON_LIMIT, beyond))
        if connection is None and body != "hello":
            raise Malformed(f"{body} before hello")
        handler = self._handlers.get((connection.role if connection else 0, body))
        if handler is None:
            raise Malformed(f"a {body} message is not allowed from a client of this role")
        content: Any = getattr(message, str(body))
        num_decoded = handler(self, content, payload) or 0
        is_request = body in REQUESTS and not getattr(content, "more", False)
        self._backlog.add(len(frame) + len(payload) + num_decoded, is_request)

    # -- Hello messages ---------------------------------------------------------------------

    def _hello(self, hello: pb.Hello, payload: memoryview) -> None:
        identity, guard = self.server.identity, self.server.guard
        # Check the protocol version before the client's proof: another version may compute the
        # proof differently.
        if (other_version := versions.refusal(hello)) is not None:
            self._reject_stream("hello", other_version)
        stranger = guard.authenticate(self.stream, part_of(hello), hello.proof, claims_of(hello))
        if stranger is not None:
            self._refuse(*stranger)
            raise _EndOfStream
        check_address(hello.peer_address)
        if identity is None:
            self._refuse(pb.REASON_STARTING, "this PS is not ready yet; try again.")
            raise _EndOfStream
        if hello.role == pb.ROLE_WORKER and hello.phase > identity.phase and self.server.phases:
            self._offer(hello, self.server.phases)
            return
        refusal = self._other_program(hello) or check_hello(hello, identity)
        # A worker whose script is behind the run's phase (model) does not count as an error,
        # because the worker retries at a later call of fit.
        if refusal is not None and refusal[0] == pb.REASON_PHASE:
            self._refuse(*refusal)
            raise _EndOfStream
        if refusal is not None:
            self._reject_stream("hello", refusal)
        if (full := guard.hello_received(self.stream)) is not None:
            self._reject_stream(full[0], (pb.REASON_FULL, full[1]))
        if hello.role == pb.ROLE_WORKER:
            self._join_worker(hello, identity.shard)
        elif hello.role == pb.ROLE_SCRIPT:
            self._begin_script(hello)
        else:
            checked_link(hello.link)
            self._announce(hello)
            is_evaluator = hello.role == pb.ROLE_EVALUATOR
            incarnation = hello.incarnation if is_evaluator else 0
            self.connection = Connection(self.stream, hello, incarnation)
            self.number = self.server.connections.add_observer(self.connection)
            self.server.welcome_observer(self.connection)

    def _other_program(self, hello: pb.Hello) -> tuple[int, str] | None:
        """Return the refusal of a worker whose program (script) has changed; else None."""
        identity, programs = self.server.identity, self.server.programs
        is_of_run = identity is not None and hello.run_id in ("", identity.run_id)
        if hello.role != pb.ROLE_WORKER or not is_of_run:
            return None
        text = programs.refusal_of(hello.id, program_of(hello), self.server.version)
        return None if text is None else (pb.REASON_OTHER_PROGRAM, text)

    def _offer(self, hello: pb.Hello, phases: PhaseGate) -> None:
        """Pass the stream of a worker with the script's next model to the reader that accepts this
        model.
        """
        offers = phases.reader(hello.phase, self.stream)
        if offers is None:
            self._refuse(
                pb.REASON_STARTING, "the scripts have not agreed on this phase; try again."
            )
            raise _EndOfStream
        if not offers.admit(hello):
            raise _EndOfStream
        self._offers = offers

    def _announce(self, hello: pb.Hello) -> None:
        """Record the network address of a shard with id 1 or higher that has its model."""
        if hello.role == pb.ROLE_SHARD and hello.model:
            directory = self.server.directory
            conflict = directory.announce(hello.id, hello.generation, hello.peer_address)
            if conflict is not None:
                self._reject_stream("hello", (pb.REASON_ID_TAKEN, conflict))

    def _join_worker(self, hello: pb.Hello, shard: int) -> None:
        if self.server.scripts.is_worker(hello.id):
            self.server.programs.record(hello.id, program_of(hello))
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

    def _begin_script(self, hello: pb.Hello) -> None:
        scripts = self.server.scripts
        if not scripts.is_worker(hello.id):
            self._reject_stream("hello", (pb.REASON_ID_RANGE, scripts.range_refusal(hello.id)))
        self.connection = Connection(self.stream, hello, hello.incarnation)
        self.number = self.server.connections.add_observer(self.connection)
        self._serve("a Hello", self.server.welcome_script, self.connection)

    # -- messages of workers ----------------------------------------------------------------

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self.server.bounds.check_pull(pull)
        base = pull.base_version if pull.has_base else None
        self.server.queue.put(
            events.Pull(self._worker.id, self._worker.incarnation, base, pull.generation)
        )

    def _push(self, push: pb.Push, payload: memoryview) -> int:
        """Decode and queue a worker's push; return the size of the decoded data in addition to the
        payload.
        """
        worker, port = self._worker.id, self.server.datagrams
        try:
            if port is None:
                event = self.decoder.decode(worker, push, payload)
                self.server.queue.put(event)
                return event.num_decoded_bytes
            port.receiver.on_push(worker, push, payload)
        except NonFinite as error:
            self.server.queue.put(events.PushRejected(worker, "non_finite"))
            self._refuse(pb.REASON_NON_FINITE, str(error), push.step)
        except Malformed as error:
            self.server.queue.put(events.PushRejected(worker, "malformed"))
            self._refuse(pb.REASON_MALFORMED, f"push of step {push.step}: {error}", push.step)
        return 0

    def _datagrams(self, datagrams: pb.Datagrams, payload: memoryview) -> None:
        port = self.server.datagrams
        if port is None or not datagrams.size:
            raise Malformed("datagrams of a client in a run without datagrams, or of size 0")
        port.receiver.receive_from_stream(memoryview(datagrams.data), datagrams.size)

    def _query(self, query: pb.Query, payload: memoryview) -> None:
        self.server.bounds.check_query(query)
        seconds = (query.step_seconds, query.age_seconds, query.query_seconds)
        worker = self._worker
        self.server.queue.put(
            events.Query(worker.id, query.incarnation, query.step, query.local_steps, *seconds)
        )

    def _heartbeat(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Do nothing, because each received chunk of a stream already renews the worker's lease."""

    def _shard_heartbeat(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Queue the ids of the workers that another shard reports as silent."""
        for member in heartbeat.unreachable:
            silent = events.WorkerIncarnation(member.worker, member.incarnation)
            self.server.queue.put(events.WorkerUnreachable(silent))

    def _leave(self, leave: pb.Leave, payload: memoryview) -> None:
        worker = self._worker
        if len(leave.cause) > _LONGEST_CAUSE:
            raise Malformed(f"a worker's cause has {len(leave.cause)} characters; expected a word")
        worker.left = True
        self.server.queue.put(events.Leave(worker.id, worker.incarnation, leave.cause))

    def _observer_leaves(self, leave: pb.Leave, payload: memoryview) -> None:
        self._worker.left = True

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        """Store the counters that a node reports; the run's status and summary contain them."""
        if len(report.document.encode()) > MAX_DOCUMENT_BYTES:
            raise Malformed(f"a client's report has {len(report.document)} characters, too many")
        if report.rounds:
            self._take_rounds(report.rounds)
            return
        role = self._worker.role
        if role == pb.ROLE_WORKER:
            reports.check_worker(report.document)
        elif role == pb.ROLE_SHARD:
            reports.check_shard(report.document)
        if role != pb.ROLE_SUPERVISOR:
            self.server.reports[(role, self._worker.id)] = report.document

    def _take_rounds(self, batch: str) -> None:
        if self._worker.role != pb.ROLE_WORKER:
            raise Malformed("a client that is not a worker sent time records of training rounds")
        if len(batch.encode()) > MAX_DOCUMENT_BYTES:
            raise Malformed(f"a worker's records of rounds have {len(batch)} characters, too many")
        self._serve("rounds", self.server.observers.pass_on_rounds, self._worker.id, batch)

    # -- observers: supervisors, evaluators, following shards -------------------------------

    def _observe(self, pull: pb.Pull, payload: memoryview) -> None:
        self._serve("the model", self.server.observe, self._worker, self.number)

    def _halt(self, halt: pb.Halt, payload: memoryview) -> None:
        known = _SHARD_HALT_CAUSES if self._worker.role == pb.ROLE_SHARD else _HALT_CAUSES
        if halt.cause not in known:
            raise Malformed(f"unknown cause {halt.cause!r:.80} to end the run; known: {known}")
        self.server.queue.put(events.Stop(halt.cause))

    # -- the workers' scripts ---------------------------------------------------------------

    def _arrive(self, barrier: pb.Barrier, payload: memoryview) -> None:
        names = [*barrier.passed, *barrier.changed, barrier.name]
        if len(names) > _MOST_BARRIERS or max(map(len, names)) > _LONGEST_BARRIER:
            raise Malformed(f"{len(names)} barriers, or names longer than {_LONGEST_BARRIER}")
        if not all(name.isascii() and name.isprintable() for name in names):
            raise Malformed("the message has a barrier whose name is not printable ASCII")
        arrival = BarrierArrival(
            barrier.name, tuple(barrier.passed), barrier.changes, tuple(barrier.changed)
        )
        self._serve("a barrier", self.server.scripts.arrive, self._worker, arrival)

    def _stop_fit(self, stop: pb.StopFit, payload: memoryview) -> None:
        _check_place(stop.fit, stop.epochs)
        stop_fit = self.server.scripts.stop_fit
        self._serve("the end of a fit", stop_fit, self._worker, stop.fit, stop.epochs)

    def _epoch_meeting(self, meeting: pb.EpochMeeting, payload: memoryview) -> None:
        _check_meeting(meeting)
        self._serve("the end of an epoch", self.server.scripts.meet, self._worker, meeting)

    def _script_finished(self, finished: pb.Finished, payload: memoryview) -> None:
        finish, message = self.server.scripts.finish, printable(finished.message, _LONGEST_MESSAGE)
        self._serve("the end of a script", finish, self._worker, finished.failed, message)

    def _fit_begun(self, fit: pb.FitBegun, payload: memoryview) -> None:
        _check_place(fit.fit, 0)
        self._of_script(fit)

    def _epoch_ended(self, ended: pb.EpochEnded, payload: memoryview) -> None:
        _check_place(ended.fit, ended.epoch)
        self._of_script(ended)

    def _fit_ended(self, fit: pb.FitEnded, payload: memoryview) -> None:
        _check_place(fit.fit, 0)
        if len(fit.history) > _LONGEST_HISTORY:
            raise Malformed(f"a training history of {len(fit.history)} characters is too long")
        self._of_script(fit)

    def _script_knows(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        _check_evaluated(evaluated, names_versions=evaluated.answers)
        self._of_script(evaluated)

    def _of_script(self, message: Any) -> None:
        _check_relayed(message)
        self._serve("a script's fit", self.server.scripts.receive, self._worker, message)

    def _evaluated(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        """Queue the result of an evaluation that the evaluator has made."""
        _check_evaluated(evaluated)
        take = self.server.scripts.take_evaluation
        self._serve("an evaluation", take, self._worker, evaluated)

    def _evaluator(self, evaluator: pb.Evaluator, payload: memoryview) -> None:
        """Queue a Supervisor's report about whether the Supervisor starts an evaluator."""
        offer = self.server.scripts.offer_evaluator
        why = printable(evaluator.message, _LONGEST_MESSAGE)
        state = (evaluator.available, why, evaluator.starting)
        self._serve("an evaluator", offer, self._worker, *state)

    def _request_slots(self, slots: pb.SlotsRequest, payload: memoryview) -> None:
        self._serve("the optimizer", self.server.send_slots, self._worker, slots.weights)

    def _script_alive(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        self._serve("a heartbeat", self.server.scripts.alive, self._worker)

    def _serve(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Queue work for this stream's client in the writer thread. If work for a client fails,
        `Containment` refuses only this client.
        """
        request = ClientRequest(self._worker, what, functools.partial(work, *arguments))
        self.server.queue.put(request)

    @property
    def _worker(self) -> Connection:
        if self.connection is None:
            raise Malformed("the client has sent no Hello message yet")
        return self.connection

    def _check_current(self, connection: Connection) -> None:
        """Raise Malformed or end the stream if the worker is not admitted, or has a newer
        stream.
        """
        if not connection.welcomed:
            raise Malformed("the client sent a message before the PS had accepted its Hello")
        if self.server.connections.workers.get(connection.id) is not connection:
            self.server.guard.count_refusal("replaced")
            raise _EndOfStream

    def _renew_lease(self, connection: Connection) -> None:
        """Renew the worker's lease, at most `_RENEWALS_PER_LEASE` times in one lease."""
        now = time.monotonic()
        if now - self._renewed_at >= self.server.lease_seconds / _RENEWALS_PER_LEASE:
            self._renewed_at = now
            self.server.queue.put(events.WorkerAlive(connection.id))

    def _refuse(self, reason: int, message: str, step: int = 0) -> None:
        message = message[:_LONGEST_MESSAGE]
        refusal = pb.Refusal(reason=reason, message=message, step=step)  # type: ignore[arg-type]
        if reason == pb.REASON_PHASE and self.server.identity is not None:
            refusal.phase = self.server.identity.phase
        self.stream.send((framing.frame(pb.ToClient(refusal=refusal)),), counted=False)

    def _reject_stream(self, why: str, refusal: tuple[int, str]) -> None:
        """Send the client a refusal and end the client's stream. The connection guard of the port
        counts the refusal under the name `why`.
        """
        self._refuse(*refusal)
        self.server.guard.record_refusal(why, self.stream.peer, refusal[1])
        raise _EndOfStream

    def forget(self) -> None:
        """Notify the server that this client's stream has ended; called once, after its last
        frame.
        """
        connection = self.connection
        if self._offers is not None:
            self._offers.forget()
        if connection is None:
            return
        if connection.role != pb.ROLE_WORKER:
            self.server.connections.drop_observer(self.number)
            scripts = self.server.scripts
            actions: dict[int, Callable[[Connection], None]] = {
                pb.ROLE_SCRIPT: scripts.lost,
                pb.ROLE_SUPERVISOR: scripts.lose_supervisor,
                pb.ROLE_EVALUATOR: scripts.lose_evaluator,
            }
            if (lost := actions.get(connection.role)) is not None:
                self._serve("the end of a stream", lost, connection)
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
        (pb.ROLE_SUPERVISOR, "evaluator"): _evaluator,
        (pb.ROLE_EVALUATOR, "pull"): _observe,
        (pb.ROLE_EVALUATOR, "slots"): _request_slots,
        (pb.ROLE_EVALUATOR, "evaluated"): _evaluated,
        (pb.ROLE_EVALUATOR, "heartbeat"): _heartbeat,
        (pb.ROLE_EVALUATOR, "leave"): _observer_leaves,
        (pb.ROLE_SCRIPT, "fit_begun"): _fit_begun,
        (pb.ROLE_SCRIPT, "epoch_ended"): _epoch_ended,
        (pb.ROLE_SCRIPT, "epoch_meeting"): _epoch_meeting,
        (pb.ROLE_SCRIPT, "fit_ended"): _fit_ended,
        (pb.ROLE_SCRIPT, "evaluated"): _script_knows,
        (pb.ROLE_SCRIPT, "barrier"): _arrive,
        (pb.ROLE_SCRIPT, "finished"): _script_finished,
        (pb.ROLE_SCRIPT, "slots"): _request_slots,
        (pb.ROLE_SCRIPT, "stop_fit"): _stop_fit,
        (pb.ROLE_SCRIPT, "heartbeat"): _script_alive,
        (pb.ROLE_SCRIPT, "leave"): _observer_leaves,
        (pb.ROLE_SHARD, "heartbeat"): _shard_heartbeat,
        (pb.ROLE_SHARD, "halt"): _halt,
        (pb.ROLE_SHARD, "report"): _report,
        (pb.ROLE_SHARD, "leave"): _observer_leaves,
    }


def _check_place(fit: int, epoch: int) -> None:
    if not (0 < fit < _MOST_COUNTED and epoch < _MOST_COUNTED):
        raise Malformed(f"epoch {epoch} of call {fit} of fit: a number is out of range")


def _check_meeting(meeting: pb.EpochMeeting) -> None:
    """Reject metric states in an epoch meeting's message that no script can have."""
    _check_place(meeting.fit, meeting.epoch)
    _check_relayed(meeting)
    names = {state.name for state in meeting.states}
    if not len(names) == len(meeting.states) <= _MOST_METRICS:
        raise Malformed(
            f"the message has {len(meeting.states)} metrics with {len(names)} different names: "
            "too many metrics, or a repeated name"
        )
    for state in meeting.states:
        if len(state.values) % _STATE_BYTES or len(state.name) > _LONGEST_MESSAGE:
            raise Malformed(f"metric {state.name!r:.80} has {len(state.values)} bytes, too many")


def check_address(address: str) -> None:
    """Reject an address that no node can have, because the shard sends node addresses to all nodes.

    Raises:
        Malformed: The address is longer than any host name, or it has unprintable characters.
    """
    if len(address) > _LONGEST_ADDRESS or not address.isprintable():
        raise Malformed(
            f"the message has a peer_address of {len(address)} characters; expected at most "
            f"{_LONGEST_ADDRESS} printable ones"
        )


def _check_relayed(message: Any) -> None:
    """Reject a message that is too long to be relayed in a message to another client."""
    if message.ByteSize() > _MOST_RELAYED_BYTES:
        raise Malformed(
            f"a message of {message.ByteSize()} bytes is to be sent to other nodes; expected at "
            f"most {_MOST_RELAYED_BYTES} bytes"
        )


def _check_evaluated(evaluated: pb.Evaluated, names_versions: bool = True) -> None:
    """Reject the result of an evaluation that no evaluator can have made.

    The metrics of an evaluation become lines of metrics.jsonl and of the summary, tags of
    TensorBoard and labels of Prometheus. The value of an evaluation's metric may be NaN or infinite
    and is then written as null.

    Args:
        evaluated: Message with the result of the evaluation.
        names_versions: True if an evaluation with metrics must name the versions of the shards'
            weights.
    """
    _check_place(evaluated.fit, evaluated.epoch)
    _check_relayed(evaluated)
    versions = evaluated.versions
    if names_versions and evaluated.metrics and not versions:
        raise Malformed("the evaluation has no model versions; expected at least one")
    if len(versions) > _MOST_METRICS or max(versions, default=0) > MOST_COUNTED:
        raise Malformed(f"{len(versions)} versions up to {max(versions)}; limit {MOST_COUNTED}")
    if not evaluated.nobody.isprintable():
        raise Malformed("the message has an evaluation whose explanation is not printable")
    if len(evaluated.metrics) > _MOST_METRICS or len(evaluated.nobody) > _LONGEST_MESSAGE:
        raise Malformed(f"{len(evaluated.metrics)} metrics of an evaluation, or a long explanation")
    if sum(len(metric.values) for metric in evaluated.metrics) > _MOST_VALUES:
        raise Malformed("the metrics of an evaluation have too many values")
    for metric in evaluated.metrics:
        if math.prod(metric.shape) != len(metric.values):
            raise Malformed(
                f"evaluation's metric {metric.name!a:.80}: its values do not fit the shape"
            )
        if not (metric.name.isprintable() and 0 < len(metric.name) <= _LONGEST_METRIC):
            raise Malformed(
                f"the evaluation has a metric named {metric.name!a:.80}; expected 1 to "
                f"{_LONGEST_METRIC} printable characters"
            )

"""Dialogue of a PS shard with a worker: pulls, pushes, queries, reports."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.service.dialogues.base import ConnectedDialogue, EndOfStream, RemoteClient
from thinwire.ps.service.stream_state import ClientStreamState
from thinwire.ps.wire import reports
from thinwire.ps.wire.push_decoder import NonFinite

if TYPE_CHECKING:
    from thinwire.ps.service.writer import ShardWriter

#: A message renews its worker's lease if the last renewal is at least this part of a lease old.
#: More renewals would only fill the writer thread's queue.
_RENEWALS_PER_LEASE = 10
#: Limit on the characters of the cause in a Leave message.
_LONGEST_CAUSE = 100


class WorkerDialogue(ConnectedDialogue):
    """Dialogue with a worker, which waits until the shard's state machine admits the worker.

    Each frame of a worker renews the worker's lease. A push that is wrong only in its contents is
    refused without ending the stream.
    """

    def __init__(self, client: RemoteClient, hello: pb.Hello, writer: ShardWriter) -> None:
        super().__init__(client, hello, writer)
        if not hello.incarnation:
            self.connection.incarnation = secrets.randbits(63) + 1
        served = writer.shard.served  # read once: the writer thread may replace it meanwhile
        self._decoder, self._bounds = served.decoder, served.bounds
        self._datagrams, self._share = served.datagrams, served.share
        self._put, self._id = writer.shard.queue.put, self.connection.id
        self._renewed_at = 0.0
        self._renewal_seconds = writer.shard.lease_seconds / _RENEWALS_PER_LEASE

    def begin(self) -> None:
        """Queue the worker's Join event, which the state machine accepts or rejects."""
        hello, connection = self._hello, self.connection
        seed = hello.link.seed + hello.shard
        connection.stream.pace(connection.link, self._share, seed)
        self._writer.expect(connection)
        self._put(
            events.Join(
                connection.id,
                connection.incarnation,
                bool(hello.incarnation),
                connection.stream.peer,
                hello.epoch,
            )
        )

    def on_frame(self, num_bytes: int) -> None:
        """Renew the worker's lease, `_RENEWALS_PER_LEASE` times in one lease.

        Raises:
            Malformed: The worker sent a message before the shard had admitted the worker.
            EndOfStream: The worker has a newer stream.
        """
        if self.connection.state is not ClientStreamState.ADMITTED:
            self._end_unadmitted()
        now = time.monotonic()
        if now - self._renewed_at >= self._renewal_seconds:
            self._renewed_at = now
            self._put(events.WorkerAlive(self._id))

    def _end_unadmitted(self) -> None:
        if self.connection.state is ClientStreamState.WAITING:
            raise Malformed("the client sent a message before the PS had accepted its Hello")
        self._client.guard.count_refusal("replaced")
        raise EndOfStream

    def end(self) -> None:
        """Note that the worker's stream has ended."""
        self._writer.lose(self.connection)

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self._bounds.check_pull(pull)
        base = pull.base_version if pull.has_base else None
        self._put(events.Pull(self._id, self.connection.incarnation, base, pull.generation))

    def _push(self, push: pb.Push, payload: memoryview) -> int:
        worker, port = self._id, self._datagrams
        try:
            if port is None:
                event = self._decoder.decode(worker, push, payload)
                self._put(event)
                return event.num_decoded_bytes
            port.receiver.on_push(worker, push, payload)
        except NonFinite as error:
            self._put(events.PushRejected(worker, "non_finite"))
            self._client.refuse(pb.REASON_NON_FINITE, str(error), push.step)
        except Malformed as error:
            self._put(events.PushRejected(worker, "malformed"))
            text = f"push of step {push.step}: {error}"
            self._client.refuse(pb.REASON_MALFORMED, text, push.step)
        return 0

    def _datagrams_over_grpc(self, datagrams: pb.Datagrams, payload: memoryview) -> None:
        port = self._datagrams
        if port is None or not datagrams.size:
            raise Malformed("datagrams of a client in a run without datagrams, or of size 0")
        port.receiver.receive_from_stream(memoryview(datagrams.data), datagrams.size)

    def _query(self, query: pb.Query, payload: memoryview) -> None:
        self._bounds.check_query(query)
        seconds = (query.step_seconds, query.age_seconds, query.query_seconds)
        self._put(
            events.Query(self._id, query.incarnation, query.step, query.local_steps, *seconds)
        )

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        reports.check_size(report.document)
        if report.rounds:
            if len(report.rounds.encode()) > reports.MAX_DOCUMENT_BYTES:
                raise Malformed(
                    f"a worker's records of rounds have {len(report.rounds)} characters, too many"
                )
            self._serve("rounds", self._writer.observers.pass_on_rounds, self._id, report.rounds)
            return
        reports.check_worker(report.document)
        self._shard.reports[(pb.ROLE_WORKER, self._id)] = report.document

    def _leave(self, leave: pb.Leave, payload: memoryview) -> None:
        if len(leave.cause) > _LONGEST_CAUSE:
            raise Malformed(f"a worker's cause has {len(leave.cause)} characters; expected a word")
        self.connection.left = True
        self._put(events.Leave(self._id, self.connection.incarnation, leave.cause))

    messages: ClassVar[dict[str, Any]] = {
        "pull": _pull,
        "push": _push,
        "datagrams": _datagrams_over_grpc,
        "query": _query,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": _leave,
        "report": _report,
    }

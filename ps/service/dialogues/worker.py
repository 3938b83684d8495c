"""Dialogue of a PS shard with a worker: pulls, pushes, queries, reports."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.types import ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc.session import payload_limit
from thinwire.ps.core import events
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.dialogues.base import (
    ConnectedDialogue,
    EndOfStream,
    RemoteClient,
    ShardSide,
)
from thinwire.ps.service.stream_state import ClientStreamState
from thinwire.ps.wire import reports
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder

if TYPE_CHECKING:
    from thinwire.ps.datagrams.port import DatagramPort

#: A message renews its worker's lease if the last renewal is at least this part of a lease old.
#: More renewals would only fill the writer thread's queue.
_RENEWALS_PER_LEASE = 10
#: Limit on the characters of the cause in a Leave message.
_LONGEST_CAUSE = 100


@dataclasses.dataclass(frozen=True)
class ModelIntake:
    """The parts of a shard that receive messages about its current model.

    Attributes:
        decoder: Decoder of the workers' pushes.
        bounds: Limits of the numbers that workers may report in messages, for example batch sizes.
        datagrams: Port for datagrams and for pushes that consist of them; None if the training
            method sends no datagrams.
        share: Fraction of the model's values that the shard holds (0 to 1), for emulated links.
    """

    decoder: PushDecoder
    bounds: ClaimBounds
    datagrams: DatagramPort | None
    share: float


@dataclasses.dataclass(frozen=True)
class WorkerAccounts:
    """The parts of a shard that follow which workers there are, and how they are.

    Attributes:
        lease_seconds: Time in seconds without a message of a worker, after which the shard expels
            the worker.
        expect: Function called with a worker's incarnation and connection before its Join event is
            queued.
        lose: Function called with a worker's connection when the worker's stream has ended.
        reports: (role, id) of a node -> newest JSON document that the node sent.
        pass_on_rounds: Function that gets a worker's id and its reports on training rounds (called
            on the writer thread).
    """

    lease_seconds: float
    expect: Callable[[int, Connection], None]
    lose: Callable[[Connection], None]
    reports: dict[tuple[int, int], str]
    pass_on_rounds: Callable[[int, str], None]


def largest_push(layout: ShardLayout, aux_count: int, bounds: ClaimBounds) -> int:
    """Return the largest legal payload of a worker's push, in bytes.

    Args:
        layout: Layout of the shard: the slices of variables that it holds.
        aux_count: Number of values in each push that the shard averages over the workers.
        bounds: Limits of the workers' messages. If a push may contain changes of the weights
            outside the optimizer, it may be twice as large.
    """
    limit = payload_limit(layout, aux_count)
    return limit + payload_limit(layout) if bounds.takes_changes else limit


class WorkerDialogue(ConnectedDialogue):
    """Dialogue with a worker, which waits until the shard's state machine admits the worker.

    Each frame of a worker renews the worker's lease. A push that is wrong only in its contents is
    refused without ending the stream.
    """

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        model: ModelIntake,
        accounts: WorkerAccounts,
    ) -> None:
        incarnation = hello.incarnation or secrets.randbits(63) + 1
        super().__init__(Connection(client.stream, hello, incarnation), shard)
        self._client, self._hello, self._accounts = client, hello, accounts
        self._model, self._decoder, self._datagrams = model, model.decoder, model.datagrams
        self._put, self._id = shard.put, self.connection.id
        self._renewed_at = 0.0
        self._renewal_seconds = accounts.lease_seconds / _RENEWALS_PER_LEASE

    def begin(self) -> None:
        """Queue the worker's Join event, which the state machine accepts or rejects."""
        hello, connection = self._hello, self.connection
        seed = hello.link.seed + hello.shard
        connection.stream.pace(connection.link, self._model.share, seed)
        self._accounts.expect(connection.incarnation, connection)
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
        self._accounts.lose(self.connection)

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self._model.bounds.check_pull(pull)
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
        self._model.bounds.check_query(query)
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
            self._serve("rounds", self._accounts.pass_on_rounds, self._id, report.rounds)
            return
        reports.check_worker(report.document)
        self._accounts.reports[(pb.ROLE_WORKER, self._id)] = report.document

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

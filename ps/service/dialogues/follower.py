"""Dialogue of shard 0 with a following shard (id 1 and up)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.service.dialogues.base import RemoteClient, ShardSide
from thinwire.ps.service.dialogues.observer import ObserverDialogue, ObserverSide, check_report
from thinwire.ps.wire import reports

if TYPE_CHECKING:
    from thinwire.proto.moved import ShardDirectory


class FollowerDialogue(ObserverDialogue):
    """Dialogue with a following shard, which reports its counters and its silent workers.

    Args:
        directory: Network addresses of all shards of the run.
        documents: (role, id) of a node -> newest JSON document that the node sent.
    """

    halt_causes: ClassVar[tuple[str, ...]] = (STOP_REASON,)

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        observers: ObserverSide,
        directory: ShardDirectory,
        documents: dict[tuple[int, int], str],
    ) -> None:
        super().__init__(client, hello, shard, observers)
        self._client, self._hello = client, hello
        self._directory, self._documents = directory, documents

    def begin(self) -> None:
        """Admit the following shard, and record its address if the shard has its model."""
        hello = self._hello
        if hello.model:
            conflict = self._directory.announce(hello.id, hello.generation, hello.peer_address)
            if conflict is not None:
                self._client.reject("hello", (pb.REASON_ID_TAKEN, conflict))
        super().begin()

    def _unreachable(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Queue the workers that the following shard reports as silent."""
        for member in heartbeat.unreachable:
            silent = events.WorkerIncarnation(member.worker, member.incarnation)
            self._shard.put(events.WorkerUnreachable(silent))

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        check_report(report)
        reports.check_shard(report.document)
        self._documents[(pb.ROLE_SHARD, self.connection.id)] = report.document

    messages: ClassVar[dict[str, Any]] = {
        "heartbeat": _unreachable,
        "halt": ObserverDialogue._halt,
        "report": _report,
        "leave": ObserverDialogue._leave,
    }

"""Common part of a PS shard's dialogues with clients that send no updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.service.connections import Connection, Connections
from thinwire.ps.service.dialogues.base import ConnectedDialogue, RemoteClient, ShardSide
from thinwire.ps.wire import reports


class ObserverDialogue(ConnectedDialogue):
    """Dialogue with a Supervisor, an evaluator, another shard, or a worker's script.

    Args:
        client: The client, whose Hello fits the shard.
        hello: Hello message of the client.
        shard: Parts of the shard that all its dialogues use.
        connections: All open connections of the shard.
        welcome: Function that admits the observer with the given connection.
        incarnation: Random number that identifies one start of the client's process; 0 if the
            client has none.

    Attributes:
        halt_causes: Causes that the client's request to end the run may name.
    """

    halt_causes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        connections: Connections,
        welcome: Callable[[Connection], None],
        incarnation: int = 0,
    ) -> None:
        super().__init__(Connection(client.stream, hello, incarnation), shard)
        self._connections, self._welcome = connections, welcome
        self._number = 0  # running number of the observer in `Connections`; 0 before `begin`

    def begin(self) -> None:
        """Add the client to the shard's open connections, and admit it."""
        self._number = self._connections.add_observer(self.connection)
        self._admit()

    def _admit(self) -> None:
        self._welcome(self.connection)

    def on_frame(self, num_bytes: int) -> None:
        """Do nothing: only workers have leases."""

    def end(self) -> None:
        """Note that the client's stream has ended."""
        self._connections.drop_observer(self._number)

    def _serve_end(self, lost: Callable[[Connection], None]) -> None:
        """Queue the call of `lost` with this connection, behind the client's messages."""
        self._serve("the end of a stream", lost, self.connection)

    def _leave(self, leave: pb.Leave, payload: memoryview) -> None:
        self.connection.left = True

    def _halt(self, halt: pb.Halt, payload: memoryview) -> None:
        known = self.halt_causes
        if halt.cause not in known:
            raise Malformed(f"unknown cause {halt.cause!r:.80} to end the run; known: {known}")
        self._shard.put(events.Stop(halt.cause))


def check_report(report: pb.Report) -> None:
    """Reject a report that is too long, or that only workers send.

    Raises:
        Malformed: The report has records of training rounds, or a too long document.
    """
    reports.check_size(report.document)
    if report.rounds:
        raise Malformed("a client that is not a worker sent time records of training rounds")

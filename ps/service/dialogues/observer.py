"""Common part of a PS shard's dialogues with clients that send no updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.service.connections import Connection, Connections
from thinwire.ps.service.dialogues.base import ConnectedDialogue, RemoteClient, ShardSide
from thinwire.ps.wire import reports


@dataclasses.dataclass(frozen=True)
class ObserverSide:
    """The parts of a shard that its dialogues with clients use that send no updates.

    Attributes:
        connections: All open connections of the shard.
        welcome: Function that admits the client with the given connection.
        observe: Function that sends the model to a connection with a running number (called on the
            writer thread).
        send_slots: Function that sends the optimizer's state, and the weights if the second
            argument is True (called on the writer thread).
    """

    connections: Connections
    welcome: Callable[[Connection], None]
    observe: Callable[[Connection, int], None]
    send_slots: Callable[[Connection, bool], None]


class ObserverDialogue(ConnectedDialogue):
    """Dialogue with a Supervisor, an evaluator, another shard, or a worker's script.

    Args:
        client: The client, whose Hello fits the shard.
        hello: Hello message of the client.
        shard: Parts of the shard that all its dialogues use.
        observers: Parts of the shard that its dialogues with such clients use.
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
        observers: ObserverSide,
        incarnation: int = 0,
    ) -> None:
        super().__init__(Connection(client.stream, hello, incarnation), shard)
        self._observers = observers
        self._number = 0  # running number of the observer in `Connections`; 0 before `begin`

    def begin(self) -> None:
        """Add the client to the shard's open connections, and admit it."""
        self._number = self._observers.connections.add_observer(self.connection)
        self._admit()

    def _admit(self) -> None:
        self._observers.welcome(self.connection)

    def on_frame(self, num_bytes: int) -> None:
        """Do nothing: only workers have leases."""

    def end(self) -> None:
        """Note that the client's stream has ended."""
        self._observers.connections.drop_observer(self._number)

    def _serve_end(self, lost: Callable[[Connection], None]) -> None:
        """Queue the call of `lost` with this connection, behind the client's messages."""
        self._serve("the end of a stream", lost, self.connection)

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self._serve("the model", self._observers.observe, self.connection, self._number)

    def _request_slots(self, slots: pb.SlotsRequest, payload: memoryview) -> None:
        send_slots = self._observers.send_slots
        self._serve("the optimizer", send_slots, self.connection, slots.weights)

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

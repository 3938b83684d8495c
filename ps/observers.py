"""What supervisors and following shards are told without asking."""

from __future__ import annotations

from collections.abc import Callable

from absl import logging

from proto import thinwire_pb2 as pb
from ps.connections import Connection, Connections
from ps.rounds import RoundsRelay


class Observers:
    """Tells them news, and whoever comes later what it must know of the past (writer thread).

    Attributes:
        on_status: Makes the status document that supervisors get; None: they get none.

    Args:
        connections: Of this shard.
    """

    def __init__(self, connections: Connections) -> None:
        self.on_status: Callable[[], str] | None = None
        self._connections = connections
        self._rounds = RoundsRelay()
        self._epoch: pb.Membership | None = None  # the newest

    def welcome(self, newcomer: Connection, welcome: pb.ToClient, stop_reason: str | None) -> None:
        """Let one in that has said Hello.

        Args:
            newcomer: Its connection.
            welcome: What it hears first.
            stop_reason: Why the run has ended, if it has.
        """
        if newcomer.evaluates:
            self._make_room_for(newcomer)
        newcomer.say(welcome)
        if newcomer.role == pb.ROLE_SHARD and self._epoch is not None:
            newcomer.say(pb.ToClient(membership=self._epoch))
        if newcomer.evaluates:
            self._rounds.repeat(newcomer)
        if stop_reason is not None:
            newcomer.say(pb.ToClient(halt=pb.Halt(cause=stop_reason)))

    def _make_room_for(self, newcomer: Connection) -> None:
        """End the stream of a Supervisor whose place another takes: it may be long dead."""
        for other in self._connections.with_role(pb.ROLE_SUPERVISOR):
            if other is newcomer or not other.evaluates or other.left:
                continue
            message = (
                f"another Supervisor ({newcomer.stream.peer}) has taken this one's place; a run is "
                "evaluated by one at a time. End the one that is not wanted."
            )
            logging.warning("Supervisor %s: %s", other.stream.peer, message)
            refusal = pb.Refusal(reason=pb.REASON_ID_TAKEN, message=message)
            other.say(pb.ToClient(refusal=refusal))
            other.stream.close()

    def pass_on_rounds(self, worker: int, batch: str) -> None:
        """Send a worker's rounds to the Supervisor."""
        supervisors = self._connections.with_role(pb.ROLE_SUPERVISOR)
        self._rounds.take(worker, batch, [each for each in supervisors if each.evaluates])

    def publish_status(self) -> None:
        """Send the status document to every supervisor."""
        supervisors = self._connections.with_role(pb.ROLE_SUPERVISOR)
        if self.on_status is not None and supervisors:
            report = pb.ToClient(report=pb.Report(document=self.on_status()))
            for supervisor in supervisors:
                supervisor.say(report)

    def tell_epoch(self, epoch: pb.Membership) -> None:
        """Send a new epoch to every following shard."""
        self._epoch = epoch
        for shard in self._connections.with_role(pb.ROLE_SHARD):
            shard.say(pb.ToClient(membership=epoch))

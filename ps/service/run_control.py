"""The control streams of the workers' scripts: what comes on them goes to `Barriers`, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.service.barriers import BarrierOpening, Barriers, Outcome, ScriptsEnd
from thinwire.ps.service.connections import Connection


class RunControl:
    """The scripts of a run on the network (writer thread, except `is_worker` and what names it).

    Args:
        barriers: Their state.
        put: Queues an event for the core.
        clock: Of this shard.
    """

    def __init__(
        self,
        barriers: Barriers,
        put: Callable[[events.Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._barriers, self._put, self._clock = barriers, put, clock
        self._streams: dict[int, Connection] = {}  # worker -> the stream of its script

    def is_worker(self, worker: int) -> bool:
        """Return whether there is a worker of this id (any thread)."""
        return self._barriers.is_worker(worker)

    @staticmethod
    def range_refusal(worker: int) -> str:
        """Return why a script is rejected whose worker does not exist (any thread)."""
        return f"id: there is no worker {worker}; give all nodes the same --nb_workers."

    def why(self, reason: str) -> str:
        """Return what scripts have to do with the end of a run; empty: nothing."""
        ended = self._barriers.ended
        return ended.message if ended is not None and ended.cause == reason else ""

    def begin(self, connection: Connection) -> None:
        """Take over the stream of a worker's script; an older one is ended."""
        old = self._streams.get(connection.id)
        self._streams[connection.id] = connection
        if old is not None:
            old.stream.close()
        now = self._clock()
        self._perform(self._barriers.begin(connection.id, connection.incarnation, now))

    def arrive(self, connection: Connection, name: str, passed: Sequence[str]) -> None:
        """Note that a script has come to a barrier."""
        if self._is_current(connection):
            self._perform(self._barriers.arrive(connection.id, name, self._clock(), passed))

    def finish(self, connection: Connection, failed: bool, message: str) -> None:
        """Note that a script has ended, and confirm it."""
        if not self._is_current(connection):
            return
        outcomes = self._barriers.finish(connection.id, failed, message, self._clock())
        connection.send(pb.ToClient(finished=pb.Finished()))
        self._perform(outcomes)

    def alive(self, connection: Connection) -> None:
        """Note a sign of life."""
        if self._is_current(connection):
            self._perform(self._barriers.alive(connection.id, self._clock()))

    def lost(self, connection: Connection) -> None:
        """Note that a stream has ended."""
        if self._is_current(connection):
            del self._streams[connection.id]
            self._barriers.lost(connection.id, connection.incarnation, self._clock())

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process stood still."""
        self._barriers.excuse(seconds)

    def tick(self) -> None:
        """Do what has become due by time alone."""
        self._perform(self._barriers.tick(self._clock()))

    def next_deadline(self) -> float | None:
        """Return when `tick` may have an effect."""
        return self._barriers.next_deadline(self._clock())

    def _is_current(self, connection: Connection) -> bool:
        return self._streams.get(connection.id) is connection

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case BarrierOpening():
                    stream = self._streams.get(outcome.worker)
                    if stream is not None:
                        stream.send(pb.ToClient(barrier=pb.Barrier(name=outcome.name)))
                case ScriptsEnd():
                    if outcome.message:
                        logging.info("the run ends (%s): %s", outcome.cause, outcome.message)
                    self._put(events.Stop(outcome.cause))

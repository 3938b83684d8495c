"""Open streams of one shard: replies to workers, and news for supervisors and following shards."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import logging

from thinwire.ops.frozen import FrozenArray
from thinwire.ops.types import Link, ShardLayout, Update
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Frame, frame
from thinwire.proto.grpc import ServerStream
from thinwire.proto.grpc.session import chunk_bytes
from thinwire.ps.core import events
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.wire.replies import (
    CodedUpdate,
    SharedBlocks,
    WholeShard,
    coded_update,
    reply_frames,
)


class Connection:
    """One client's stream after its Hello."""

    def __init__(self, stream: ServerStream, hello: pb.Hello, incarnation: int) -> None:
        """Wrap a stream; `incarnation` is the worker's, or 0."""
        self.stream = stream
        self.role: int = hello.role
        self.id: int = hello.id
        self.incarnation = incarnation
        self.peer_address: str = hello.peer_address
        self.takes_bulk: bool = hello.bulk
        self.chooser = IndexChooser()
        link = Link(hello.link.mbps, hello.link.delay_ms, hello.link.loss)
        self.chunk_bytes = chunk_bytes(link, stream.chunks)
        self.evaluates = hello.role == pb.ROLE_SUPERVISOR and len(hello.model) > 0
        self.phase: int = hello.phase
        self.takes_requests = hello.role == pb.ROLE_EVALUATOR and incarnation > 0
        self.left = False
        self.welcomed = False  # the core has admitted this worker on this stream

    def send(self, message: pb.ToClient, counted: bool = False) -> None:
        """Queue a message without payload; `counted` if it belongs to training."""
        self.stream.send((frame(message),), counted=counted)

    def send_report(self, report: pb.Report) -> int:
        """Queue a report; return how many older ones were dropped, since the client reads none."""
        return self.stream.send_report(frame(pb.ToClient(report=report)))


class ReplySender:
    """Turns the Reply actions of one batch into sends; equal updates are coded once."""

    def __init__(
        self,
        layout: ShardLayout,
        generation: int,
        members: Callable[[], list[pb.Member]],
        datagrams: DatagramReceiver | None,
    ) -> None:
        """Start a batch; `members` finds who does the next round, at the first reply."""
        self._layout, self._generation = layout, generation
        self._find_members, self._datagrams = members, datagrams
        self._members: list[pb.Member] | None = None
        self._shared: dict[int, SharedBlocks] = {}

    def send(self, reply: events.Reply, connection: Connection, counted: bool = True) -> None:
        """Queue one reply; coding happens in the connection's sending thread."""
        if self._members is None:
            self._members = self._find_members()
        update = reply.update
        coded: CodedUpdate
        values: Any = update.values if isinstance(update, Update) else None
        if isinstance(values, FrozenArray):
            coded = WholeShard(values.again(), self._layout)
            reply = dataclasses.replace(reply, update=())  # else it would be kept for a reader more
        else:
            coded = coded_update(update, self._layout, self._shared)
        datagrams = self._datagrams
        came = datagrams.outcome(reply.worker, reply.step) if datagrams is not None else None
        make: Callable[[], Iterable[Frame]] = functools.partial(
            reply_frames,
            reply,
            self._generation,
            self._members,
            coded,
            connection.chooser,
            connection.chunk_bytes,
            came,
        )
        connection.stream.send(make, counted=counted)


@dataclasses.dataclass
class ClosedTraffic:
    """Training bytes that went to one worker over streams that are closed."""

    closed_bytes: int = 0


class Connections:
    """All open connections; workers by id, others by a running number."""

    def __init__(self) -> None:
        """Start empty."""
        self.workers: dict[int, Connection] = {}
        self.observers: dict[int, Connection] = {}
        self.had_supervisor = False  # one that evaluates was connected
        self.was_evaluated = False  # and one of them left in good order
        self.had_onlooker = False  # one that does not evaluate was connected
        self._traffic: dict[int, ClosedTraffic] = {}
        self._peer_addresses: dict[int, str] = {}  # of the newest incarnation of each worker
        self._numbers = 0
        self._lock = threading.Lock()

    def add_worker(self, connection: Connection) -> None:
        """Make this the worker's stream; an older one is ended."""
        with self._lock:
            old = self.workers.pop(connection.id, None)
            if old is not None:
                self._close(old)
            self.workers[connection.id] = connection
            connection.welcomed = True
            self._peer_addresses[connection.id] = connection.peer_address

    def drop_worker(self, connection: Connection) -> bool:
        """Forget a worker's stream; return whether it still was this one."""
        with self._lock:
            if self.workers.get(connection.id) is not connection:
                return False
            del self.workers[connection.id]
            self._close(connection)
            return True

    def end_training(self) -> None:
        """End the streams of workers, and of observers who know the model."""
        with self._lock:
            for connection in self.workers.values():
                self._close(connection)
            self.workers.clear()
            evaluators = [each for each in self.observers.values() if each.evaluates]
        for connection in evaluators:
            connection.stream.close()

    def add_observer(self, connection: Connection) -> int:
        """Add a supervisor or a following shard; return its number."""
        with self._lock:
            self._numbers += 1
            self.observers[self._numbers] = connection
            self.had_supervisor |= connection.evaluates
            self.had_onlooker |= connection.role == pb.ROLE_SUPERVISOR
            return self._numbers

    def drop_observer(self, number: int) -> None:
        """Forget an observer."""
        with self._lock:
            gone = self.observers.pop(number, None)
            self.was_evaluated |= gone is not None and gone.evaluates and gone.left

    def with_role(self, role: int) -> list[Connection]:
        """Return the observers of one role."""
        with self._lock:
            return [each for each in self.observers.values() if each.role == role]

    def members(self, incarnations: Iterable[tuple[int, int]]) -> list[pb.Member]:
        """Return how workers reach each other, of (id, incarnation) of the live ones."""
        with self._lock:
            return [
                pb.Member(
                    worker=worker,
                    incarnation=incarnation,
                    address=self._peer_addresses.get(worker, ""),
                )
                for worker, incarnation in incarnations
            ]

    def everyone(self) -> list[Connection]:
        """Return all connections."""
        with self._lock:
            return [*self.workers.values(), *self.observers.values()]

    def bytes_down(self) -> dict[int, int]:
        """Return training bytes sent to each worker, closed streams included."""
        with self._lock:
            totals = {worker: traffic.closed_bytes for worker, traffic in self._traffic.items()}
            for worker, connection in self.workers.items():
                totals[worker] = totals.get(worker, 0) + connection.stream.bytes_sent
            return totals

    def restore_bytes_down(self, totals: dict[int, int]) -> None:
        """Go on counting from before a restart of the shard."""
        self._traffic = {worker: ClosedTraffic(count) for worker, count in totals.items()}

    def _close(self, connection: Connection) -> None:
        traffic = self._traffic.setdefault(connection.id, ClosedTraffic())
        traffic.closed_bytes += connection.stream.bytes_sent
        connection.stream.close()


#: Characters of rounds kept of each worker for a Supervisor that comes, or comes back.
KEPT_PER_WORKER = 512 << 10


class RoundsRelay:
    """Forwards batches of rounds to the Supervisor, which recognises those it has (writer thread).

    The newest ones wait for a Supervisor that is away.
    """

    def __init__(self, kept_per_worker: int = KEPT_PER_WORKER) -> None:
        self._limit = kept_per_worker
        self._kept: dict[int, collections.deque[str]] = {}

    def take(self, worker: int, batch: str, listeners: list[Connection]) -> int:
        """Send a worker's batch to all listeners, and keep it; return how many were dropped."""
        kept = self._kept.setdefault(worker, collections.deque())
        kept.append(batch)
        size = sum(map(len, kept))
        while size > self._limit and len(kept) > 1:
            size -= len(kept.popleft())
        report = pb.Report(rounds=batch, worker=worker)
        return sum(listener.send_report(report) for listener in listeners)

    def repeat(self, listener: Connection) -> None:
        """Send all kept batches to a listener that has just joined, each made in its turn."""
        kept = [(worker, batch) for worker, batches in self._kept.items() for batch in batches]

        def make() -> Iterator[bytes]:
            for worker, batch in kept:
                yield frame(pb.ToClient(report=pb.Report(rounds=batch, worker=worker)))

        if kept:
            listener.stream.send(make, counted=False)


class Observers:
    """Sends news to observers, and to a new one the part of the past that it needs (writer thread).

    Attributes:
        on_status: Makes the status document that supervisors get; None: they get none.
        num_dropped: Reports that supervisors have missed because they did not read them.

    Args:
        connections: Of this shard.
    """

    def __init__(self, connections: Connections) -> None:
        self.on_status: Callable[[], str] | None = None
        self.num_dropped = 0
        self._connections = connections
        self._rounds = RoundsRelay()
        self._epoch: pb.Membership | None = None  # the newest

    def welcome(self, newcomer: Connection, welcome: pb.ToClient, halt: pb.Halt | None) -> None:
        """Admit an observer that has sent its Hello.

        Args:
            newcomer: Its connection.
            welcome: The first message to it.
            halt: The end of the run, if it has ended.
        """
        shows = newcomer.role == pb.ROLE_SUPERVISOR and not newcomer.evaluates
        # It may fail, and then the newcomer gets nothing but a refusal.
        status = self.on_status() if shows and self.on_status is not None else None
        if newcomer.evaluates:
            self._replace_supervisor(newcomer)
        newcomer.send(welcome)
        if newcomer.role == pb.ROLE_SHARD and self._epoch is not None:
            newcomer.send(pb.ToClient(membership=self._epoch))
        if newcomer.evaluates:
            self._rounds.repeat(newcomer)
        elif status is not None:
            newcomer.send(pb.ToClient(report=pb.Report(document=status)))
        if halt is not None and not newcomer.takes_requests:  # it first learns what it has to do
            newcomer.send(pb.ToClient(halt=halt))

    def _replace_supervisor(self, newcomer: Connection) -> None:
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
            other.send(pb.ToClient(refusal=refusal))
            other.stream.close()

    def pass_on_rounds(self, worker: int, batch: str) -> None:
        """Send a worker's rounds to the Supervisor."""
        supervisors = self._connections.with_role(pb.ROLE_SUPERVISOR)
        listeners = [each for each in supervisors if each.evaluates]
        self.num_dropped += self._rounds.take(worker, batch, listeners)

    def publish_status(self) -> None:
        """Send the status document to every supervisor, and to the evaluator."""
        evaluators = self._connections.with_role(pb.ROLE_EVALUATOR)
        listeners = self._connections.with_role(pb.ROLE_SUPERVISOR)
        listeners += [each for each in evaluators if each.takes_requests]
        if self.on_status is not None and listeners:
            report = pb.Report(document=self.on_status())
            self.num_dropped += sum(listener.send_report(report) for listener in listeners)

    def send_epoch(self, epoch: pb.Membership) -> None:
        """Send a new epoch to every following shard."""
        self._epoch = epoch
        for shard in self._connections.with_role(pb.ROLE_SHARD):
            shard.send(pb.ToClient(membership=epoch))

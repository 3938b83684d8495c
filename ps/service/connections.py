"""Open streams of one PS shard; replies to workers, reports to supervisors and other shards."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from thinwire.ops.frozen import FrozenArray
from thinwire.ops.types import Link, ShardLayout, Update
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Frame, frame
from thinwire.proto.grpc import ServerStream
from thinwire.proto.grpc.session import chunk_bytes
from thinwire.ps.core import events
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.service.stream_state import ClientStreamState
from thinwire.ps.wire.replies import (
    SharedBlocks,
    coded_update,
    reply_frames,
    whole_shard,
)


class Connection:
    """Stream of one client of a shard after the client's Hello message."""

    def __init__(self, stream: ServerStream, hello: pb.Hello, incarnation: int) -> None:
        """Wrap the stream of a client that has sent its Hello.

        Args:
            stream: The client's stream of messages.
            hello: Hello message that the client has sent on the stream.
            incarnation: Random number that identifies one start of the client's process; 0 if the
                client has none.
        """
        self.stream = stream
        self.role: int = hello.role
        self.id: int = hello.id
        self.incarnation = incarnation
        self.peer_address: str = hello.peer_address
        self.takes_bulk: bool = hello.bulk
        self.chooser = IndexChooser()
        self.link = Link(hello.link.mbps, hello.link.delay_ms, hello.link.loss)
        self.chunk_bytes = chunk_bytes(self.link, stream.chunks)
        self.evaluates = hello.role == pb.ROLE_SUPERVISOR and len(hello.model) > 0
        self.phase: int = hello.phase
        self.takes_requests = hello.role == pb.ROLE_EVALUATOR and incarnation > 0
        self.left = False
        # Only `Connections` changes the state of a connection.
        self.state = ClientStreamState.WAITING

    def send(self, message: pb.ToClient, counted: bool = False) -> None:
        """Queue a message without payload that the shard sends to a client.

        If `counted` is True, the bytes of the queued message count as training traffic.
        """
        self.stream.send((frame(message),), counted=counted)

    def send_report(self, report: pb.Report) -> int:
        """Queue a status report for a client.

        If a client reads slowly, older status reports in the client's queue are dropped. Return the
        number of older status reports that were dropped from the queue.
        """
        return self.stream.send_report(frame(pb.ToClient(report=report)))


class ReplySender:
    """Sends the shard's replies to a batch of pulls and pushes. Equal updates in replies to several
    workers are encoded once.
    """

    def __init__(
        self,
        layout: ShardLayout,
        generation: int,
        members: Callable[[], list[pb.Member]],
        datagrams: DatagramReceiver | None,
    ) -> None:
        """Start a batch of the shard's replies to pulls and pushes of workers.

        Args:
            layout: Layout of the shard: the slices of variables that it holds.
            generation: Number of times that the shard has been restarted.
            members: Function that returns the workers of the next training round; it is called
                once, at the first reply.
            datagrams: Receiver of UDP datagrams; None if the training method sends no datagrams.
        """
        self._layout, self._generation = layout, generation
        self._find_members, self._datagrams = members, datagrams
        self._members: list[pb.Member] | None = None
        self._shared: dict[int, SharedBlocks] = {}

    def send(self, reply: events.Reply, connection: Connection, counted: bool = True) -> None:
        """Queue one of the shard's replies to a worker's pull or push.

        A reply is encoded by the thread that sends on the worker's stream.
        """
        if self._members is None:
            self._members = self._find_members()
        update = reply.update
        values: Any = update.values if isinstance(update, Update) else None
        if isinstance(values, FrozenArray):
            coded = whole_shard(values.again(), self._layout)
            # The function `coded` has its own reader of the frozen (copy-on-write) array of
            # weights. The reader in `reply` must be freed, because the array copies changing values
            # once for every existing reader.
            reply = dataclasses.replace(reply, update=())
        else:
            coded = coded_update(update, self._layout, self._shared)
        datagrams = self._datagrams
        outcome = datagrams.outcome(reply.worker, reply.step) if datagrams is not None else None
        make: Callable[[], Iterable[Frame]] = functools.partial(
            reply_frames,
            reply,
            self._generation,
            self._members,
            coded,
            connection.chooser,
            connection.chunk_bytes,
            outcome,
        )
        connection.stream.send(make, counted=counted)


class Connections:
    """All open connections of a shard: workers by id, observers by a running number.

    Attributes:
        workers: Worker id -> network connection of the admitted worker.
        observers: Running number -> connection of an observer: a supervisor, an evaluator, a script
            or another shard.
        had_supervisor: True if a supervisor that evaluates has connected.
        was_evaluated: True if a supervisor that evaluates has left with a Leave message.
        had_onlooker: True if any supervisor has connected, even a supervisor that does not
            evaluate.
    """

    def __init__(self) -> None:
        """Start without connections."""
        self.workers: dict[int, Connection] = {}
        self.observers: dict[int, Connection] = {}
        self.had_supervisor = False
        self.was_evaluated = False
        self.had_onlooker = False
        # worker id -> training bytes sent to the worker over streams that are closed by now
        self._closed_bytes: collections.Counter[int] = collections.Counter()
        # worker id -> address at which other workers reach the worker's newest process
        self._peer_addresses: dict[int, str] = {}
        self._numbers = 0
        self._lock = threading.Lock()

    def add_worker(self, connection: Connection) -> None:
        """Register the gRPC stream of a worker that the shard has admitted. The shard closes an
        older stream of a worker that registers a new stream.
        """
        with self._lock:
            old = self.workers.pop(connection.id, None)
            if old is not None:
                self._close(old)
            self.workers[connection.id] = connection
            connection.state = ClientStreamState.ADMITTED
            self._peer_addresses[connection.id] = connection.peer_address

    def drop_worker(self, connection: Connection) -> bool:
        """Remove a worker's closed stream; return False if a newer stream has replaced it."""
        with self._lock:
            if self.workers.get(connection.id) is not connection:
                return False
            del self.workers[connection.id]
            self._close(connection)
            return True

    def end_training(self) -> None:
        """Close the streams of all workers, and of observers that evaluate the model."""
        with self._lock:
            for connection in self.workers.values():
                self._close(connection)
            self.workers.clear()
            evaluators = [observer for observer in self.observers.values() if observer.evaluates]
        for connection in evaluators:
            connection.stream.close()

    def add_observer(self, connection: Connection) -> int:
        """Add an observer, for example a supervisor; return the observer's running number."""
        with self._lock:
            self._numbers += 1
            self.observers[self._numbers] = connection
            connection.state = ClientStreamState.ADMITTED
            self.had_supervisor |= connection.evaluates
            self.had_onlooker |= connection.role == pb.ROLE_SUPERVISOR
            return self._numbers

    def drop_observer(self, number: int) -> None:
        """Remove an observer by its running number."""
        with self._lock:
            removed = self.observers.pop(number, None)
            self.was_evaluated |= removed is not None and removed.evaluates and removed.left

    def with_role(self, role: int) -> list[Connection]:
        """Return the observers (clients other than workers) of one role, for example the
        supervisors.
        """
        with self._lock:
            return [observer for observer in self.observers.values() if observer.role == role]

    def members(self, incarnations: Iterable[tuple[int, int]]) -> list[pb.Member]:
        """Return the addresses at which the connected workers reach each other.

        Args:
            incarnations: Worker id and incarnation (process number) of each worker that has a
                lease.
        """
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
        """Return the open network connections of all workers and observers."""
        with self._lock:
            return [*self.workers.values(), *self.observers.values()]

    def bytes_down(self) -> dict[int, int]:
        """Return worker id -> training bytes sent to the worker, over open and closed streams."""
        with self._lock:
            totals = dict(self._closed_bytes)
            for worker, connection in self.workers.items():
                totals[worker] = totals.get(worker, 0) + connection.stream.bytes_sent
            return totals

    def restore_bytes_down(self, totals: Mapping[int, int]) -> None:
        """Set the counts of sent training bytes to the totals before a restart of the shard."""
        self._closed_bytes = collections.Counter(totals)

    def _close(self, connection: Connection) -> None:
        connection.state = ClientStreamState.REPLACED
        self._closed_bytes[connection.id] += connection.stream.bytes_sent
        connection.stream.close()

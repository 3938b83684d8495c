"""Network server of a PS shard: reader threads queue messages, one writer thread runs the state
machine.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable

from absl import logging

from thinwire.ops.routing.base import Router
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import GrpcServer, ServerStream
from thinwire.proto.grpc.session import beat_seconds
from thinwire.proto.moved import ShardDirectory
from thinwire.proto.udp.sockets import stream_dscp
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.containment import ClientRequest
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.shard_admission import PhaseGate, ShardAdmission
from thinwire.ps.service.state import ShardState
from thinwire.ps.service.stream_reader import StreamReader
from thinwire.ps.service.writer import ShardWriter
from thinwire.runtime.run.settings import NOBODY_ADMITTED

_STATUS_INTERVAL_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 0.5
#: Seconds between checks of the scripts' deadlines. The deadlines are several seconds long.
_SCRIPTS_SECONDS = 0.25
#: Seconds after which one iteration of the writer thread's loop shows that the process was stopped
#: or got no CPU time.
_STALL_SECONDS = 1.0
#: Seconds for which a shard counts as behind its workers' messages after its queue has last been
#: non-empty.
_BEHIND_SECONDS = 0.05


def dscp_of(router: Router, marks: str) -> int | None:
    """Return the DSCP value (IP priority) of a shard's gRPC streams; None for the system's default.

    Args:
        router: Routing policy of the training method, which may use UDP datagrams.
        marks: Value of the flag that selects how IP packets get priorities (DSCP) if the router has
            datagram channels.
    """
    return stream_dscp(marks, router.channels) if router.channels else None


class ShardServer(ShardState):
    """Network server of one shard of the parameter server: its port, and its writer thread's loop.

    Attributes:
        writer: Handler of events on the writer thread.
        observers: Sender of models, reports and epochs to clients that send no updates.
        scripts: The control streams between the shard and the workers' scripts.
        phases: Acceptor of the script's next model from workers; None if the model cannot change.
    """

    def __post_init__(self) -> None:
        """Make the objects that serve the clients."""
        super().__post_init__()
        self.phases: PhaseGate | None = None
        self.writer = ShardWriter(self)
        self.observers, self.scripts = self.writer.observers, self.writer.scripts
        self._due = dict.fromkeys(("status", "beat", "scripts"), time.monotonic())
        self.served = self._equipped(self.served)

    def _equipped(self, served: ServedModel) -> ServedModel:
        """Return a model with its datagram port, if its training method sends datagrams."""
        served.core.model.freezer.turn_on(lambda values: self.copied(values))
        if not served.core.model.method.router.uses_datagrams:
            return served
        sizes = [piece.size for piece in served.layout.slices]
        port = DatagramPort(served.core, served.decoder, sizes, self.queue.put, self.writer.reject)
        return dataclasses.replace(served, datagrams=port)

    def begin_phase(self, served: ServedModel) -> None:
        """Serve the script's next model instead of the current one (called on the writer thread).

        During the change of the model, the shard admits no client until `open_for` is called.
        After a change of the model, workers and supervisors that evaluate must connect again.

        Args:
            served: The script's next model, whose state machine continues the run.
        """
        self.identity = None
        received = self.received() or DatagramCounts()
        if self.datagrams is not None:
            self.datagrams.close()
        self.served = self._equipped(served)
        self.journaled.continue_with(served.core)
        if self.datagrams is not None:
            self.datagrams.receiver.restore(received)
        self.observers.begin_phase()
        self.connections.end_training()

    # -- the port and its clients -----------------------------------------------------------

    def listen(self, bind: str, port: int, marks: str = "off") -> int:
        """Open the shard's network port and start to accept clients; return the port number.

        Args:
            bind: IP address of this machine to listen on.
            port: TCP port number to listen on; 0 to use any free port.
            marks: Value of the flag that selects how IP packets get priorities (DSCP) if the router
                has datagram channels.

        Raises:
            thinwire.proto.grpc.PortInUse: Another process already listens at the port.
        """
        dscp = dscp_of(self.core.model.method.router, marks)
        self.server = GrpcServer(bind, port, self._read, dscp=dscp, guard=self.guard)
        return self.server.port

    def take_over(self, listening: GrpcServer) -> int:
        """Serve the streams of a network port that is already open; return the port number."""
        self.server = listening
        listening.handler = self._read
        return listening.port

    def open_for(self, identity: Identity, document: str) -> None:
        """Begin to accept the Hello messages of clients that match the given identity of the
        shard.
        """
        self.document = document
        if self.identity is None and not identity.shard and not self.directory.addresses:
            self.directory = ShardDirectory(identity.num_shards)
        self.identity = identity
        if self.server is not None:
            self.server.set_serving(True)

    def _read(self, stream: ServerStream) -> None:
        self.reader_of(stream).read()

    def reader_of(self, stream: ServerStream) -> StreamReader:
        """Return a reader of the stream of a client that has sent no Hello yet."""
        admission = ShardAdmission(self.writer, self.phases)
        return StreamReader(stream, self.guard, self.queue.put, admission)

    # -- methods of the writer thread -------------------------------------------------------

    def run_until(self, finished: Callable[[], bool]) -> None:
        """Run the loop of the writer thread until `finished` returns True."""
        before = behind_until = time.monotonic()
        while not finished():
            deadline = min(*self._due.values(), *self._deadlines())
            patience = min(_LONGEST_WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
            try:
                item = self.queue.get(timeout=patience)
            except queue.Empty:
                item = events.Tick()
            now = time.monotonic()
            # Heartbeats that arrived while the process was stalled are still in the queue. Extend
            # all deadlines before the first deadline is checked; otherwise workers that have sent
            # heartbeats would be expelled.
            if now - before > _STALL_SECONDS:
                self.writer.handle(events.ProcessStalled(now - before), now)
                self.scripts.excuse(now - before)
            before = now
            if self.queue.qsize():
                behind_until = now + _BEHIND_SECONDS
            self.core.is_behind = now < behind_until
            if isinstance(item, ClientRequest):
                self.contained.serve(item)
            elif callable(item):
                item()
            else:
                self.writer.handle(item, time.monotonic())
            # drop the reference, so that a handled push is freed before `get` waits
            item = events.Tick()
            self._do_regular_work(time.monotonic())

    def _deadlines(self) -> list[float]:
        """Return the next deadlines of the shard's state machine and of pushes that wait for
        missing datagrams.
        """
        deadlines = [self.core.next_deadline()]
        if self.datagrams is not None:
            deadlines.append(self.datagrams.receiver.next_deadline())
        return [when for when in deadlines if when is not None]

    def _do_regular_work(self, now: float) -> None:
        if self.datagrams is not None:
            self.datagrams.poll()
        if now >= self._due["scripts"]:
            self.contained.run("look after scripts", self.scripts.tick)
            self._due["scripts"] = now + _SCRIPTS_SECONDS
        if self.phases is not None:
            self.contained.run("look after offers", self.phases.tick)
        if self.core.stop_reason is None and self.watch is not None:
            self._end_if_nobody_comes(self.watch, now)
        if now >= self._due["status"]:
            self._due["status"] = now + _STATUS_INTERVAL_SECONDS
            self.observers.publish_status()
        if now >= self._due["beat"]:
            self._due["beat"] = now + beat_seconds(self.lease_seconds)
            for connection in self.connections.everyone():
                connection.send(pb.ToClient(waiting=pb.Waiting()))

    def _end_if_nobody_comes(self, watch: AdmissionWatch, now: float) -> None:
        """End the run if the PS has refused all workers."""
        if (why := watch.verdict()) is not None:
            logging.error("%s", why)
            self.writer.handle(events.Stop(NOBODY_ADMITTED), now)

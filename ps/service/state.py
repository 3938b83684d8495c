"""What all parts of a serving PS shard share: its model, its clients, and its queue of events."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops import buffers
from thinwire.ops.frozen import Copy
from thinwire.ops.sync.base import Draw
from thinwire.ops.types import ShardLayout, State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import GrpcServer
from thinwire.proto.moved import ShardDirectory
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.ps.persistence.journal import JournaledCore
from thinwire.ps.programs import Programs
from thinwire.ps.scripts.ended_models import EndedModels
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.connections import Connection, Connections
from thinwire.ps.service.containment import Containment, WriterQueue
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.runtime.run.spill import Spill


@dataclasses.dataclass(frozen=True)
class ServerHooks:
    """Functions that a shard's server calls on its writer thread; none may block.

    Attributes:
        save: Function called with (version, state) of a snapshot that must be saved.
        status: Function that returns the status document for supervisors; None to send no status.
        on_groups: Function called with the worker groups that shard 0 has formed by speed.
        on_draws: Function called with the newest draws (workers that take part in a round).
        on_unreachable: Function called with the workers from which a shard with id 1 or higher
            receives no messages.
        on_journal_failed: Function called once, when the journal cannot be written.
    """

    save: Callable[[int, State], None] = lambda version, state: None
    status: Callable[[], str] | None = None
    on_groups: Callable[[events.GroupsChanged], None] = lambda action: None
    on_draws: Callable[[Sequence[Draw]], None] = lambda draws: None
    on_unreachable: Callable[[events.WorkersUnreachable], None] = lambda action: None
    on_journal_failed: Callable[[], None] = lambda: None


@dataclasses.dataclass(eq=False)
class ShardState:
    """State of a serving shard, which its threads and the objects on them share.

    Attributes:
        served: The model that the shard serves in the current phase; the writer thread replaces it.
        lease_seconds: Time in seconds without a message of a worker, after which the worker is
            expelled; sent to the workers.
        hooks: Functions that are called on the writer thread.
        guard: Object that authenticates clients and limits their streams and messages.
        programs: Program (script and versions) of each worker of the run.
        ended_models: Final models of the run's earlier phases.
        reports: (role, id) of a node -> newest JSON document that the node sent, also before a
            restart.
        watch: Object that detects that the shard refuses all workers; None to wait without limit.
        spill: Allocator that keeps received payloads, and copies of weights for slow clients, in
            files to save memory; None to keep all in memory.
        journaled: State machine of the shard, with the journal of its events.
        contained: Object that runs work whose failure must not end the writer thread.
        queue: Queue of events and calls for the shard's writer thread.
        connections: All open client connections of the shard.
        identity: Identity of the shard; None before the shard can accept a client's Hello.
        directory: Addresses of all shards; filled on shard 0 only.
        document: JSON text of the run's settings in the Welcome message to supervisors and shards.
        server: Open network port; None before the shard listens.
    """

    served: ServedModel
    lease_seconds: float
    hooks: ServerHooks = dataclasses.field(default_factory=ServerHooks)
    guard: ConnectionGuard = dataclasses.field(default_factory=ConnectionGuard)
    programs: Programs = dataclasses.field(default_factory=Programs)
    ended_models: EndedModels = dataclasses.field(default_factory=EndedModels)
    reports: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    watch: AdmissionWatch | None = None
    spill: Spill | None = None

    def __post_init__(self) -> None:
        """Make the parts that every shard has."""
        self.payloads: Callable[[int], NDArray[Any]] = buffers.buffer
        self.copied: Copy = buffers.copied
        if self.spill is not None:
            self.payloads, self.copied = self.spill.buffer, self.spill.copied
        self.journaled = JournaledCore(self.served.core, self.hooks.on_journal_failed)
        self.contained = Containment(lambda: self.guard)
        self.queue: WriterQueue = queue.SimpleQueue()
        self.connections = Connections()
        self.identity: Identity | None = None
        self.directory = ShardDirectory(1)
        self.document = "{}"
        self.server: GrpcServer | None = None

    @property
    def core(self) -> PsCore:
        """State machine of the shard in the current phase."""
        return self.served.core

    @property
    def layout(self) -> ShardLayout:
        """Layout of the shard: the slices of variables that it holds."""
        return self.served.layout

    @property
    def datagrams(self) -> DatagramPort | None:
        """Port that receives UDP datagrams; None if the training method sends no datagrams."""
        return self.served.datagrams

    def received(self) -> DatagramCounts | None:
        """Return the counts of received datagrams; None if the training method sends none."""
        port = self.datagrams
        return port.counts() if port is not None else None

    @property
    def version(self) -> int:
        """Number of updates that the shard's state machine has applied so far."""
        return self.core.version

    def welcome_message(
        self, connection: Connection, action: events.Welcome | None = None
    ) -> pb.ToClient:
        """Return the answer to a client's Hello; `action` admits a worker."""
        identity = self.identity
        welcome = pb.Welcome(
            run_id=identity.run_id if identity else "",
            epoch=self.core.membership.epoch,
            generation=self.core.config.generation,
            version=self.core.version,
            lease_seconds=self.lease_seconds,
            document=self.document,
            addresses=self.directory.addresses,
        )
        if connection.takes_bulk and (offered := connection.stream.offer_bulk()) is not None:
            welcome.bulk.CopyFrom(offered)
        if action is not None:
            welcome.incarnation = action.incarnation
            welcome.last_applied_step = action.last_step
            welcome.knows_worker = action.knows_worker
            if self.datagrams is not None:
                self.datagrams.fill_welcome(action.worker, action.incarnation, welcome)
        return pb.ToClient(welcome=welcome)

"""gRPC around the core: reader threads validate and queue, one writer thread runs `handle`."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from thinwire.ops import buffers
from thinwire.ops.frozen import Copy
from thinwire.ops.optimizers.slots import OptimizerState, whole_slots
from thinwire.ops.optimizers.slots import encode as encode_slots
from thinwire.ops.routing.base import Router
from thinwire.ops.sync.base import Draw
from thinwire.ops.sync.groups import format_groups, uneven
from thinwire.ops.types import Kind, ShardLayout, State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frames
from thinwire.proto.grpc import GrpcServer, ServerStream, serve
from thinwire.proto.grpc.session import beat_seconds
from thinwire.proto.moved import ShardDirectory
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.proto.udp import stream_dscp
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.ps.persistence.journal import JournaledCore
from thinwire.ps.programs import Programs
from thinwire.ps.scripts.barriers import Barriers
from thinwire.ps.scripts.ended_models import EndedModels
from thinwire.ps.scripts.run_control import RunControl
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.connections import Connection, Connections, Observers, ReplySender
from thinwire.ps.service.containment import ClientRequest, Containment, WriterQueue
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.stream_reader import PhaseGate, StreamReader
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.epochs import encode_epoch
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.runtime.run.settings import NOBODY_ADMITTED
from thinwire.runtime.run.spill import Spill

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATUS_INTERVAL_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 0.5
#: Between two looks at what scripts wait for in vain: leases and patience are of seconds.
_SCRIPTS_SECONDS = 0.25
#: A turn of the loop that took so much longer means that the process was stopped, or starved.
_STALL_SECONDS = 1.0
#: A shard for which something has waited is behind for so long.
_BEHIND_SECONDS = 0.05
#: A push refused for these reasons does not come again; nor is what comes late of it wanted.
_GIVEN_UP = ("OUTLIER", "STALE_GENERATION")
#: A push that a change of members has overtaken is sent again; nothing is wrong.
_OF_ANY_CHANGE = "STALE_EPOCH"
#: Refusals that the core's accounts count; the guard counts the others.
_COUNTED_BY_CORE = ("NON_FINITE", *_GIVEN_UP)


def dscp_of(router: Router, marks: str) -> int | None:
    """Return the class of service of a shard's streams; None: the system's own.

    Args:
        router: Of the method.
        marks: How priorities are marked, where the router has channels beside the stream.
    """
    return stream_dscp(marks, router.channels) if router.channels else None


class ShardServer:
    """One shard on the network.

    Args:
        core: The state machine.
        layout: Of this shard.
        share: This shard's part of the model, for emulated links.
        save: Takes (version, state) of a snapshot; must not block.
        lease_seconds: Sent to workers.
        bounds: Of what workers may claim; None: by the method alone.
        groups: Slices that each optimizer of the script steps; empty: one steps all.
    """

    def __init__(
        self,
        core: PsCore,
        layout: ShardLayout,
        share: float,
        save: Callable[[int, State], None],
        lease_seconds: float,
        bounds: ClaimBounds | None = None,
        groups: Sequence[Collection[int]] = (),
    ) -> None:
        self.core = core
        self.journaled = JournaledCore(core)
        self.save, self.lease_seconds = save, lease_seconds
        self.guard = ConnectionGuard()
        self.contained = Containment(lambda: self.guard)
        self.queue: WriterQueue = queue.SimpleQueue()
        self._take_model(layout, share, bounds or ClaimBounds.of(core.model.method), groups)
        self.phases: PhaseGate | None = None
        self.ended_models = EndedModels()
        self.programs = Programs()
        self.connections = Connections()
        self.identity: Identity | None = None  # None: not ready to accept a Hello
        self.directory = ShardDirectory(1)  # of all shards, where this is shard 0
        self.document = "{}"  # of the run, for supervisors and shards, in Welcome
        self.reports: dict[tuple[int, int], str] = {}  # (role, id) -> newest JSON document
        self.observers = Observers(self.connections)
        self.payloads: Callable[[int], NDArray[Any]] = buffers.buffer
        self.copied: Copy = buffers.copied
        barriers = Barriers(
            core.config.nb_workers, lease_seconds, core.config.start_timeout_seconds
        )
        self.scripts = RunControl(
            barriers,
            lease_seconds,
            self.queue.put,
            lambda: core.version,
            core.waiting_workers,
            self._publish_status,
        )
        self.on_groups: Callable[[events.GroupsChanged], None] | None = None
        self.on_draws: Callable[[Sequence[Draw]], None] | None = None
        self.on_unreachable: Callable[[events.WorkersUnreachable], None] | None = None
        self._num_epochs = 0  # announced
        self._welcomes: dict[int, Connection] = {}  # incarnation -> connection of its Hello
        # Version, whether with weights, document and arrays of the slots that were sent last.
        self._slots: tuple[tuple[int, bool], str, list[memoryview]] | None = None
        self.watch: AdmissionWatch | None = None
        self._due = dict.fromkeys(("status", "beat", "scripts"), time.monotonic())
        self.server: GrpcServer | None = None

    def wait_in(self, spill: Spill) -> None:
        """Let payloads that arrive, and what is put aside for readers, wait in files."""
        self.payloads, self.copied = spill.buffer, spill.copied

    def _take_model(
        self,
        layout: ShardLayout,
        share: float,
        bounds: ClaimBounds,
        groups: Sequence[Collection[int]],
    ) -> None:
        """Be ready for the pushes of the core's model."""
        core, model = self.core, self.core.model
        model.freezer.turn_on(lambda values: self.copied(values))
        self.layout, self.share, self.bounds = layout, share, bounds
        self.decoder = PushDecoder(
            *(layout, model.kind, model.kernels, core.averages.size, bounds, groups),
            keeps_blocks=model.method.down_codec.relays,
        )
        self.datagrams: DatagramPort | None = None
        if model.method.router.uses_datagrams:
            sizes = [piece.size for piece in layout.slices]
            put, reject = self.queue.put, self._reject
            self.datagrams = DatagramPort(core, self.decoder, sizes, put, reject)

    def begin_phase(
        self,
        layout: ShardLayout,
        share: float,
        bounds: ClaimBounds,
        groups: Sequence[Collection[int]],
    ) -> None:
        """Go on with another model, which the core has already (writer thread).

        Nobody is admitted from here to `open_for`. Workers, and who evaluates, must join anew.

        Args:
            layout: Of this shard, from now on.
            share: This shard's part of the model.
            bounds: Of what workers may claim.
            groups: Slices that each optimizer of the script steps; empty: one steps all.
        """
        self.identity = None
        if self.datagrams is not None:
            self.datagrams.close()
        self._take_model(layout, share, bounds, groups)
        self._slots = None
        self.connections.end_training()

    def listen(self, bind: str, port: int, marks: str = "off") -> int:
        """Start to listen; return the port.

        Args:
            bind: The address.
            port: 0: a free one.
            marks: How priorities are marked, where the router has channels beside the stream.

        Raises:
            thinwire.proto.grpc.PortInUse: Somebody else has it.
        """
        dscp = dscp_of(self.core.model.method.router, marks)
        self.server = serve(bind, port, self._read, dscp=dscp, guard=self.guard)
        return self.server.port

    def take_over(self, listening: GrpcServer, guard: ConnectionGuard) -> int:
        """Serve the streams of a port that is open already; return the port."""
        self.server, self.guard = listening, guard
        listening.hand_over(self._read)
        return listening.port

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self.core.version

    def open_for(self, identity: Identity, document: str) -> None:
        """Begin to accept Hellos."""
        self.document = document
        if self.identity is None and not identity.shard and not self.directory.addresses:
            self.directory = ShardDirectory(identity.num_shards)
        self.identity = identity
        if self.server is not None:
            self.server.set_serving(True)

    def _read(self, stream: ServerStream) -> None:
        StreamReader(self, self.decoder, stream).read()

    def expect(self, incarnation: int, connection: Connection) -> None:
        """Remember the stream of a Hello until the core has decided (reader threads)."""
        self._welcomes[incarnation] = connection

    def lose(self, connection: Connection) -> None:
        """Note that a worker's stream has ended (reader threads).

        It takes its turn behind the stream's own Hello: the worker may not be known before.
        """

        def lose() -> None:
            if self.connections.drop_worker(connection):
                lost = events.WorkerDisconnected(connection.id, connection.incarnation)
                self._dispatch(self.journaled.handle(lost, time.monotonic()))

        self.queue.put(lose)

    def welcome_observer(self, connection: Connection) -> None:
        """Admit a supervisor or a following shard (reader threads)."""

        def welcome() -> None:
            halt = self._halt()
            self.observers.welcome(connection, self._welcome_message(connection), halt)
            if connection.takes_requests:
                self.scripts.begin_evaluator(connection)
                if halt is not None:
                    connection.send(pb.ToClient(halt=halt))

        self.queue.put(ClientRequest(connection, "a Hello", welcome))

    def observe(self, connection: Connection, number: int) -> None:
        """Send an observer the whole model, an evaluator that of its phase (writer thread)."""
        phase = connection.phase
        if connection.role != pb.ROLE_EVALUATOR or phase >= self.ended_models.since:
            # No event of the core: a failure must not look like one of its state.
            self._dispatch([events.EvaluationReply(number, self.core.whole())])
        elif (ended := self.ended_models.find(phase)) is not None:
            sender = ReplySender(ended.layout, ended.generation, self._members, None)
            sender.send(ended.reply, connection, counted=False)
        else:
            text = f"phase: what the script's phase {phase} ended with is not kept any more."
            refusal = pb.Refusal(reason=pb.REASON_PHASE, message=text)
            connection.send(pb.ToClient(refusal=refusal))

    def welcome_script(self, connection: Connection) -> None:
        """Admit the script of a worker (writer thread); without incarnation for slots alone."""
        connection.send(self._welcome_message(connection))
        if not connection.incarnation:
            return
        if (halt := self._halt()) is not None:
            connection.send(pb.ToClient(halt=halt))
        self.scripts.begin(connection)

    def send_slots(self, connection: Connection, weights: bool) -> None:
        """Send the state of the optimizer between two updates (writer thread).

        All scripts request it after the same update, so they are sent the same arrays.

        Args:
            connection: Of the script.
            weights: Whether the weights, and averaged statistics, are wanted as well.
        """
        key = (self.core.version, weights)
        if self._slots is None or self._slots[0] != key:
            model = self.core.model
            beside = model.scale_slots()
            if weights:
                beside += whole_slots(model.theta, self.layout, self.core.averages.statistics)
            states = [*model.slots(), OptimizerState(beside, 0.0)]
            self._slots = (key, *encode_slots(states))
        _, document, pieces = self._slots
        message = pb.ToClient(slots=pb.Slots(document=document))
        connection.stream.send(functools.partial(frames, message, pieces), counted=False)

    # -- the writer thread ------------------------------------------------------------------

    def run_until(self, finished: Callable[[], bool]) -> None:
        """Be the writer thread until `finished`."""
        before = behind_until = time.monotonic()
        while not finished():
            deadline = min(*self._due.values(), *self._deadlines())
            patience = min(_LONGEST_WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
            try:
                item = self.queue.get(timeout=patience)
            except queue.Empty:
                item = events.Tick()
            now = time.monotonic()
            if now - before > _STALL_SECONDS:  # messages of meanwhile still are in the queue
                self._dispatch(self.journaled.handle(events.ProcessStalled(now - before), now))
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
                self._dispatch(self.journaled.handle(item, time.monotonic()))
            item = events.Tick()  # a push must not stay until the next item comes
            self._do_regular_work(time.monotonic())

    def _deadlines(self) -> list[float]:
        """Return when the core, and pushes that wait for datagrams, are due."""
        deadlines = [self.core.next_deadline()]
        if self.datagrams is not None:
            deadlines.append(self.datagrams.receiver.next_deadline())
        return [when for when in deadlines if when is not None]

    def _do_regular_work(self, now: float) -> None:
        if self.datagrams is not None:
            self.datagrams.poll()
        if now >= self._due["scripts"]:
            self.contained.run("look after scripts", self.scripts.tick)
            latest = now + _SCRIPTS_SECONDS  # a message may bring another deadline meanwhile
            self._due["scripts"] = min(latest, self.scripts.next_deadline() or latest)
        if self.phases is not None:
            self.contained.run("look after offers", self.phases.tick)
        if self.core.stop_reason is None and self.watch is not None:
            self._end_if_nobody_comes(self.watch, now)
        if now >= self._due["status"]:
            self._due["status"] = now + _STATUS_INTERVAL_SECONDS
            self._publish_status()
        if now >= self._due["beat"]:
            self._due["beat"] = now + beat_seconds(self.lease_seconds)
            for connection in self.connections.everyone():
                connection.send(pb.ToClient(waiting=pb.Waiting()))

    def _publish_status(self) -> None:
        """Send the status to everybody who watches, if it can be made."""
        self.contained.run("make the status", self.observers.publish_status)

    def _end_if_nobody_comes(self, watch: AdmissionWatch, now: float) -> None:
        """End a run whose workers were all refused: there would never be another."""
        if (why := watch.verdict()) is not None:
            logging.error("%s", why)
            self._dispatch(self.journaled.handle(events.Stop(NOBODY_ADMITTED), now))

    def _dispatch(self, actions: list[events.Action]) -> None:
        generation = self.core.config.generation
        receiver = self.datagrams.receiver if self.datagrams is not None else None
        replies = ReplySender(self.layout, generation, self._members, receiver)
        for action in actions:
            if isinstance(action, events.Reply):
                connection = self.connections.workers.get(action.worker)
                if connection is not None:
                    send = functools.partial(replies.send, action, connection)
                    self.contained.serve(ClientRequest(connection, "a reply", send))
            elif isinstance(action, events.EvaluationReply):
                observer = self.connections.observers.get(action.observer)
                if observer is not None:
                    replies.send(action.reply, observer, counted=False)
            elif isinstance(action, events.Answer | events.Reject):
                send = functools.partial(self._actions[type(action)], self, action)
                self.contained.run("an answer to a worker", send)
            else:
                self._actions[type(action)](self, action)

    def _members(self) -> list[pb.Member]:
        """Return who sums with whom, if workers do that among themselves."""
        core = self.core
        if core.model.kind is not Kind.VALUES:
            return []
        live = core.live_workers()
        return self.connections.members((w, core.incarnation_of(w)) for w in live)

    def _welcome(self, action: events.Welcome) -> None:
        connection = self._welcomes.pop(action.incarnation, None)
        if connection is None or self.identity is None:
            return
        self.connections.add_worker(connection)
        if self.watch is not None:
            self.watch.admitted()

        def welcome() -> None:
            connection.send(self._welcome_message(connection, action))

        self.contained.serve(ClientRequest(connection, "a Hello", welcome))
        logging.info("worker %d joined (%s)", action.worker, connection.stream.peer)

    def _welcome_message(
        self, connection: Connection, action: events.Welcome | None = None
    ) -> pb.ToClient:
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

    def _reject(self, action: events.Reject) -> None:
        refusal = pb.Refusal(
            reason=f"REASON_{action.reason}",
            message=action.message,
            step=action.step,
            epoch=action.epoch,
            retry_after_seconds=action.retry_after_seconds,
        )
        if action.reason in _GIVEN_UP and self.datagrams is not None:
            self.datagrams.receiver.on_push_refused(action.worker, action.step)
        if not action.is_notice and action.reason not in _COUNTED_BY_CORE:
            self.guard.count_refusal(action.reason.lower())
        hello = self._welcomes.pop(action.incarnation, None) if action.step == 0 else None
        connection = hello or self.connections.workers.get(action.worker)
        if connection is not None:
            connection.send(pb.ToClient(refusal=refusal))
            if hello is not None:
                connection.stream.close()
        if action.is_notice:
            return
        # A client that insists must not fill the disk.
        level = logging.INFO if action.reason == _OF_ANY_CHANGE else logging.WARNING
        logging.log_every_n_seconds(
            level, "refused worker %d: %s", 1, action.worker, action.message
        )

    def _answer(self, action: events.Answer) -> None:
        connection = self.connections.workers.get(action.worker)
        if connection is not None:
            answer = pb.Answer(step=action.step, local_steps=action.local_steps, ready=action.ready)
            connection.send(pb.ToClient(answer=answer), counted=True)

    def _new_epoch(self, action: events.NewEpoch) -> None:
        epoch = action.epoch
        if self.datagrams is not None:
            self.queue.put(self.datagrams.end_sessions)  # after all epochs that come together
        if self.core.stop_reason is None and epoch.number != self._num_epochs:
            logging.info("epoch %d: live workers %s", epoch.number, list(epoch.live))
        self._num_epochs = epoch.number  # a draw begins no other one
        if epoch.draws and self.on_draws is not None:
            self.on_draws(epoch.draws)
        self.observers.send_epoch(encode_epoch(epoch, self.core.groups))

    def _report_unreachable(self, action: events.WorkersUnreachable) -> None:
        workers = [each.worker for each in action.members]
        logging.info("silent here for %g s: workers %s", self.lease_seconds, workers)
        if self.on_unreachable is not None:
            self.on_unreachable(action)

    def _groups_changed(self, action: events.GroupsChanged) -> None:
        logging.info("groups by speed: %s", format_groups(action.groups))
        if warning := uneven(action.groups):
            logging.warning("%s", warning)
        if self.on_groups is not None:
            self.on_groups(action)

    def _snapshot(self, action: events.SaveSnapshot) -> None:
        self.save(action.version, action.state)

    def _halt(self) -> pb.Halt | None:
        """Return what notifies others of the end of the run; None: it has not ended."""
        reason = self.core.stop_reason
        return pb.Halt(cause=reason, message=self.scripts.why(reason)) if reason else None

    def _ended(self, action: events.RunEnded) -> None:
        logging.info("run ended at version %d: %s", self.core.version, action.reason)
        self._publish_status()
        for connection in self.connections.everyone():
            connection.send(pb.ToClient(halt=self._halt()))
        if self.server is not None:
            self.server.set_serving(False)

    _actions: ClassVar[dict[type, Any]] = {
        events.Welcome: _welcome,
        events.Reject: _reject,
        events.Answer: _answer,
        events.NewEpoch: _new_epoch,
        events.WorkersUnreachable: _report_unreachable,
        events.GroupsChanged: _groups_changed,
        events.SaveSnapshot: _snapshot,
        events.RunEnded: _ended,
    }

"""Network server of a PS shard: reader threads queue messages, one writer thread runs the state
machine.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from thinwire.ops import buffers
from thinwire.ops.frozen import Copy
from thinwire.ops.optimizers.slots import OptimizerState, whole_slots
from thinwire.ops.optimizers.slots import encode as encode_slots
from thinwire.ops.routing.base import Router
from thinwire.ops.sync.groups import format_groups, uneven
from thinwire.ops.types import Kind, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frames
from thinwire.proto.grpc import GrpcServer, ServerStream
from thinwire.proto.grpc.session import beat_seconds
from thinwire.proto.moved import ShardDirectory
from thinwire.proto.udp.sockets import stream_dscp
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.ps.persistence.journal import JournaledCore
from thinwire.ps.scripts.barriers import Barriers
from thinwire.ps.scripts.run_control import RunControl
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.connections import Connection, Connections, Observers, ReplySender
from thinwire.ps.service.containment import ClientRequest, Containment, WriterQueue
from thinwire.ps.service.dialogues.base import ConnectedDialogue, RemoteClient, ShardSide
from thinwire.ps.service.dialogues.evaluator import EvaluatorDialogue
from thinwire.ps.service.dialogues.follower import FollowerDialogue
from thinwire.ps.service.dialogues.observer import ObserverSide
from thinwire.ps.service.dialogues.script import ScriptDialogue
from thinwire.ps.service.dialogues.supervisor import SupervisorDialogue
from thinwire.ps.service.dialogues.worker import (
    ModelIntake,
    WorkerAccounts,
    WorkerDialogue,
    largest_push,
)
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server_parts import ServerHooks, ServerParts
from thinwire.ps.service.shard_admission import ShardAdmission
from thinwire.ps.service.stream_reader import StreamReader
from thinwire.ps.wire.epochs import encode_epoch
from thinwire.runtime.run.settings import NOBODY_ADMITTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
#: Rejection reasons after which a worker gives up a push. The shard then drops the push's late
#: datagrams.
_GIVEN_UP = ("OUTLIER", "STALE_GENERATION")
#: Rejection reason of a push from before a change of the members. Such a rejection is normal, and
#: the worker repeats the push.
_OF_ANY_CHANGE = "STALE_EPOCH"
#: Rejection reasons that the core counts. The connection guard counts all other refusals.
_COUNTED_BY_CORE = ("NON_FINITE", *_GIVEN_UP)
_NO_HOOKS = ServerHooks()


def dscp_of(router: Router, marks: str) -> int | None:
    """Return the DSCP value (IP priority) of a shard's gRPC streams; None for the system's default.

    Args:
        router: Routing policy of the training method, which may use UDP datagrams.
        marks: Value of the flag that selects how IP packets get priorities (DSCP) if the router has
            datagram channels.
    """
    return stream_dscp(marks, router.channels) if router.channels else None


class ShardServer:
    """Network server of one shard of the parameter server.

    Attributes:
        served: The model that the shard serves in the current phase; the writer thread replaces it.
        journaled: State machine of the shard, with the journal of its events.
        guard: Object that authenticates clients and limits their streams and messages.
        queue: Queue of events and calls for the shard's writer thread.
        connections: All open client connections of the shard.
        observers: Object that sends status reports to supervisors, and membership epochs to other
            shards.
        scripts: The control streams between the shard and the workers' scripts.
        server: Open network port; None before `listen` or `take_over`.

    Args:
        served: The model that the shard serves first.
        lease_seconds: Time in seconds without a message of a worker, after which the worker is
            expelled; sent to the workers.
        hooks: Functions that the server calls on its writer thread.
        parts: Objects that the server uses and does not make.
    """

    def __init__(
        self,
        served: ServedModel,
        lease_seconds: float,
        hooks: ServerHooks = _NO_HOOKS,
        parts: ServerParts | None = None,
    ) -> None:
        parts = parts or ServerParts()
        self._hooks, self.lease_seconds = hooks, lease_seconds
        self.guard, self.programs, self.watch = parts.guard, parts.programs, parts.watch
        self.phases, self.ended_models = parts.phases, parts.ended_models
        # (role, id) of a node -> newest JSON document that the node sent
        self.reports = parts.reports
        self.payloads: Callable[[int], NDArray[Any]] = buffers.buffer
        self.copied: Copy = buffers.copied
        if parts.spill is not None:
            self.payloads, self.copied = parts.spill.buffer, parts.spill.copied
        self.journaled = JournaledCore(served.core, hooks.on_journal_failed)
        self.contained = Containment(lambda: self.guard)
        self.queue: WriterQueue = queue.SimpleQueue()
        self.connections = Connections()
        # Identity of the shard; None before the shard can accept a client's Hello.
        self.identity: Identity | None = None
        self.directory = ShardDirectory(1)  # addresses of all shards; filled on shard 0 only
        # JSON text of the run's settings in the Welcome message to supervisors and shards
        self.document = "{}"
        self.observers = Observers(self.connections, hooks.status)
        config = served.core.config
        self.scripts = RunControl(
            Barriers(config.nb_workers, lease_seconds, config.start_timeout_seconds),
            lease_seconds,
            self.queue.put,
            lambda: self.core.version,
            lambda: self.core.rounds.waiting(),
            self._publish_status,
        )
        self._num_epochs = 0  # number of the newest membership epoch that was logged
        # worker's incarnation -> connection on which the worker's Hello arrived
        self._welcomes: dict[int, Connection] = {}
        # Encoded optimizer state that was last sent to a script: ((version, includes weights),
        # document, arrays).
        self._slots: tuple[tuple[int, bool], str, list[memoryview]] | None = None
        self._due = dict.fromkeys(("status", "beat", "scripts"), time.monotonic())
        self.server: GrpcServer | None = None
        self.served = self._equipped(served)

    def _equipped(self, served: ServedModel) -> ServedModel:
        """Return a model with its datagram port, if its training method sends datagrams."""
        served.core.model.freezer.turn_on(lambda values: self.copied(values))
        if not served.core.model.method.router.uses_datagrams:
            return served
        sizes = [piece.size for piece in served.layout.slices]
        port = DatagramPort(served.core, served.decoder, sizes, self.queue.put, self._reject)
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
        self._slots = None
        self.connections.end_training()

    # -- parts of the served model ----------------------------------------------------------

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

    @property
    def version(self) -> int:
        """Number of updates that the shard's state machine has applied so far."""
        return self.core.version

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
        return StreamReader(stream, self.guard, self.queue.put, ShardAdmission(self))

    @property
    def side(self) -> ShardSide:
        """The parts of this shard that its dialogues with all kinds of clients use."""
        served = self.served
        limit = largest_push(served.layout, served.decoder.aux_count, served.bounds)
        return ShardSide(self.queue.put, limit, self.payloads)

    def dialogue_with(self, client: RemoteClient, hello: pb.Hello) -> ConnectedDialogue:
        """Return the dialogue with a client whose Hello fits this shard, by the client's role
        (called on reader threads).
        """
        side = self.side
        if hello.role == pb.ROLE_WORKER:
            served = self.served  # read once: the writer thread may replace it meanwhile
            model = ModelIntake(served.decoder, served.bounds, served.datagrams, served.share)
            accounts = WorkerAccounts(
                self.lease_seconds,
                self._welcomes.__setitem__,
                self.lose,
                self.reports,
                self.observers.pass_on_rounds,
            )
            return WorkerDialogue(client, hello, side, model, accounts)
        scripts, is_script = self.scripts, hello.role == pb.ROLE_SCRIPT
        welcome = self.welcome_script if is_script else self.welcome_observer
        observers = ObserverSide(self.connections, welcome, self.observe, self.send_slots)
        if is_script:
            return ScriptDialogue(client, hello, side, observers, scripts)
        if hello.role == pb.ROLE_EVALUATOR:
            return EvaluatorDialogue(client, hello, side, observers, scripts)
        if hello.role == pb.ROLE_SHARD:
            shards = self.directory, self.reports
            return FollowerDialogue(client, hello, side, observers, *shards)
        return SupervisorDialogue(client, hello, side, observers, scripts)

    def lose(self, connection: Connection) -> None:
        """Record that the gRPC stream of a worker has ended (called on reader threads).

        The loss of the stream is queued behind the stream's Hello message. If the loss of a stream
        were handled before its Hello message, the Hello message would register a stream that has
        ended.
        """

        def lose() -> None:
            if self.connections.drop_worker(connection):
                lost = events.WorkerDisconnected(connection.id, connection.incarnation)
                self._dispatch(self.journaled.handle(lost, time.monotonic()))

        self.queue.put(lose)

    def welcome_observer(self, connection: Connection) -> None:
        """Admit a supervisor, an evaluator or another shard (called on reader threads)."""

        def welcome() -> None:
            halt = self._halt()
            self.observers.welcome(connection, self._welcome_message(connection), halt)
            if connection.takes_requests:
                self.scripts.begin_evaluator(connection)
                if halt is not None:
                    connection.send(pb.ToClient(halt=halt))

        self.queue.put(ClientRequest(connection, "a Hello", welcome))

    def observe(self, connection: Connection, number: int) -> None:
        """Send an observer the whole model, or an evaluator the model that it evaluates (called on
        the writer thread).
        """
        phase = connection.phase
        if connection.role != pb.ROLE_EVALUATOR or phase >= self.served.since:
            # The observer's request is not an event of the core, because after an event that fails,
            # the core's state may be inconsistent, but a failure to send the model concerns only
            # this observer.
            self._dispatch([events.EvaluationReply(number, self.core.whole())])
        elif (ended := self.ended_models.find(phase)) is not None:
            sender = ReplySender(ended.layout, ended.generation, self._members, None)
            sender.send(ended.reply, connection, counted=False)
        else:
            text = f"phase: the final model of the script's phase {phase} is not stored any more."
            refusal = pb.Refusal(reason=pb.REASON_PHASE, message=text)
            connection.send(pb.ToClient(refusal=refusal))

    def welcome_script(self, connection: Connection) -> None:
        """Admit the control stream of a worker's script (called on the writer thread).

        A script that connects without an incarnation (process number) only requests the optimizer's
        state and never waits at barriers.
        """
        connection.send(self._welcome_message(connection))
        if not connection.incarnation:
            return
        if (halt := self._halt()) is not None:
            connection.send(pb.ToClient(halt=halt))
        self.scripts.begin(connection)

    def send_slots(self, connection: Connection, weights: bool) -> None:
        """Send a worker's script the optimizer's state between two updates (called on the writer
        thread).

        All scripts request the optimizer's state after one update, so they all get the same encoded
        arrays.

        Args:
            connection: Network connection of the worker's script.
            weights: True if the script also requests the weights and the averaged statistics.
        """
        key = (self.core.version, weights)
        if self._slots is None or self._slots[0] != key:
            model = self.core.model
            slots = model.scale_slots()
            if weights:
                slots += whole_slots(model.theta, self.layout, self.core.averages.statistics)
            states = [*model.slots(), OptimizerState(slots, 0.0)]
            self._slots = (key, *encode_slots(states))
        _, document, pieces = self._slots
        message = pb.ToClient(slots=pb.Slots(document=document))
        connection.stream.send(functools.partial(frames, message, pieces), counted=False)

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
            latest = now + _SCRIPTS_SECONDS  # meanwhile, a message may set an earlier deadline
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
        """Send the run's status to all observers; log a failure and continue."""
        self.contained.run("make the status", self.observers.publish_status)

    def _end_if_nobody_comes(self, watch: AdmissionWatch, now: float) -> None:
        """End the run if the PS has refused all workers."""
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
        """Return the connected workers if the workers all-reduce gradients; otherwise return []."""
        core = self.core
        if core.model.kind is not Kind.VALUES:
            return []
        live = core.rounds.live()
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
        logging.info("worker %d joined the run (%s)", action.worker, connection.stream.peer)

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
        # Limit the rate of this log line: a client that repeats a refused message must not fill the
        # disk.
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
            # The end of the sessions is queued instead of called here: if one batch of actions
            # holds several epochs, the sessions of workers that have left must end only after all
            # epochs of the batch.
            self.queue.put(self.datagrams.end_sessions)
        if self.core.stop_reason is None and epoch.number != self._num_epochs:
            logging.info("membership epoch %d: live workers %s", epoch.number, list(epoch.live))
        self._num_epochs = epoch.number  # an action that only adds draws repeats the epoch's number
        if epoch.draws:
            self._hooks.on_draws(epoch.draws)
        self.observers.send_epoch(encode_epoch(epoch, self.core.rounds.groups))

    def _report_unreachable(self, action: events.WorkersUnreachable) -> None:
        workers = [member.worker for member in action.members]
        logging.info("no message came for %g s from the workers %s", self.lease_seconds, workers)
        self._hooks.on_unreachable(action)

    def _groups_changed(self, action: events.GroupsChanged) -> None:
        logging.info("new worker groups by speed: %s", format_groups(action.groups))
        if warning := uneven(action.groups):
            logging.warning("%s", warning)
        self._hooks.on_groups(action)

    def _snapshot(self, action: events.SaveSnapshot) -> None:
        self._hooks.save(action.version, action.state)

    def _halt(self) -> pb.Halt | None:
        """Return the message to clients about the end of the run; None while the run continues."""
        reason = self.core.stop_reason
        return pb.Halt(cause=reason, message=self.scripts.why(reason)) if reason else None

    def _ended(self, action: events.RunEnded) -> None:
        logging.info("the run ended at model version %d: %s", self.core.version, action.reason)
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

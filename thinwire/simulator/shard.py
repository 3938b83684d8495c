"""A simulated PS shard: the PS core, its capacity, its gRPC streams, kill and restart."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from absl import logging

from thinwire.ops.routing.base import Transport
from thinwire.ops.sync.base import Draw
from thinwire.ops.types import ConfigurationError, Link, ShardLayout, State
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.persistence.journal import STOP_REASON, JournaledCore
from thinwire.ps.telemetry.status import StatusSources
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.ps.wire.replies import SharedBlocks, coded_update, reply_frames
from thinwire.simulator.clock import Clock
from thinwire.simulator.flags import ShardSpeed
from thinwire.simulator.links import Pipe, SimulatedConnection, carry, sizes_on_wire
from thinwire.simulator.messages import (
    Datagrams,
    Delivery,
    NonFinitePush,
    StreamPart,
    ToWorker,
    reply_in_flight,
)
from thinwire.simulator.storage import RUN_ID, SimulatedKill, StoredShard

#: Python's id() of an update -> blocks of the update, encoded once for all workers.
CodedBlocks = dict[int, SharedBlocks]

#: Part of the seed of session ids and signing keys. Predictable keys are safe, because a simulation
#: has no attackers.
_ENTROPY = 71
_SEEK_SECONDS = 1.0  # seconds between the attempts of a following shard to reach shard 0


@dataclasses.dataclass
class Port:
    """A simulated PS shard's end of the gRPC streams to one worker."""

    connection: SimulatedConnection
    down: Pipe
    chunk_bytes: int  # largest number of bytes of a push or reply in one frame
    # Function of (number of the stream, message) that delivers a message to the worker's client.
    deliver: Callable[[int, ToWorker], None] = lambda stream, message: None
    chooser: IndexChooser = dataclasses.field(default_factory=IndexChooser)
    stream: int | None = None  # open stream on which the worker got a Welcome; None: no stream
    incarnation: int = 0  # newest process of the worker that got a Welcome; 0: none
    #: Incarnation (process) of the worker -> stream on which its Hello message arrived.
    hellos: dict[int, int] = dataclasses.field(default_factory=dict)


class SimulatedShard:
    """Simulated PS shard, which drives a PS core (state machine) and can be killed and restarted.

    Attributes:
        core: State machine of the PS shard, of the same class as in a real run.
        journaled: Wrapper of the PS core that writes the core's events to a journal if the run has
            one.
        ports: Worker id -> the PS shard's end of the streams to the worker.
        followers: The remaining PS shards on shard 0, which follow each of its membership epochs
            without delay; empty on these shards.
        leader: Shard 0, from which the remaining PS shards receive membership epochs; None on shard
            0.
        kept: Files of the PS shard on disk. None: the shard saves no files and cannot be restarted.
        life: Number of starts of the PS shard's process.
        alive: True while the PS shard's process runs.
        is_open: True while the PS shard admits workers.
        skew: Time by which the PS shard's clock is ahead of the virtual clock, in seconds.
        reports: (role, id) of a node -> newest JSON document that the node reported.
        on_end: Function that is called with the stop reason when the PS core ends the run.
        on_groups: Function that is called with an action of PS shard 0's core that groups workers
            by speed.
        on_draws: Function that is called with PS shard 0's newest draws (sampled workers of
            rounds).
        on_begin: Function that is called with this PS shard when a restarted process has its core.
    """

    def __init__(
        self, number: int, core: PsCore, layout: ShardLayout, server: ShardSpeed, clock: Clock
    ) -> None:
        """Create a running PS shard with the given PS core (state machine)."""
        self.number, self.core, self.clock = number, core, clock
        self.journaled = JournaledCore(core, self.request_end)
        self.actions = ShardActions(self)
        self.ports: dict[int, Port] = {}
        self.followers: list[SimulatedShard] = []
        self.leader: SimulatedShard | None = None
        self.kept: StoredShard | None = None
        self.life, self.alive, self.is_open, self.skew = 0, True, True, 0.0
        self._asleep_until = 0.0
        self.alarm = ShardAlarm(self)
        # Newest membership epoch, which shard 0 sends to a restarted PS shard.
        self.epoch: events.MembershipEpoch | None = None
        self.layout = layout
        self.reports: dict[tuple[int, int], str] = {}
        self.on_end: Callable[[str], None] | None = None
        self.on_groups: Callable[[events.GroupsChanged], None] | None = None
        self.decoder: PushDecoder | None = None
        self.lease_seconds = 10.0
        self.on_draws: Callable[[Sequence[Draw]], None] | None = None
        self.on_begin: Callable[[SimulatedShard], None] = lambda shard: None
        self.uplink, self.downlink = (Pipe(Link(server.mbps)) for _ in range(2))
        self.has_own_link = server.mbps > 0
        self._seconds_per_push = server.seconds_per_push
        self._busy_until = 0.0
        self.datagrams: SimulatedDatagramPort | None = None

    def received(self) -> DatagramCounts | None:
        """Return the numbers of received datagrams; None if the run's router sends no datagrams."""
        return self.datagrams.receiver.counts() if self.datagrams is not None else None

    def bytes_down(self) -> dict[int, int]:
        """Return worker id -> number of training bytes that the PS shard has sent to the worker."""
        return {worker: port.down.num_bytes for worker, port in self.ports.items()}

    def status_sources(self, num_parameters: int) -> StatusSources:
        """Return the functions from which the PS shard's status documents are made.

        Args:
            num_parameters: Number of parameters of the whole model.
        """
        return StatusSources(
            core=lambda: self.core,
            num_parameters=lambda: num_parameters,
            run_id=lambda: RUN_ID,
            bytes_down=self.bytes_down,
            reports=lambda: self.reports,
            received=self.received,
        )

    # -- start and end ----------------------------------------------------------------------

    def request_end(self) -> None:
        """Request the run's end from PS shard 0, because the journal of this shard has failed."""
        leader = self.leader
        if leader is None or not self.alive:
            return
        if leader.alive:
            self.clock.at(self.clock.now, lambda: leader.arrive(events.Stop(STOP_REASON)))
        else:
            self.clock.at(self.clock.now + _SEEK_SECONDS, self.request_end)

    @property
    def now(self) -> float:
        """Current time of this PS shard's clock, in seconds."""
        return self.clock.now + self.skew

    @property
    def listens(self) -> bool:
        """True if the PS shard accepts new streams from workers."""
        return self.alive and self.is_open and self.clock.now >= self._asleep_until

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a virtual time, if this process of the PS shard runs then."""
        self.clock.at(when, functools.partial(self._if_it_lives, self.life, call))

    def _if_it_lives(self, life: int, call: Callable[[], None]) -> None:
        if self.alive and life == self.life:
            try:
                call()
            except SimulatedKill:
                self.kill()

    def kill(self) -> None:
        """Kill the PS shard as kill -9 does: its files on disk remain; all gRPC streams break."""
        if not self.alive:
            return
        self.alive = self.is_open = False
        self.epoch = None
        self.journaled.close()  # the operating system closes the files of a killed process
        for port in self.ports.values():
            port.stream = None
            port.hellos.clear()
            port.connection.snap()

    def start(self) -> bool:
        """Restart the PS shard from its files on disk; return False if the run is finished.

        Raises:
            ValueError: The PS shard's process already runs, or the shard saves no files.
        """
        if self.alive or self.kept is None:
            raise ValueError(f"shard {self.number} cannot start: it runs, or has no saved state")
        self.life += 1
        self.alive, self._asleep_until = True, 0.0
        if not self.kept.begin(self):
            self.alive = False
            return False
        self._seek_leader()
        return True

    def _seek_leader(self) -> None:
        """Let this PS shard admit workers as soon as PS shard 0 is reachable."""
        if self.leader is not None and not self.leader.listens:
            self.at(self.clock.now + _SEEK_SECONDS, self._seek_leader)
            return
        self.is_open = True
        try:
            # The number of the new generation must be on disk before the first push. Otherwise a
            # restart after a crash could use the same generation number for different weights.
            self._save_now()
        except ConfigurationError as error:
            logging.error("simulated PS shard %d cannot start: %s", self.number, error)
            self.kill()
            return
        except SimulatedKill:
            self.kill()
            return
        if self.leader is not None and self.leader.epoch is not None:
            self.follow(self.leader.epoch)
        for shard in self.followers:  # running PS shards reconnect to shard 0
            shard.follow(self.epoch)

    def follow(self, epoch: events.MembershipEpoch | None) -> None:
        """Follow PS shard 0's new membership epoch, if this PS shard has contacted shard 0."""
        if epoch is None or not self.is_open:
            return
        if not self.waits(functools.partial(self.follow, epoch)):
            self.handle(epoch)

    def freeze(self, seconds: float) -> None:
        """Stop the PS shard's process for some seconds, in which arriving messages wait."""
        until = self.clock.now + seconds
        self._asleep_until = until
        self.at(until, functools.partial(self.handle, events.ProcessStalled(seconds)))
        for port in self.ports.values():
            port.connection.expect_progress(until)

    def jump(self, seconds: float) -> None:
        """Advance the PS shard's clock by some seconds, but not the virtual clock."""
        if not self.is_open:
            return
        self.skew += seconds
        self.alarm.cancel()
        self.handle(events.ProcessStalled(seconds))

    def finish(self) -> None:
        """Save a last snapshot and end the PS shard's process; log an error if the disk fails."""
        if not self.alive:
            return
        self.journaled.close()
        try:
            self._save_now()
        except ConfigurationError as error:
            logging.error("the final model of the simulation cannot be saved: %s", error)
        except SimulatedKill:
            pass
        self.alive = self.is_open = False

    def _save_now(self) -> None:
        """Write a snapshot of the PS shard, and return when the snapshot is on disk.

        Raises:
            ConfigurationError: The disk failed to store the snapshot.
            SimulatedKill: The PS shard's process was killed while it wrote the snapshot.
        """
        self.save(self.core.version, self.core.snapshot())
        if self.kept is not None and self.kept.saved is not None:
            self.kept.saved.flush()

    def waits(self, again: Callable[[], None]) -> bool:
        """Return True if the PS shard's process is stopped (then call `again` later) or dead."""
        if self.alive and self.clock.now < self._asleep_until:
            self.at(self._asleep_until, again)
            return True
        return not self.alive

    def save(self, version: int, state: State) -> None:
        """Schedule the write of a snapshot, if this PS shard saves snapshots."""
        if self.kept is not None:
            self.kept.save(self, version, state)

    # -- incoming messages ------------------------------------------------------------------

    def receive_datagrams(self, data: memoryview, size: int) -> None:
        """Receive datagrams of equal size that arrive at the PS shard together."""
        if self.datagrams is not None:
            self.datagrams.receiver.receive(data, size)

    def receive(self, worker: int, stream: int, event: Delivery) -> None:
        """Receive a message on a worker's gRPC stream; drop it if a newer stream exists."""
        port = self.ports[worker]
        if self.waits(functools.partial(self.receive, worker, stream, event)):
            return
        if isinstance(event, events.Join):
            port.hellos[event.incarnation] = stream
        elif port.stream != stream:
            return
        self.arrive(event)

    def lose(self, worker: int, stream: int) -> None:
        """Note the loss of a worker's gRPC stream, unless a newer stream has replaced it."""
        port = self.ports[worker]
        if self.waits(functools.partial(self.lose, worker, stream)) or port.stream != stream:
            return
        port.stream = None
        self.arrive(events.WorkerDisconnected(worker, port.incarnation))

    def arrive(self, event: Delivery) -> None:
        """Receive a message from a worker; delay its handling while the PS shard is busy."""
        if self.waits(functools.partial(self.arrive, event)):
            return
        if isinstance(event, StreamPart | Datagrams):
            if self.datagrams is not None:
                self.datagrams.take(event)
            return
        pushes = isinstance(event, events.Push)
        cost = self._seconds_per_push if pushes else 0.0
        self._busy_until = max(self._busy_until, self.clock.now) + cost
        if self._busy_until <= self.clock.now:
            self.handle(event)
        else:
            self.at(self._busy_until, functools.partial(self.handle, event))

    def handle(self, event: events.Event | NonFinitePush) -> None:
        """Pass an event to the PS core (state machine) now, and perform the core's actions."""
        if not self.alive:
            return
        # A decoder checks a push before the push reaches the core.
        if isinstance(event, NonFinitePush):
            self.handle(events.PushRejected(event.worker, "non_finite"))
            self.actions.send_verdict(_not_finite(event, self.core.membership.epoch), {})
            return
        try:
            self.actions.perform(self.journaled.handle(event, self.now))
        except SimulatedKill:
            self.kill()
            return
        self.alarm.set()

    def observe(self) -> events.Reply:
        """Return all parameters that the PS shard stores, as the reply to an evaluation's pull."""
        replies = []
        for action in self.journaled.handle(events.EvaluationPull(0), self.now):
            if isinstance(action, events.EvaluationReply):
                replies.append(action.reply)
            else:
                self.actions.perform([action])
        # If the journal fails on the EvaluationPull, the core handles a Stop instead and sends no
        # reply. The Stop replaces only one event, so a second EvaluationPull is answered.
        return replies[0] if replies else self.observe()

    def take_core(self, core: PsCore) -> None:
        """Continue with a new PS core (state machine), after the PS shard's process restarted."""
        self.core, self.journaled = core, JournaledCore(core, self.request_end)
        self._busy_until = 0.0
        self.alarm.cancel()
        if self.datagrams is not None:
            self.datagrams.begin_life()
        self.on_begin(self)


class ShardAlarm:
    """Wakes a simulated PS shard at the next deadline of its core or of its datagram receiver.

    Args:
        shard: PS shard that gets a Tick event at each deadline.
    """

    def __init__(self, shard: SimulatedShard) -> None:
        self._shard = shard
        self._due: float | None = None  # time of the next Tick by the shard's clock; None: no Tick

    def cancel(self) -> None:
        """Drop the scheduled Tick event, for example because the shard's clock has jumped."""
        self._due = None

    def set(self) -> None:
        """Schedule a Tick event at the next deadline of the PS core or the datagram receiver."""
        shard = self._shard
        deadlines = [shard.core.next_deadline()]
        if shard.datagrams is not None:
            deadlines.append(shard.datagrams.receiver.next_deadline())
        deadline = min((when for when in deadlines if when is not None), default=None)
        if deadline is None or not math.isfinite(deadline):
            return
        if self._due is not None and self._due <= deadline:
            return
        self._due = deadline
        when = deadline - shard.skew
        # `when` may be rounded down. Then the core would see a time before its deadline and do
        # nothing at the Tick, and the next Tick would be due at the same time, without end.
        while when + shard.skew < deadline:
            when = math.nextafter(when, math.inf)
        shard.at(when, functools.partial(self._ring, deadline))

    def _ring(self, deadline: float) -> None:
        shard = self._shard
        # The values differ if an earlier Tick has replaced this Tick.
        if shard.waits(functools.partial(self._ring, deadline)) or deadline != self._due:
            return
        self._due = None
        if shard.datagrams is not None:
            shard.datagrams.receiver.poll()
        shard.handle(events.Tick())


class ShardActions:
    """Performs the actions of a simulated PS shard's core: most of them are messages to workers.

    Args:
        shard: PS shard whose core returns the actions.
    """

    def __init__(self, shard: SimulatedShard) -> None:
        self._shard = shard

    def perform(self, actions: Iterable[events.Action]) -> None:
        """Perform the actions that the PS core has returned for one event."""
        coded: CodedBlocks = {}
        for action in actions:
            self._actions[type(action)](self, action, coded)

    def _send(
        self,
        worker: int,
        message: ToWorker,
        sizes: list[int],
        counted: bool,
        stream: int | None = None,
    ) -> None:
        """Send a message to a worker; the PS shard sends all its messages by this method.

        Args:
            worker: Id of the receiving worker.
            message: Message to send to the worker.
            sizes: Size of each frame of the message in bytes. An empty list means a message without
                size, which is only delayed.
            counted: True if the frames of the message count as training bytes.
            stream: Number of the gRPC stream to send on. None: the stream on which the worker got
                its Welcome.
        """
        port = self._shard.ports[worker]
        stream = port.stream if stream is None else stream
        if stream is None:  # the worker is not connected
            return
        hops = (self._shard.downlink, port.down) if self._shard.has_own_link else (port.down,)
        deliver = functools.partial(port.deliver, stream, message)
        carry(self._shard.clock, hops, sizes, counted, deliver)

    def _reply(self, action: events.Reply, coded: CodedBlocks) -> None:
        port = self._shard.ports[action.worker]
        blocks = coded_update(action.update, self._shard.layout, coded)
        generation = self._shard.core.config.generation
        outcome = None
        if self._shard.datagrams is not None:
            outcome = self._shard.datagrams.receiver.outcome(action.worker, action.step)
        frames = reply_frames(
            action, generation, (), blocks, port.chooser, port.chunk_bytes, outcome
        )
        message = reply_in_flight(action, generation, self._shard.layout, outcome)
        self._send(action.worker, message, sizes_on_wire(frames), counted=True)

    def _answer(self, action: events.Answer, coded: CodedBlocks) -> None:
        answer = pb.Answer(step=action.step, local_steps=action.local_steps, ready=action.ready)
        sizes = sizes_on_wire([frame(pb.ToClient(answer=answer))])
        self._send(action.worker, action, sizes, counted=True)

    def _refusal(self, action: events.Reject, coded: CodedBlocks) -> None:
        if action.reason == "OUTLIER" and self._shard.datagrams is not None:
            self._shard.datagrams.receiver.on_push_refused(action.worker, action.step)
        self.send_verdict(action, coded)

    def send_verdict(self, action: events.Welcome | events.Reject, coded: CodedBlocks) -> None:
        """Send the PS shard's answer to a Hello message on the stream of that message."""
        port = self._shard.ports[action.worker]
        hello = port.hellos.pop(action.incarnation, None)
        if isinstance(action, events.Welcome):
            port.stream, port.incarnation = hello, action.incarnation
        self._send(action.worker, action, [], counted=False, stream=hello)

    def _new_epoch(self, action: events.NewEpoch, coded: CodedBlocks) -> None:
        if self._shard.datagrams is not None:
            # Several membership epochs can arrive at the same time. The scheduled call runs after
            # all of them, so that the last epoch decides which datagram sessions end.
            self._shard.clock.at(self._shard.clock.now, self._shard.datagrams.end_sessions)
        self._shard.epoch = action.epoch
        if action.epoch.draws and self._shard.on_draws is not None:
            self._shard.on_draws(action.epoch.draws)
        for shard in self._shard.followers:
            shard.follow(action.epoch)

    def _missed(self, action: events.WorkersUnreachable, coded: CodedBlocks) -> None:
        """Report to PS shard 0 the workers that have sent this PS shard nothing for too long."""
        if self._shard.leader is not None:
            for life in action.members:
                self._shard.leader.arrive(events.WorkerUnreachable(life))

    def _ended(self, action: events.RunEnded, coded: CodedBlocks) -> None:
        if self._shard.on_end is not None:
            self._shard.on_end(action.reason)

    def _regrouped(self, action: events.GroupsChanged, coded: CodedBlocks) -> None:
        if self._shard.on_groups is not None:
            self._shard.on_groups(action)

    def _snapshot(self, action: events.SaveSnapshot, coded: CodedBlocks) -> None:
        self._shard.save(action.version, action.state)

    _actions: ClassVar[dict[type, Any]] = {
        events.Reply: _reply,
        events.Answer: _answer,
        events.Welcome: send_verdict,
        events.Reject: _refusal,
        events.NewEpoch: _new_epoch,
        events.WorkersUnreachable: _missed,
        events.RunEnded: _ended,
        events.GroupsChanged: _regrouped,
        events.SaveSnapshot: _snapshot,
    }


def _not_finite(push: NonFinitePush, epoch: int) -> events.Reject:
    message = "the update is not finite"
    return events.Reject(push.worker, 0, "NON_FINITE", message, push.step, epoch)


class SimulatedDatagramPort:
    """A simulated PS shard's datagram port, without sockets.

    `SimulatedDatagramPort` corresponds to `thinwire.ps.datagrams.port.DatagramPort` of a real PS
    shard.

    Attributes:
        receiver: Receiver of datagrams, with the workers' sessions since the shard's last start.
        numbers: Port numbers that workers receive; empty if datagrams are sent in gRPC streams.

    Args:
        shard: PS shard that owns the port and receives the pushes.
        decoder: Decoder of the pushes that the PS shard receives.
        transport: Settings of the datagrams, for example their size and pacing.
    """

    def __init__(self, shard: SimulatedShard, decoder: PushDecoder, transport: Transport) -> None:
        self._shard, self._router = shard, shard.core.model.method.router
        self._decoder, self._transport = decoder, transport
        in_stream = transport.dgt_transport != "udp"
        self.numbers = range(0) if in_stream else range(1, self._router.channels + 1)
        self.begin_life()

    def begin_life(self) -> None:
        """Start a new datagram receiver without sessions, after a restart of the PS shard."""
        shard = self._shard
        self.receiver = DatagramReceiver(
            self._decoder,
            [piece.size for piece in shard.layout.slices],
            self._router,
            shard.arrive,
            self._refuse,
            shard.alarm.set,
            np.random.default_rng([_ENTROPY, shard.number, shard.life]).bytes,
            lambda: shard.now,
        )
        self.receiver.configure(self._transport)

    def introduction(self, worker: int, incarnation: int) -> pb.Welcome:
        """Return a Welcome message's settings of a worker's datagrams: ports, session id, key."""
        welcome = pb.Welcome()
        self.receiver.fill_welcome(worker, incarnation, self.numbers, welcome)
        return welcome

    def take(self, arrived: StreamPart | Datagrams) -> None:
        """Receive gradient entries, as a message or as datagrams, from a worker's gRPC stream."""
        if isinstance(arrived, Datagrams):
            message = arrived.message
            self.receiver.receive_from_stream(memoryview(message.data), message.size)
            return
        try:
            self.receiver.on_push(arrived.worker, arrived.push, arrived.payload)
        except NonFinite:
            self._shard.arrive(NonFinitePush(arrived.worker, arrived.push.step))

    def end_sessions(self) -> None:
        """End the datagram sessions of workers that have left the run."""
        self.receiver.retain_members(self._shard.core.rounds.live())

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Reject a push that contains NaN or infinity, after its datagrams have arrived."""
        self._shard.arrive(NonFinitePush(worker, step))

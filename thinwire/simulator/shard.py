"""One shard on the virtual clock: the PS core, its capacity, its streams, and its lives."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

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
from thinwire.ps.persistence.journal import STOP_REASON, JournaledCore
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.ps.wire.replies import SharedBlocks, coded_update, reply_frames
from thinwire.simulator.clock import Clock
from thinwire.simulator.datagrams import SimulatedDatagramPort
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
from thinwire.simulator.storage import SimulatedKill, StoredShard

#: id of an update -> its blocks, coded once for all workers.
CodedBlocks = dict[int, SharedBlocks]

_SEEK_SECONDS = 1.0  # between two attempts of a following shard to reach shard 0


@dataclasses.dataclass
class Port:
    """A shard's end of the streams to one worker."""

    delivery: Callable[[int, ToWorker], Callable[[], None]]  # (stream, message) -> delivers it
    down: Pipe
    chunk_bytes: int
    connection: SimulatedConnection
    chooser: IndexChooser = dataclasses.field(default_factory=IndexChooser)
    stream: int | None = None  # the one that the worker was welcomed on, while it stands
    incarnation: int = 0  # of the worker that was
    hellos: dict[int, int] = dataclasses.field(default_factory=dict)  # incarnation -> its stream


#: What shard 0's records call this run.
RUN_ID = "simulated"


class SimulatedShard:
    """Feeds a core and carries out its actions; dies, stands still, and comes back from its disk.

    Attributes:
        core: The state machine, the same as in a real run.
        journaled: Stands before it.
        ports: Worker -> its stream.
        followers: On shard 0, the other shards: they follow each epoch without delay.
        leader: Shard 0, on the others.
        kept: What it keeps on disk; None: nothing, and it never dies.
        life: Grows with every life of the process.
        alive: Whether the process runs.
        is_open: Whether it admits workers.
        skew: How far the shard's own clock is ahead of the virtual one, in seconds.
        reports: (role, id) -> newest JSON document, as a real shard keeps them.
        on_end: Called with the reason when the core declares the end.
        on_groups: Called when shard 0 has formed groups by speed.
        on_draws: Called with the newest draws of rounds' workers when shard 0 has drawn.
        on_begin: Called with this shard when a life has got its core.
    """

    def __init__(
        self, number: int, core: PsCore, layout: ShardLayout, server: ShardSpeed, clock: Clock
    ) -> None:
        """Live from the start, with this core."""
        self.number, self.core, self.clock = number, core, clock
        self.journaled = JournaledCore(core)
        self.journaled.on_failure = self.request_end
        self.ports: dict[int, Port] = {}
        self.followers: list[SimulatedShard] = []
        self.leader: SimulatedShard | None = None
        self.kept: StoredShard | None = None
        self.life, self.alive, self.is_open, self.skew = 0, True, True, 0.0
        self._asleep_until = 0.0
        self._tick_at: float | None = None
        self._epoch: events.MembershipEpoch | None = None  # newest, for the followers
        self.layout = layout
        self.reports: dict[tuple[int, int], str] = {}
        self.on_end: Callable[[str], None] | None = None
        self.on_groups: Callable[[events.GroupsChanged], None] | None = None
        self.identity = types.SimpleNamespace(run_id=RUN_ID)
        self.guard = types.SimpleNamespace(refused={})  # where nobody uninvited comes
        self.decoder: PushDecoder | None = None
        self.lease_seconds = 10.0
        self.on_draws: Callable[[Sequence[Draw]], None] | None = None
        self.on_begin: Callable[[SimulatedShard], None] = lambda shard: None
        self.connections = self  # has bytes_down, as a status document needs it
        self.uplink, self.downlink = (Pipe(Link(server.mbps)) for _ in range(2))
        self.has_own_link = server.mbps > 0
        self._seconds_per_push = server.seconds_per_push
        self._busy_until = 0.0
        self.datagrams: SimulatedDatagramPort | None = None

    def open_datagram_port(self, decoder: PushDecoder, transport: Transport) -> None:
        """Put pushes together from now on; `decoder` is that of the shard's pushes."""
        router = self.core.model.method.router
        self.datagrams = SimulatedDatagramPort(self, router, decoder, transport)

    def received(self) -> DatagramCounts | None:
        """Return what has come in datagrams; None where the method sends none."""
        return self.datagrams.receiver.counts() if self.datagrams is not None else None

    def introduction(self, worker: int, incarnation: int) -> pb.Welcome:
        """Return the part of a Welcome that directs a worker's datagrams."""
        welcome = pb.Welcome()
        if self.datagrams is not None:
            self.datagrams.fill_welcome(worker, incarnation, welcome)
        return welcome

    def bytes_down(self) -> dict[int, int]:
        """Return training bytes sent to each worker."""
        return {worker: port.down.num_bytes for worker, port in self.ports.items()}

    def live_workers(self) -> Iterable[int]:
        """Return the workers whose datagram sessions go on."""
        return self.core.live_workers()

    # -- lives ------------------------------------------------------------------------------

    def request_end(self) -> None:
        """Request the end of the run, as a following shard does whose journal has failed."""
        leader = self.leader
        if leader is None or not self.alive:
            return
        if leader.alive:
            self.clock.at(self.clock.now, lambda: leader.arrive(events.Stop(STOP_REASON)))
        else:
            self.clock.at(self.clock.now + _SEEK_SECONDS, self.request_end)

    @property
    def now(self) -> float:
        """The time by this shard's own clock."""
        return self.clock.now + self.skew

    @property
    def listens(self) -> bool:
        """Whether a stream can be opened to it."""
        return self.alive and self.is_open and self.clock.now >= self._asleep_until

    def if_it_lives(self, life: int, call: Callable[[], None]) -> None:
        """Call something if the shard still is in this life."""
        if self.alive and life == self.life:
            try:
                call()
            except SimulatedKill:
                self.kill()

    def kill(self) -> None:
        """Die as by kill -9: only what is on disk is left, and every stream breaks."""
        if not self.alive:
            return
        self.alive = self.is_open = False
        self._epoch = None
        self.journaled.close()  # the system closes the file
        for port in self.ports.values():
            port.stream = None
            port.hellos.clear()
            port.connection.snap()

    def start(self) -> bool:
        """Begin another life from what is on disk; return False if the run is finished.

        Raises:
            ValueError: It lives, or keeps nothing.
        """
        if self.alive or self.kept is None:
            raise ValueError(f"shard {self.number} lives, or keeps nothing to begin from")
        self.life += 1
        self.alive, self._asleep_until = True, 0.0
        if not self.kept.begin(self):
            self.alive = False
            return False
        self._seek_leader()
        return True

    def _seek_leader(self) -> None:
        """Let workers in once shard 0 is there."""
        if self.leader is not None and not self.leader.listens:
            again = functools.partial(self.if_it_lives, self.life, self._seek_leader)
            self.clock.at(self.clock.now + _SEEK_SECONDS, again)
            return
        self.is_open = True
        try:
            self._save_now()  # the new generation must survive a crash
        except ConfigurationError as error:
            logging.error("shard %d cannot begin: %s", self.number, error)
            self.kill()
            return
        except SimulatedKill:
            self.kill()
            return
        if self.leader is not None and self.leader._epoch is not None:
            self.follow(self.leader._epoch)
        for shard in self.followers:  # they find shard 0 again
            shard.follow(self._epoch)

    def follow(self, epoch: events.MembershipEpoch | None) -> None:
        """Follow an epoch of shard 0; a shard that seeks it gets the newest when it is there."""
        if epoch is None or not self.is_open:
            return
        if not self._waits(functools.partial(self.follow, epoch)):
            self.handle(epoch)

    def freeze(self, seconds: float) -> None:
        """Stand still for so long, as a stopped process does; what comes meanwhile waits."""
        until = self.clock.now + seconds
        self._asleep_until = until
        wake = functools.partial(self.handle, events.ProcessStalled(seconds))
        self.clock.at(until, functools.partial(self.if_it_lives, self.life, wake))
        for port in self.ports.values():
            port.connection.expect_progress(until)

    def jump(self, seconds: float) -> None:
        """Find that so much time has passed unseen by the shard's own clock, if it serves."""
        if not self.is_open:
            return
        self.skew += seconds
        self._tick_at = None
        self.handle(events.ProcessStalled(seconds))

    def finish(self) -> None:
        """Leave a last snapshot behind, if the disk takes it, and end."""
        if not self.alive:
            return
        self.journaled.close()
        try:
            self._save_now()
        except ConfigurationError as error:
            logging.error("what the run ended with cannot be saved: %s", error)
        except SimulatedKill:
            pass
        self.alive = self.is_open = False

    def _save_now(self) -> None:
        """Have a snapshot on disk when this returns.

        Raises:
            ConfigurationError: The disk refuses.
            SimulatedKill: It was the last thing to happen.
        """
        self.save(self.core.version, self.core.snapshot())
        if self.kept is not None and self.kept.saved is not None:
            self.kept.saved.flush()

    def _waits(self, again: Callable[[], None]) -> bool:
        """Return whether nothing is taken in now; `again` is called when the shard wakes up."""
        if self.alive and self.clock.now < self._asleep_until:
            self.clock.at(self._asleep_until, functools.partial(self.if_it_lives, self.life, again))
            return True
        return not self.alive

    def save(self, version: int, state: State) -> None:
        """Have a snapshot written, if this shard keeps any."""
        if self.kept is not None:
            self.kept.save(self, version, state)

    # -- coming in --------------------------------------------------------------------------

    def receive_datagrams(self, data: memoryview, size: int) -> None:
        """Take in datagrams of one size that arrive together."""
        if self.datagrams is not None:
            self.datagrams.receiver.receive(data, size)

    def receive(self, worker: int, stream: int, event: Delivery) -> None:
        """Take in what came on a stream, unless another has taken its place."""
        port = self.ports[worker]
        if self._waits(functools.partial(self.receive, worker, stream, event)):
            return
        if isinstance(event, events.Join):
            port.hellos[event.incarnation] = stream
        elif port.stream != stream:
            return
        self.arrive(event)

    def lose(self, worker: int, stream: int) -> None:
        """Take note that a stream is gone."""
        port = self.ports[worker]
        if self._waits(functools.partial(self.lose, worker, stream)) or port.stream != stream:
            return
        port.stream = None
        self.arrive(events.WorkerDisconnected(worker, port.incarnation))

    def arrive(self, event: Delivery) -> None:
        """Take in what has passed the network; an event waits while the shard is busy."""
        if self._waits(functools.partial(self.arrive, event)):
            return
        if isinstance(event, StreamPart | Datagrams):
            if self.datagrams is not None:
                self.datagrams.take(event)
            return
        pushes = isinstance(event, events.Push)
        cost = self._seconds_per_push if pushes else 0.0
        self._busy_until = max(self._busy_until, self.clock.now) + cost
        handle = functools.partial(self.handle, event)
        if self._busy_until <= self.clock.now:
            handle()
        else:
            self.clock.at(self._busy_until, functools.partial(self.if_it_lives, self.life, handle))

    def handle(self, event: events.Event | NonFinitePush) -> None:
        """Let the core handle an event now; carry out its actions."""
        if not self.alive:
            return
        if isinstance(event, NonFinitePush):  # checked before it reaches the core
            self.handle(events.PushRejected(event.worker, "non_finite"))
            self._send_verdict(_not_finite(event, self.core.membership.epoch), {})
            return
        coded: CodedBlocks = {}
        try:
            for action in self.journaled.handle(event, self.now):
                self._actions[type(action)](self, action, coded)
        except SimulatedKill:
            self.kill()
            return
        self.set_alarm()

    def observe(self) -> events.Reply:
        """Return the whole model, as an evaluation pull gets it."""
        views = []
        for action in self.journaled.handle(events.EvaluationPull(0), self.now):
            if isinstance(action, events.EvaluationReply):
                views.append(action.reply)
            else:
                self._actions[type(action)](self, action, {})
        # A journal that just failed ended the run instead; the model is there all the same.
        return views[0] if views else self.observe()

    def set_alarm(self) -> None:
        """See to it that the core gets a Tick when it wants one."""
        wishes = [self.core.next_deadline()]
        if self.datagrams is not None:
            wishes.append(self.datagrams.receiver.next_deadline())
        deadline = min((when for when in wishes if when is not None), default=None)
        if deadline is None or not math.isfinite(deadline):
            return
        if self._tick_at is not None and self._tick_at <= deadline:
            return
        self._tick_at = deadline
        tick = functools.partial(self._tick, deadline)
        when = deadline - self.skew
        while when + self.skew < deadline:  # rounded down: the core would find nothing due
            when = math.nextafter(when, math.inf)
        self.clock.at(when, functools.partial(self.if_it_lives, self.life, tick))

    def _tick(self, when: float) -> None:
        if self._waits(functools.partial(self._tick, when)):
            return
        if when == self._tick_at:  # else an earlier one has taken its place
            self._tick_at = None
            if self.datagrams is not None:
                self.datagrams.receiver.poll()
            self.handle(events.Tick())

    def take_core(self, core: PsCore, journaled: JournaledCore) -> None:
        """Go on with another core."""
        self.core, self.journaled = core, journaled
        journaled.on_failure = self.request_end
        self._busy_until, self._tick_at = 0.0, None
        if self.datagrams is not None:
            self.datagrams.begin_life()
        self.on_begin(self)

    # -- going out --------------------------------------------------------------------------

    def send(
        self,
        worker: int,
        message: ToWorker,
        sizes: list[int],
        counted: bool,
        stream: int | None = None,
    ) -> None:
        """Send anything to a worker: the one way from shards to workers.

        Args:
            worker: To whom.
            message: What.
            sizes: Bytes of its frames.
            counted: Whether they are training bytes.
            stream: On which stream, if not on the one that the worker was welcomed on.
        """
        port = self.ports[worker]
        stream = port.stream if stream is None else stream
        if stream is None:  # nobody is connected
            return
        hops = (self.downlink, port.down) if self.has_own_link else (port.down,)
        carry(self.clock, hops, sizes, counted, port.delivery(stream, message))

    def _reply(self, action: events.Reply, coded: CodedBlocks) -> None:
        port = self.ports[action.worker]
        written = coded_update(action.update, self.layout, coded)
        generation = self.core.config.generation
        came = None
        if self.datagrams is not None:
            came = self.datagrams.receiver.outcome(action.worker, action.step)
        frames = reply_frames(action, generation, (), written, port.chooser, port.chunk_bytes, came)
        message = reply_in_flight(action, generation, self.layout, came)
        self.send(action.worker, message, sizes_on_wire(frames), counted=True)

    def _answer(self, action: events.Answer, coded: CodedBlocks) -> None:
        answer = pb.Answer(step=action.step, local_steps=action.local_steps, ready=action.ready)
        sizes = sizes_on_wire([frame(pb.ToClient(answer=answer))])
        self.send(action.worker, action, sizes, counted=True)

    def _refusal(self, action: events.Reject, coded: CodedBlocks) -> None:
        if action.reason == "OUTLIER" and self.datagrams is not None:
            self.datagrams.receiver.on_push_refused(action.worker, action.step)
        self._send_verdict(action, coded)

    def _send_verdict(self, action: events.Welcome | events.Reject, coded: CodedBlocks) -> None:
        port = self.ports[action.worker]
        hello = port.hellos.pop(action.incarnation, None)
        if isinstance(action, events.Welcome):
            port.stream, port.incarnation = hello, action.incarnation
        self.send(action.worker, action, [], counted=False, stream=hello)

    def _new_epoch(self, action: events.NewEpoch, coded: CodedBlocks) -> None:
        if self.datagrams is not None:  # after all epochs that come together
            self.clock.at(self.clock.now, self.datagrams.end_sessions)
        self._epoch = action.epoch
        if action.epoch.draws and self.on_draws is not None:
            self.on_draws(action.epoch.draws)
        for shard in self.followers:
            shard.follow(action.epoch)

    def _missed(self, action: events.WorkersUnreachable, coded: CodedBlocks) -> None:
        """Report workers of which nothing arrives here to shard 0."""
        if self.leader is not None:
            for life in action.members:
                self.leader.arrive(events.WorkerUnreachable(life))

    def _ended(self, action: events.RunEnded, coded: CodedBlocks) -> None:
        if self.on_end is not None:
            self.on_end(action.reason)

    def _regrouped(self, action: events.GroupsChanged, coded: CodedBlocks) -> None:
        if self.on_groups is not None:
            self.on_groups(action)

    def _snapshot(self, action: events.SaveSnapshot, coded: CodedBlocks) -> None:
        self.save(action.version, action.state)

    _actions: ClassVar[dict[type, Any]] = {
        events.Reply: _reply,
        events.Answer: _answer,
        events.Welcome: _send_verdict,
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

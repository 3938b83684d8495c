"""A real shard server without sockets, threads and time; an honest worker, and other clients.

Every update that the core applies is recorded; at the end a new core that applies only the
recorded updates must have the same weights, bit for bit.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame
from tests.virtual.run import MiniRun, MiniWorker
from thinwire.ops.downlink.types import Operation
from thinwire.ops.routing.base import Transport
from thinwire.proto import framing, messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.worker.client.datagrams import DatagramChannel
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.core.messages import ShardReply

LEASE_SECONDS = 10.0
#: Incarnation of the honest worker; no hostile client can guess the number.
HONEST_LIFE = 0x3D0E_51C7_9A2B_4F86
#: Method -> settings with which one worker can push without waiting for the others.
METHODS: dict[str, dict[str, Any]] = {
    "adacomp": {"compression_rate": 0.25},
    "asgd": {},
    "esync": {"max_local_steps": 1, "overrides": {"sync": "asp"}},
    "dgt": {
        "overrides": {"sync": "asp"},
        "dgt_block_size": 8,
        "dgt_k": 0.0,
        "dgt_wait_ms": 1000.0,
    },
}
#: Modules that read the time.
_TIMED = (
    "thinwire.ps.service.server",
    "thinwire.ps.service.writer",
    "thinwire.ps.service.dialogues.worker",
    "thinwire.ps.service.handshake",
    "thinwire.proto.security.connection_guard",
)


class FakeClock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the seconds that have passed by `World.wait` alone."""
        return self.now


class Client(Stream):
    """One client stream, fed frame by frame."""

    def __init__(self, world: World) -> None:
        super().__init__(world.server)
        self.reader = world.server.reader_of(self)
        self.open, self.takes = True, True
        self.num_refusals = 0

    def send(self, frames: Any, counted: bool = True) -> None:
        """Read the sent frames; a client that reads nothing makes pending replies wait."""
        if callable(frames) and not self.takes:
            self.num_waiting += 1
            return
        before = len(self.received)
        super().send(frames, counted)
        said = [message.WhichOneof("body") for message, _ in self.received[before:]]
        self.num_refusals += said.count("refusal")
        del self.received[:-4]

    def say(self, data: bytes) -> None:
        """Let the shard read one frame, unless the stream has ended."""
        if self.open and not self.reader.receive(data):
            self.break_off()

    def break_off(self) -> None:
        """End the stream."""
        if self.open:
            self.open = False
            self.reader.forget()


class Honest:
    """The honest worker, whose pushes must be applied: the real worker core on its stream."""

    def __init__(self, world: World) -> None:
        self.world, self.run = world, world.shard.run
        self.worker = MiniWorker(HONEST, self.run)
        self.client = Client(world)
        self.num_pushes = 0
        self._say(frame(hello=world.shard.hello(id=HONEST, incarnation=HONEST_LIFE)))
        self.welcome, _ = self.client.last("welcome")
        router = self.run.method.router
        self.leg: DatagramChannel | None = None
        if router.uses_datagrams:
            transport = Transport(dgt_transport="grpc")
            self.leg = DatagramChannel(HONEST, router, transport, None)
            self.leg.open("peer:1", self.welcome)
        self.encoder = PushEncoder(0, self.leg)
        self._say(frame(pull=pb.Pull()))
        self._take(0)

    def exchange(self) -> None:
        """Push a gradient, and read the reply, which holds the shard's model."""
        core, run = self.worker.core, self.run
        core.learning_rate = 0.1
        batch = self.worker.batches.integers(0, len(run.problem.y), run.batch)
        loss, gradient = run.problem.gradient(core.weights, batch)
        outgoing = core.begin(gradient, run.batch, loss)
        assert outgoing is not None
        over, before = self.world.core.stop_reason is not None, self.world.core.version
        epoch = self.world.core.membership.epoch
        for message, pieces in self.encoder.encode(outgoing, HONEST_LIFE, epoch):
            for data in framing.frames(message, pieces):
                self._say(data)
        for message, _ in self.encoder.finish():
            self._say(message.SerializeToString())
        assert self.world.core.version == before + (not over)
        self.num_pushes += not over
        self._take(outgoing.head.step)

    def _say(self, data: bytes) -> None:
        self.client.say(data)
        self.world.turn()
        assert self.client.open, self.client.received

    def _take(self, step: int) -> None:
        """Apply the reply to a push; then this worker has the shard's model."""
        reply, payload = self.client.last("reply")
        assert reply is not None and reply.step == step
        sizes = [piece.size for piece in self.run.layouts[0].slices]
        payload = payload[: len(payload) - 4 * reply.aux_count]
        blocks = messages.blocks_from_message(reply.blocks, payload, sizes)
        self.worker.core.finish(
            [
                ShardReply(
                    Operation(reply.operation),
                    blocks,
                    reply.version,
                    reply.generation,
                    reply.learning_rate,
                    reply.samples,
                    reply.stop,
                )
            ]
        )
        assert self.worker.core.base.tobytes() == self.run.theta.tobytes()


class World:
    """The shard, its clock, and all clients."""

    def __init__(self, name: str, clock: FakeClock) -> None:
        self.name, self.clock = name, clock
        self.shard = Shard(name, **METHODS[name])
        self.server, self.core = self.shard.server, self.shard.core
        self.server.lease_seconds = self.core.membership.lease_seconds = LEASE_SECONDS
        if self.server.datagrams is not None:
            self.server.datagrams.receiver._clock = clock.monotonic
        self.applied: list[events.Push] = []
        self.heard: collections.Counter[str] = collections.Counter()
        self._handle, self.server.journaled.handle = self.server.journaled.handle, self._note
        self.clients: list[Client] = []
        self.honest = Honest(self)

    def connect(self) -> Client:
        """Return another client's stream."""
        self.clients.append(Client(self))
        return self.clients[-1]

    def turn(self) -> None:
        """Let the writer thread handle all queued events."""
        self.server.queue.put(events.Tick())
        self.server.run_until(self.server.queue.empty)

    def wait(self, seconds: float) -> None:
        """Let time pass; the honest worker sends a heartbeat."""
        self.clock.now += seconds
        self.honest.client.say(frame(heartbeat=pb.Heartbeat()))
        self.turn()

    @property
    def life(self) -> int:
        """Incarnation of the rogue; 0 if it has none."""
        member = self.core._members.get(ROGUE)
        return member.incarnation if member is not None else 0

    def picture(self) -> tuple[bytes, int, int]:
        """Return what only a valid push may change."""
        return self.shard.picture()

    def refused(self) -> collections.Counter[str]:
        """Return the number of rejected messages so far, by reason."""
        return collections.Counter(self.core.counters.rejected) + collections.Counter(
            self.server.guard.refused
        )

    def num_refused(self) -> int:
        """Return how much was refused so far; much quicker than by reason."""
        return sum(self.core.counters.rejected.values()) + sum(self.server.guard.refused.values())

    def _note(self, event: events.Event, now: float) -> list[events.Action]:
        """Record the applied updates: only pushes, each once, in order, and of this incarnation."""
        before = self.core.version
        actions: list[events.Action] = self._handle(event, now)
        if self.core.version != before:
            assert isinstance(event, events.Push) and self.core.version == before + 1
            newest = max((p.head.step for p in self.applied if p.worker == event.worker), default=0)
            assert event.head.step > newest
            assert event.incarnation == self.core.incarnation_of(event.worker)
            assert event.worker in (HONEST, ROGUE)
            self.applied.append(event)
        return actions

    def check(self) -> None:
        """Check that the model equals the initial model plus the applied updates."""
        self.honest.exchange()
        assert sum(push.worker == HONEST for push in self.applied) == self.honest.num_pushes
        told = sum(client.num_refusals for client in self.clients)
        assert told <= self.refused().total(), (told, self.refused())
        core = _told_only(self.shard.run, self.applied)
        assert core.model.theta.tobytes() == self.core.model.theta.tobytes()
        assert (core.version, core.samples) == (self.core.version, self.core.samples)
        assert self.server.connections.workers.keys() <= {HONEST, ROGUE}
        document = self.shard.board.document()
        assert isinstance(document, str)


def _told_only(run: MiniRun, applied: list[events.Push]) -> PsCore:
    """Return a new core that has received only these pushes."""
    fresh = MiniRun(run.method, iter_max=10**6)
    (core,) = fresh.shards
    core.membership.lease_seconds = 1e9
    for worker in (HONEST, ROGUE):
        core.handle(events.Join(worker, worker, False, "peer"), 0.0)
    for push in applied:
        epoch = core.membership.epoch
        core.handle(dataclasses.replace(push, incarnation=push.worker, epoch=epoch), 0.0)
    return core


@contextlib.contextmanager
def world(name: str) -> Iterator[World]:
    """Return a world in which only calls of the test advance time."""
    clock = FakeClock()
    with contextlib.ExitStack() as stack:
        for name_of_module in _TIMED:
            module = importlib.import_module(name_of_module)
            if hasattr(module, "time"):
                stack.enter_context(mock.patch.object(module, "time", clock))
        yield World(name, clock)

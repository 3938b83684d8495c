"""A shard's datagram port without sockets, threads and time, and the workers that send to it."""

import dataclasses

import numpy as np

from tests.pushes import with_numbers
from tests.virtual.run import MiniRun, MiniWorker
from tests.virtual.toy import KERNELS, method
from thinwire.ops.push_head import PushOrigin
from thinwire.ops.routing.base import Transport
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.membership import FollowerMembership
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.worker.client.datagrams import DatagramChannel
from thinwire.worker.client.messages import push_messages
from thinwire.worker.core.messages import PushRequest

#: Two entries a block, two of the toy's seven fat blocks reliable: all else is in datagrams.
SMALL = {"dgt_block_size": 8, "dgt_k": 0.0}


class LocalPort:
    """A port around a real core; `turn` runs the writer thread's work."""

    def __init__(self, nb_workers=3, follows=False, **choices):
        self.run = MiniRun(method("dgt", nb_workers, **SMALL | choices), iter_max=10**6)
        self.core, self.decoder = self.run.shards[0], self.run.decoders[0]
        if follows:
            chosen, theta = self.run.method, self.core.model.theta
            member = FollowerMembership(nb_workers)
            self.core = PsCore(self.core.config, chosen, theta, KERNELS, member)
        self.core.membership.lease_seconds = 1e9
        self.queue, self.refusals, self.replies, self.welcomes = [], [], [], {}
        sizes = [piece.size for piece in self.run.layouts[0].slices]
        self.port = DatagramPort(
            self.core, self.decoder, sizes, self.queue.append, self.refusals.append
        )
        self.now, self.entropy = 0.0, np.random.default_rng(3)
        self.receiver = self.port.receiver
        self.receiver._clock = lambda: self.now
        self.pushed = []  # events that the core has handled

    def turn(self):
        """Handle all queued events and the events that follow."""
        while self.queue:
            item = self.queue.pop(0)
            if callable(item):
                item()
                continue
            if isinstance(item, events.Push):
                self.pushed.append(item)
            self.dispatch(self.core.handle(item, self.now))
        return self

    def dispatch(self, actions):
        for action in actions:
            if isinstance(action, events.Reply):
                self.replies.append(action)
            elif isinstance(action, events.Reject):
                self.refusals.append(action)
            elif isinstance(action, events.Welcome):
                self.welcomes[action.incarnation] = welcome = pb.Welcome()
                self.port.fill_welcome(action.worker, action.incarnation, welcome)
            elif isinstance(action, events.NewEpoch):
                self.queue.append(self.port.end_sessions)

    def join(self, number, incarnation=None, reconnects=False):
        """Let a life of a worker in; return its end of the path."""
        incarnation = incarnation or number * 1000
        self.queue.append(events.Join(number, incarnation, reconnects, "peer"))
        self.turn()
        return Talker(self, number, incarnation, self.welcomes[incarnation])

    def tick(self):
        """Let time have its turn."""
        self.port.poll()
        self.turn()

    @property
    def theta(self):
        return self.core.model.theta.copy()

    def counters(self, number):
        return [each for worker, each in self.receiver.counters() if worker == number]

    def dropped(self):
        """Why datagrams were dropped, of sessions and of none."""
        found = self.receiver.counts()
        return dict(found.total().dropped) | found.dropped


class Talker:
    """One incarnation of a worker: its core, its datagrams, and its messages from the stream."""

    def __init__(self, port, number, incarnation, welcome):
        self.port, self.number, self.incarnation = port, number, incarnation
        router = port.run.method.router
        self.leg = DatagramChannel(number, router, Transport(dgt_transport="grpc"), None)
        self.leg.open("peer:1", welcome)
        self.core = MiniWorker(number, port.run).core
        self.welcome = welcome

    def begin(self, gradient=None, step=None):
        """Return one exchange of this worker, of ones unless a gradient [28] is given."""
        values = np.ones(28, np.float32) if gradient is None else gradient
        outgoing = self.core.begin(values, 8, 0.5)
        core = self.port.core
        origin = PushOrigin(core.version, core.config.generation)
        outgoing = dataclasses.replace(outgoing, origins=[origin])
        return outgoing if step is None else with_numbers(outgoing, step=step)

    def messages(self, outgoing: PushRequest, **fields):
        """Return (push, payload) from the stream."""
        sealed = self.leg.seal(outgoing.head.step, outgoing.routed[0])
        epoch = self.port.core.membership.epoch
        spoken = push_messages(
            outgoing, 0, self.incarnation, epoch, IndexChooser(), sealed, self.leg.marks_slots
        )
        found = []
        for message, pieces in spoken:
            for name, value in fields.items():
                setattr(message.push, name, value)
            payload = b"".join(bytes(piece) for piece in pieces)
            message.push.payload_bytes = len(payload)
            found.append((message.push, memoryview(payload)))
        return found

    def datagrams(self, outgoing: PushRequest):
        """Return [(data, size)] of the exchange, signed."""
        self.leg.seal(outgoing.head.step, outgoing.routed[0])
        return [(bytes(each.datagrams.data), each.datagrams.size) for each in self.leg.after()]

    def send(self, outgoing: PushRequest):
        """Send the datagrams of an exchange."""
        return sum(
            self.port.receiver.receive(memoryview(data), size)
            for data, size in self.datagrams(outgoing)
        )

    def mark(self, outgoing: PushRequest, **fields):
        """Send the reliable part of an exchange, and let the writer thread have its turn."""
        for push, payload in self.messages(outgoing, **fields):
            self.port.receiver.on_push(self.number, push, payload)
        self.port.turn()

    def push(self, outgoing: PushRequest):
        self.send(outgoing)
        self.mark(outgoing)


def started(port):
    """Return three workers of a run that has begun."""
    workers = [port.join(number) for number in (1, 2, 3)]
    for each in workers:
        port.queue.append(events.Pull(each.number, each.incarnation, None, 0))
    port.turn()
    return workers


def alone(**choices):
    """Return a shard with one worker."""
    port = LocalPort(nb_workers=1, **choices)
    worker = port.join(1)
    port.queue.append(events.Pull(1, worker.incarnation, None, 0))
    port.turn()
    return port, worker


def values_of(event):
    """Decode a push, [28]."""
    found = np.zeros(28, np.float32)
    found[slice(None) if event.update.indices is None else event.update.indices] = (
        event.update.values
    )
    return found


def ramp(scale=1.0):
    return np.arange(1, 29, dtype=np.float32) * np.float32(scale)


def hostile(rng, good, old):
    """Return (data, size, number) of one buffer of datagrams that every receiver must reject.

    Args:
        rng: Decides.
        good: Buffers of the open step, (data, size), to be damaged.
        old: Buffers of a closed step, to be replayed.
    """
    data, size = good[rng.integers(len(good))]
    whole = bytearray(data)
    kind = rng.integers(6)
    if kind == 0:  # noise
        size = int(rng.integers(1, 1500))
        whole = bytearray(rng.bytes(size * int(rng.integers(1, 20))))
    elif kind == 1:  # cut off, or with something behind it
        size = int(rng.integers(1, size))
        whole = whole[: size * (len(whole) // size)]
    elif kind == 2:  # a bit of each turned
        for start in range(0, len(whole), size):
            whole[start + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
    elif kind == 3:  # seen before
        data, size = old[rng.integers(len(old))]
        whole = bytearray(data)
    elif kind == 4:  # datagrams of another session
        for start in range(0, len(whole), size):
            whole[start + 8 : start + 16] = rng.bytes(8)
    else:  # signed with an unknown key
        for start in range(0, len(whole), size):
            whole[start + size - 16 : start + size] = rng.bytes(16)
    return bytes(whole), size, -(-len(whole) // size)

"""One shard and its workers, with real cores and wire coding, where any message may be lost.

Each worker's model is compared with the shard's copy of the worker's model, bit for bit.
"""

import copy
import dataclasses

import numpy as np

from tests.virtual.toy import KERNELS, method
from thinwire.ops.downlink.sparse import DownAuto
from thinwire.ops.downlink.types import Operation
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sharding.split import place_tensors, shard_spec
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.ps.wire.replies import blocks_of_reply
from thinwire.worker.client.messages import push_messages
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import ShardReply

SPEC = ModelSpec((TensorSpec("kernel", (6, 5)), TensorSpec("b", (5,)), TensorSpec("one", (1,))))
SIZE = SPEC.num_parameters
LEASE_SECONDS = 10.0


def sending(down_codec="sparse", name="asgd", nb_workers=2, codec="topk", **choices):
    """A method with shards that reply by `down_codec` to pushes of `codec`."""
    choices = {"compression_rate": 0.2, **choices}
    overrides = {"down_codec": down_codec, "codec": codec, **choices.pop("overrides", {})}
    return method(name, nb_workers=nb_workers, overrides=overrides, **choices)


def eager(chosen, push_factor=0.0):
    """Let auto switch by the first large reply, and by the share of entries alone."""
    down_codec = chosen.down_codec
    if isinstance(down_codec, DownAuto):
        down_codec = dataclasses.replace(down_codec, push_factor=push_factor, patience=1)
    return dataclasses.replace(chosen, down_codec=down_codec)


class Life:
    """One incarnation of a worker."""

    def __init__(self, world, number, incarnation):
        self.world, self.number, self.incarnation = world, number, incarnation
        self.core = WorkerCore(SPEC, world.layouts, world.method, KERNELS, [1, number])
        self.chooser = IndexChooser()


class World:
    """Drives a shard; `number` is a worker's."""

    def __init__(self, method, nb_workers=2, seed=1):
        self.method, self.nb_workers = method, nb_workers
        self.layouts = place_tensors(SPEC, 1)
        relays = method.down_codec.relays
        self.decoder = PushDecoder(self.layouts[0], method.kind, KERNELS, keeps_blocks=relays)
        self.rng = np.random.default_rng(seed)
        self.now, self.incarnations, self.generation = 0.0, 0, 0
        self.initial = self.rng.standard_normal(SIZE, np.float32)
        self.core = self.new_core()
        self.snapshot = self.core.state_dict()
        self.lives = {}
        self.operations = set()
        for number in range(1, nb_workers + 1):
            self.be_born(number)

    def new_core(self):
        config = CoreConfig(
            Budget(10**6),
            Schedule(0.1),
            self.nb_workers,
            self.generation,
            spec=shard_spec(SPEC, self.layouts[0]),
        )
        lead = Coordinator(self.nb_workers, LEASE_SECONDS)
        core = PsCore(config, self.method, self.initial.copy(), KERNELS, lead)
        core.is_behind = bool(self.rng.integers(2))  # it relays more then
        return core

    # -- possible events ----------------------------------------------------------------------

    def be_born(self, number):
        """A new process takes a worker's place."""
        if number in self.lives:
            self.feed(events.WorkerDisconnected(number, self.lives[number].incarnation))
        self.incarnations += 1
        life = self.lives[number] = Life(self, number, self.incarnations)
        life.core.step = self.hello(number, reconnects=False).last_step
        self.pull(number)

    def push(self, number, size=1.0, num_lost=0):
        """Push an update; `num_lost` replies are lost and requested again on a new stream."""
        core = self.lives[number].core
        gradient = (size * self.rng.standard_normal(SIZE)).astype(np.float32)
        self.exchange(number, core.begin(gradient, 1, 0.5), num_lost)

    def forget(self, number):
        """A worker is silent until its lease has ended; it does not know."""
        for other in self.lives:
            if other != number:
                self.now += LEASE_SECONDS / 2
                self.feed(events.WorkerAlive(other))
        self.now += LEASE_SECONDS
        for other in self.lives:
            if other != number:
                self.feed(events.WorkerAlive(other))
        self.feed(events.Tick())

    def save(self):
        """The shard writes a checkpoint."""
        self.snapshot = copy.deepcopy(self.core.state_dict())

    def restart(self):
        """The shard dies and restarts from its checkpoint."""
        self.generation += 1
        self.core = self.new_core()
        self.core.load_state_dict(copy.deepcopy(self.snapshot))
        for number in self.lives:
            self.hello(number, reconnects=True)

    def pull(self, number, num_lost=0):
        """Fetch the model; a worker with a push of another generation fetches it too."""
        pull = events.Pull(number, self.lives[number].incarnation, None, 0)
        actions = self.feed(pull)
        if any(isinstance(each, events.Reject) for each in actions):
            self.hello(number, reconnects=True)
            actions = self.feed(pull)
        for _ in range(num_lost):
            actions = self.feed(pull)
        self.take(number, actions)

    def settle(self, number, num_exchanges):
        """Push nothing for a while."""
        for _ in range(num_exchanges):
            self.push(number, size=0.0)

    # -- the machinery ------------------------------------------------------------------------

    def feed(self, event):
        return self.core.handle(event, self.now)

    def hello(self, number, reconnects):
        join = events.Join(number, self.lives[number].incarnation, reconnects, "somewhere")
        return next(each for each in self.feed(join) if isinstance(each, events.Welcome))

    def exchange(self, number, outgoing, num_lost):
        life = self.lives[number]
        ((message, pieces),) = push_messages(outgoing, 0, life.incarnation, 0, life.chooser)
        payload = memoryview(b"".join(pieces))
        push = self.decoder.decode(number, message.push, payload)
        while True:
            actions = self.feed(dataclasses.replace(push, epoch=self.core.membership.epoch))
            refused = {each.reason for each in actions if isinstance(each, events.Reject)}
            if refused == {"NOT_MEMBER"} or (num_lost > 0 and not refused):
                num_lost -= not refused
                self.feed(events.WorkerDisconnected(number, life.incarnation))
                self.hello(number, reconnects=True)
            elif refused == {"STALE_GENERATION"}:
                return self.pull(number)
            else:
                assert not refused
                return self.take(number, actions)

    def take(self, number, actions):
        """Let a worker apply a reply, by way of the wire."""
        (reply,) = [each for each in actions if isinstance(each, events.Reply)]
        life, message = self.lives[number], pb.Reply()
        sizes = [piece.size for piece in self.layouts[0].slices]
        blocks, rounds = (), ()
        if reply.operation is Operation.RELAY:
            message.step = reply.step
            pieces = messages.rounds_to_message(reply.update, message, life.chooser)
            payload = memoryview(b"".join(map(bytes, pieces)))
            rounds = messages.rounds_from_message(message, payload, sizes)
        else:
            coded = map(life.chooser.encode, blocks_of_reply(reply.update, self.layouts[0]))
            pieces = messages.blocks_to_message(coded, message.blocks)
            payload = memoryview(b"".join(map(bytes, pieces)))
            blocks = messages.blocks_from_message(message.blocks, payload, sizes)
        self.operations.add(reply.operation)
        assert (reply.operation is Operation.NONE) <= (not blocks)
        given = reply.operation, blocks, reply.version, self.generation, 0.1, 0, False
        life.core.finish([ShardReply(*given, rounds=rounds)])
        self.check(number, reply)

    def check(self, number, reply):
        """The worker's model equals the shard's copy of it (invariant I1 of DGS)."""
        copy_of = self.core.model.method.down_codec.replica_of
        held = copy_of(number, reply.version, self.core.model.downlink.state)
        expected = self.theta if held is None else held
        assert held is not None or reply.version == self.core.version
        np.testing.assert_array_equal(self.base(number), expected)

    @property
    def theta(self):
        return self.core.model.theta

    def base(self, number):
        return self.lives[number].core.base

    @property
    def counts(self):
        return self.core.model.downlink.summary()

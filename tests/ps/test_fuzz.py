"""Random and mutated messages neither crash a shard nor change its model."""

import random

import numpy as np
import pytest

from ops import wire
from ops.routing import place
from ops.schedule import Budget, Schedule
from ops.types import Block, CodedValues
from proto import convert
from proto import thinwire_pb2 as pb
from ps.core import PsCore
from ps.handshake import identity
from ps.members import CoreConfig
from ps.membership import Coordinator
from ps.server import ShardServer
from tests.harness import KERNELS, SPEC, method

MESSAGES = 100_000
FRAMES_OF_A_STREAM = 40
POOL = 4_000


class FakeStream:
    """A stream without a socket: plays frames, keeps what is sent."""

    peer, lost, bytes_sent = "fuzz", False, 0

    def __init__(self, server, frames):
        self.server, self.frames, self.sent, self.taken = server, frames, [], 0

    def incoming(self):
        for self.taken, frame in enumerate(self.frames, 1):  # noqa: B020 - counts what was read
            yield frame
            drain(self.server)  # the writer's turn

    def send(self, frames, counted=True):
        self.sent += frames() if callable(frames) else frames

    def pace(self, link, share, seed):
        pass

    def close(self):
        pass


@pytest.fixture
def server():
    chosen = method("adacomp", nb_workers=3, compression_rate=0.2)
    layout = place(SPEC, 1)[0]
    config = CoreConfig(Budget(10**6), Schedule(0.1), 3, snapshot_interval_seconds=1e9)
    core = PsCore(
        config, chosen, np.ones(28, np.float32), KERNELS, Coordinator(3, 1e9), chosen.sync
    )
    made = ShardServer(core, layout, 1.0, lambda version, state: None, 1e9, 8)
    made.open_for(identity("run", 0, 1, 0, chosen.fingerprint(), SPEC, []), "{}")
    return made


def drain(server):
    while not server.queue.empty():
        item = server.queue.get()
        if callable(item):
            item()
        else:
            server._dispatch(server.core.handle(item, 0.0))


def hello(server, worker, incarnation=0):
    mine = server.identity
    message = pb.Hello(
        protocol_version=1, role=pb.ROLE_WORKER, id=worker, fingerprint=mine.fingerprint,
        model=mine.model, num_shards=1, incarnation=incarnation,
    )  # fmt: skip
    return convert.frame(pb.ToServer(hello=message))


def push_frames(rng, value, **fields):
    """One push of a few entries; `value` NaN or a wrong incarnation makes it illegal."""
    count = int(rng.integers(1, 6))
    indices = np.sort(rng.choice(16, count, replace=False)).astype(np.int64)
    block = Block(0, 16, indices, CodedValues("float32", np.full(count, value, np.float32)))
    push = {"step": 1, "samples": 1, "local_steps": 1, "incarnation": 5} | fields
    message = pb.ToServer(push=pb.Push(**push))
    pieces = convert.blocks_to_message([wire.IndexChooser().encode(block)], message.push.blocks)
    return list(convert.frames(message, pieces))


def illegal(rng, dice, server):
    """One frame that no rule allows to change the model."""
    # Frames that do not parse end their stream: rarer, so that streams grow long.
    kind = dice.choices(range(8), (1, 8, 8, 8, 8, 8, 1, 1))[0]
    if kind == 0:
        return dice.randbytes(dice.randrange(60))
    if kind == 1:
        return push_frames(rng, np.nan)[0]
    if kind == 2:
        return push_frames(rng, 1.0, incarnation=dice.getrandbits(63) | 1 << 62)[0]
    if kind == 3:
        return push_frames(rng, 1.0, kind=pb.UPDATE_KIND_DELTA)[0]
    if kind == 4:
        return push_frames(rng, 1.0, step=0)[0]
    if kind == 5:
        return convert.frame(pb.ToServer(pull=pb.Pull(base_version=dice.getrandbits(60))))
    base = bytearray(push_frames(rng, np.inf)[0] if kind == 6 else hello(server, 4))
    for _ in range(dice.randrange(1, 4)):
        base[dice.randrange(len(base))] = dice.randrange(256)
    return bytes(base[: dice.randrange(1, len(base) + 1)])


@pytest.mark.timeout(300)
def test_a_hundred_thousand_bad_messages(server):
    rng, dice = np.random.default_rng(3), random.Random(3)
    theta, version = server.core.model.theta.copy(), server.core.version
    pool = [illegal(rng, dice, server) for _ in range(POOL)]  # making a message costs most
    hellos = [hello(server, worker, life) for worker in range(1, 5) for life in range(9)]
    sent = 0
    while sent < MESSAGES:
        frames = dice.choices(pool, k=FRAMES_OF_A_STREAM)
        if dice.random() < 0.9:
            frames.insert(dice.randrange(2), dice.choice(hellos))
        stream = FakeStream(server, frames)
        server._read(stream)
        drain(server)
        sent += stream.taken
    np.testing.assert_array_equal(server.core.model.theta, theta)
    assert server.core.version == version
    honest = FakeStream(server, [
        hello(server, 1, 77),
        convert.frame(pb.ToServer(pull=pb.Pull())),
    ])  # fmt: skip
    for lease in server.core.membership.leases.values():
        lease.connected = False
    server._read(honest)
    drain(server)
    epoch = server.core.membership.epoch
    push = FakeStream(
        server, [hello(server, 1, 77), *push_frames(rng, 1.0, incarnation=77, epoch=epoch)]
    )
    server._read(push)
    drain(server)
    assert server.core.version == version + 1

"""Clients that lie: 10^5 random and mutated messages against the real reader, server and core.

No sockets and no threads: an honest worker's stream is read to its end by a StreamReader, and
between its frames other streams say whatever a seeded generator makes up. Every push they make up
carries a defect that no mutation mends, so the model must stay what the honest worker made it.
"""

import math
import random
import struct
import types

import numpy as np
import pytest
from absl import logging

from ops import wire
from ops.down_codecs import Operation
from ops.types import Block, CodedValues
from proto import convert
from proto import thinwire_pb2 as pb
from ps.handshake import identity
from ps.pushes import PushDecoder
from ps.reader import StreamReader
from ps.server import ShardServer
from ps.status import StatusBoard
from tests.harness import KERNELS, SPEC, MiniRun, MiniWorker, method
from worker.core import ShardReply

NUM_MESSAGES = 100_000
ROUNDS = 50  # pushes of the honest worker
HONEST, ROGUE = 1, 2
FOREIGN_LIFE = 0x1234  # no worker's incarnation
BIG = 2**64 - 1
_POSITIONS = struct.pack("<II", 1, 7)
_SPARSE = [pb.Block(slot=0, count=2, coding=pb.INDEX_CODING_UINT32, index_bytes=8)]


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    yield
    logging.set_verbosity(before)


class Stream:
    """What a reader sees of a client: `frames` may be a generator that looks at what was sent."""

    def __init__(self, server, frames=()):
        self.server, self.frames = server, frames
        self.peer, self.lost, self.bytes_sent, self.num_read = "fuzz", False, 0, 0
        self.closed = False
        self._assembler = convert.Assembler(pb.ToClient, lambda message: 1 << 20)
        self.received = []

    def incoming(self):
        for frame in self.frames:
            if self.closed:
                return
            self.num_read += 1
            yield frame
            self.server.run_until(self.server.queue.empty)

    def send(self, frames, counted=True):
        for frame in frames() if callable(frames) else frames:
            complete = self._assembler.feed(frame)
            if complete is not None:
                self.received.append(complete)

    def pace(self, link, share, seed):
        assert math.isfinite(link.mbps) and math.isfinite(link.delay_ms)

    def close(self):
        self.closed = True

    def read(self):
        StreamReader(self.server, self.server.decoder, self).read()
        self.server.run_until(self.server.queue.empty)
        return self

    def last(self, body):
        found = [pair for pair in self.received if pair[0].WhichOneof("body") == body]
        return (getattr(found[-1][0], body), found[-1][1]) if found else (None, None)


class Shard:
    """A real server around a real core, two workers."""

    def __init__(self, name="adacomp", **choices):
        self.run = MiniRun(method(name, nb_workers=2, **choices), iter_max=10**6)
        self.core = self.run.shards[0]
        self.core.membership.lease_seconds = 1e9
        self.server = ShardServer(
            self.core, self.run.layouts[0], 1.0, lambda version, state: None, 1e9, 8
        )
        self.fingerprint = self.run.method.fingerprint()
        mine = identity("run", 0, 1, 0, self.fingerprint, SPEC, [])
        about = types.SimpleNamespace(
            method=self.run.method, nb_workers=2, nb_ps=1, seed=1, iter_max=10**6
        )
        self.board = StatusBoard(about, SPEC, self.core, self.server)
        self.server.on_status = self.board.document
        self.server.open_for(mine, "{}")

    def hello(self, **fields):
        return pb.Hello(
            **{
                "protocol_version": convert.PROTOCOL_VERSION,
                "role": pb.ROLE_WORKER,
                "id": ROGUE,
                "fingerprint": convert.settings_of(self.fingerprint),
                "model": convert.tensors_of(SPEC),
                "num_shards": 1,
                **fields,
            }
        )

    def say(self, *messages, **fields):
        """Let a worker say Hello, then these; return its stream, read to its end."""
        first = frame(hello=self.hello(**fields))
        rest = [one if isinstance(one, bytes) else frame(**one) for one in messages]
        return Stream(self.server, [first, *rest]).read()

    def picture(self):
        """What only a valid push may change."""
        return self.core.model.theta.tobytes(), self.core.version, self.core.samples


def frame(**body):
    return pb.ToServer(**body).SerializeToString()


def push_frame(blocks=None, values=b"", **fields):
    """A push that is right but for what the arguments make wrong."""
    if blocks is None:
        block = Block(0, 24, np.array([1, 7]), CodedValues("float32", np.float32([0.1, -0.2])))
        message = pb.ToServer()
        pieces = convert.blocks_to_message([wire.IndexChooser().encode(block)], message.push.blocks)
        blocks, values = message.push.blocks, b"".join(pieces)
    push = pb.Push(
        **{"step": 1, "samples": 8, "local_steps": 1, "loss": 0.5, "blocks": blocks,
           "payload": values, "payload_bytes": len(values), "epoch": 1, **fields}
    )  # fmt: skip
    return frame(push=push)


class Honest:
    """The worker that must come through: the real worker core on a stream of its own."""

    def __init__(self, shard):
        self.shard, self.worker = shard, MiniWorker(HONEST, shard.run)
        self.losses, self.outgoing = [], None
        self.decoder = PushDecoder(shard.run.layouts[0], shard.run.method.kind, KERNELS)

    def life(self, between):
        """Yield the frames of Hello, a pull and ROUNDS pushes; call `between` before each push."""
        yield frame(hello=self.shard.hello(id=HONEST))
        welcome, _ = self.stream.last("welcome")
        yield frame(pull=pb.Pull())
        for _ in range(ROUNDS):
            self.take()
            before = self.shard.picture()
            between()
            assert self.shard.picture() == before
            self.worker.core.learning_rate = 0.1
            yield from self.push(welcome)
            assert self.shard.core.version == before[1] + 1
        self.take()

    def push(self, welcome):
        run, core = self.shard.run, self.worker.core
        batch = self.worker.batches.integers(0, len(run.problem.y), run.batch)
        loss, gradient = run.problem.gradient(core.weights, batch)
        self.losses.append(loss)
        outgoing = core.begin(gradient, run.batch, loss)
        message = pb.ToServer()
        message.push.incarnation, message.push.epoch = welcome.incarnation, welcome.epoch
        message.push.step, message.push.base_version = outgoing.step, outgoing.base_versions[0]
        message.push.samples, message.push.local_steps = outgoing.samples, outgoing.local_steps
        message.push.loss = outgoing.loss
        coded = [wire.IndexChooser().encode(block) for block in outgoing.shards[0]]
        pieces = convert.blocks_to_message(coded, message.push.blocks)
        return convert.frames(message, pieces)

    def take(self):
        reply, payload = self.stream.last("reply")
        sizes = [piece.size for piece in self.shard.run.layouts[0].slices]
        blocks = convert.blocks_from_message(reply.blocks, payload, sizes)

        self.worker.core.finish(
            [ShardReply(Operation(reply.operation), blocks, reply.version, reply.generation,
                        reply.learning_rate, reply.samples, reply.stop)]
        )  # fmt: skip

    def train(self, between):
        self.stream = Stream(self.shard.server)
        self.stream.frames = self.life(between)
        return self.stream.read()


class Liar:
    """Makes up streams of frames."""

    def __init__(self, shard, seed):
        self.shard, self.dice = shard, random.Random(seed)
        self.sent = 0
        self.ends = {"worker": 0, "stranger": 0, "supervisor": 0}
        self._payload = np.float32([0.5, -0.5]).tobytes()
        self.seeds = [
            frame(hello=shard.hello()),
            frame(hello=shard.hello(id=HONEST)),
            frame(pull=pb.Pull(base_version=3, has_base=True)),
            push_frame(incarnation=FOREIGN_LIFE),
            push_frame(incarnation=FOREIGN_LIFE, payload=b""),
            frame(heartbeat=pb.Heartbeat()),
            frame(report=pb.Report(document='{"id": 2, "bytes_up": 7, "non_finite": 1}')),
            frame(leave=pb.Leave(cause="done")),
            frame(halt=pb.Halt(cause="iter_max")),
            frame(chunk=pb.Chunk(data=self._payload)),
        ]

    def streams(self, num_messages):
        """Say at least so many frames, over many streams."""
        goal = self.sent + num_messages
        while self.sent < goal:
            kind = self.dice.choices(("worker", "stranger", "supervisor"), (8, 1, 1))[0]
            stream = Stream(self.shard.server, getattr(self, f"_{kind}")()).read()
            self.sent += stream.num_read
            self.ends[kind] += 1

    def _worker(self):
        """A worker that is let in, and then lies about everything."""
        stream_hello = self.shard.hello(incarnation=self.dice.choice((0, 0, 5, BIG)))
        yield frame(hello=stream_hello)
        life = self.shard.core.members[ROGUE].incarnation
        for _ in range(self.dice.randrange(200)):
            yield from self._lie(life)

    def _stranger(self):
        """A first frame that is wrong in some way."""
        yield self.dice.choice((self._noise, self._odd_hello))()
        for _ in range(5):
            yield self._noise()

    def _supervisor(self):
        yield frame(hello=pb.Hello(protocol_version=1, role=pb.ROLE_SUPERVISOR, num_shards=1))
        for _ in range(self.dice.randrange(20)):
            yield self.dice.choice(
                (
                    frame(pull=pb.Pull(observe=True, base_version=self._number())),
                    frame(heartbeat=pb.Heartbeat()),
                    self._report(),
                )
            )
        yield frame(halt=pb.Halt(cause=self.dice.choice(("", "why not", "iter_max\n"))))

    def _lie(self, life):
        choice = self.dice.randrange(20)
        if choice < 14:
            yield self._bad_push(life)
        elif choice == 14:
            yield frame(pull=pb.Pull(base_version=self._number(), has_base=True,
                                     generation=self.dice.choice((0, 1, 2**32 - 1))))  # fmt: skip
        elif choice == 15:
            yield self._report()
        elif choice == 16:
            yield frame(heartbeat=pb.Heartbeat())
        elif choice == 17:  # announces a payload and sends other pieces than announced
            yield push_frame(incarnation=FOREIGN_LIFE, payload=b"")
            yield frame(chunk=pb.Chunk(data=self._payload))
            yield frame(chunk=pb.Chunk(data=self.dice.randbytes(self.dice.randrange(20))))
        elif self.dice.random() < 0.2:
            yield self._noise()

    def _bad_push(self, life):
        """A push that is right but for one thing, or of a wrong life and anything at all."""
        dice = self.dice
        right = {"incarnation": life, "epoch": self.shard.core.membership.epoch}
        dense = [pb.Block(slot=0, count=24), pb.Block(slot=1, count=4)]
        finite = np.float32([0.5, -0.5]).tobytes()
        match dice.randrange(9):
            case 0:
                value = dice.choice((math.nan, math.inf, -math.inf))
                values = _POSITIONS + np.float32([value, 1]).tobytes()
                return push_frame(_SPARSE, values, **right, base_version=dice.choice((0, 1)))
            case 1:
                return push_frame(**right, loss=dice.choice((math.nan, math.inf)))
            case 2:
                return push_frame(**right, kind=dice.choice((1, 2, 77)))
            case 3:
                return push_frame(**right, samples=dice.choice((0, 2**31, 2**32 - 1)))
            case 4:
                return push_frame(**right, step=dice.choice((0, BIG, 2**63, 2**53 + 1)))
            case 5:
                return push_frame(**right, local_steps=dice.choice((0, 9, 2**32 - 1)))
            case 6:  # slots that repeat, descend or do not exist; lengths that lie
                odd = dice.choice((*dense, pb.Block(slot=9), pb.Block(slot=1, count=5)))
                blocks = dice.choice(([*dense, odd], dense[::-1], [odd, *dense]))
                return push_frame(blocks, bytes(4 * 28 + 4 * odd.count), **right)
            case 7:
                positions = dice.choice(((7, 1), (7, 7), (1, 24), (1, 2**32 - 1)))
                return push_frame(_SPARSE, struct.pack("<II", *positions) + finite, **right)
        return self._foreign_push()

    def _foreign_push(self):
        """A push of nobody's life: anything may be in it, also nothing wrong."""
        dice = self.dice
        if dice.random() < 0.3:
            return push_frame(incarnation=FOREIGN_LIFE, epoch=self.shard.core.membership.epoch)
        return push_frame(
            self._any_blocks(), dice.randbytes(dice.randrange(150)), incarnation=FOREIGN_LIFE,
            step=self._number(), base_version=self._number(), epoch=dice.getrandbits(32),
            generation=dice.choice((0, 1, 2**32 - 1)), samples=dice.getrandbits(32),
            loss=dice.choice((0.1, math.nan)),
        )  # fmt: skip

    def _any_blocks(self):
        dice = self.dice
        return [
            pb.Block(
                slot=dice.choice((0, 1, 2, 2**32 - 1)),
                count=dice.choice((0, 1, 4, 24, 2**32 - 1)),
                coding=dice.randrange(8),
                coding_parameter=dice.choice((0, 3, 64, 2**32 - 1)),
                index_bytes=dice.choice((0, 1, 3, 4, 2**32 - 1)),
                value_dtype=dice.randrange(6),
                scale=dice.choice((1.0, 3e38, math.nan)),
            )
            for _ in range(dice.randrange(4))
        ]

    def _odd_hello(self):
        nan, dice = math.nan, self.dice
        odd = dice.choice(
            (
                {"protocol_version": 2},
                {"role": 9},
                {"role": pb.ROLE_SHARD, "id": dice.getrandbits(32)},
                {"id": dice.choice((0, 3, HONEST, 2**32 - 1))},
                {"id": HONEST, "incarnation": dice.getrandbits(63)},
                {"run_id": "x" * dice.choice((1, 10**6))},
                {
                    "fingerprint": [
                        pb.Setting(name=self.shard.fingerprint[0][0], value="\x01" * 400_000)
                    ]
                },
                {"model": [pb.Tensor(path="w", shape=[2**32 - 1] * 9, dtype="float32")]},
                {"shard": 1},
                {"num_shards": 0},
                {"link": pb.EmulatedLink(mbps=dice.choice((nan, math.inf, -1, 1e-300)))},
                {"link": pb.EmulatedLink(mbps=1, delay_ms=dice.choice((nan, math.inf, -1)))},
                {"link": pb.EmulatedLink(mbps=1, loss=dice.choice((nan, 1, -1)))},
            )
        )
        return frame(hello=self.shard.hello(**odd))

    def _report(self):
        dice = self.dice
        text = dice.choice(
            (
                "", "[]", "{}", "NaN", "[" * 50_000, '{"id": 2, "bytes_up": 1e999}',
                f'{{"id": 2, "bytes_up": {10**400}}}', '{"id": 2, "compute_seconds": -Infinity}',
                '{"id": 2, "bytes_up": 3}', '{"rejected": {"x": 1}, "bytes_down": {"1": 1e99}}',
            )
        )  # fmt: skip
        return frame(report=pb.Report(document=text))

    def _number(self):
        return self.dice.choice((0, 1, 2, 50, 2**31, 2**32, 2**53, 2**63, BIG))

    def _noise(self):
        """Random bytes, or a frame of a seed with bits and bytes changed."""
        dice = self.dice
        if dice.random() < 0.3:
            return dice.randbytes(dice.randrange(80))
        spoilt = bytearray(dice.choice(self.seeds))
        for _ in range(dice.randrange(4)):
            position = dice.randrange(len(spoilt) + 1)
            match dice.randrange(4):
                case 0:
                    spoilt[position : position + 1] = dice.randbytes(1)
                case 1:
                    del spoilt[position : position + dice.randrange(8)]
                case 2:
                    spoilt[position:position] = b"\xff" * dice.randrange(12)
                case _ if position < len(spoilt):
                    spoilt[position] ^= 1 << dice.randrange(8)
        return bytes(spoilt)


@pytest.mark.parametrize("name", ["adacomp", "asgd"])
def test_a_hundred_thousand_lies_change_nothing(name):
    choices = {"compression_rate": 0.25} if name == "adacomp" else {}
    shard = Shard(name, **choices)
    honest, liar = Honest(shard), Liar(shard, seed=11)

    def between():
        liar.streams(NUM_MESSAGES // 2 // ROUNDS)
        shard.board.document()

    honest.train(between)
    core = shard.core
    assert liar.sent >= NUM_MESSAGES // 2
    assert min(liar.ends.values()) > 100, liar.ends
    assert (core.version, core.samples) == (ROUNDS, 8 * ROUNDS)
    assert core.members[HONEST].last_step == ROUNDS
    account = core.accounts.workers[HONEST]
    assert (account.pushes, account.refused) == (ROUNDS, 0)
    assert core.accounts.workers[ROGUE].pushes == 0
    assert core.accounts.rejected["non_finite"] > 1000
    assert core.accounts.rejected["malformed"] > 1000
    assert core.accounts.lost_updates == 0
    assert core.stop_reason is None
    assert core.members[ROGUE].last_step <= 2**53
    assert set(shard.server.connections.workers) <= {HONEST, ROGUE}
    assert np.mean(honest.losses[-10:]) < 0.8 * np.mean(honest.losses[:10])
    status = shard.board.status()
    assert status.rejected_pushes["non_finite"] == core.accounts.rejected["non_finite"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_non_finite_pushes_are_refused_and_counted(value, dtype):
    shard = Shard("asgd")
    data, scale = {
        "float32": (np.float32([1, value]), 1.0),
        "float16": (np.float16([1, value]), 1.0),
        "bfloat16": ((np.float32([1, value]).view(np.uint32) >> 16).astype(np.uint16), 1.0),
        "int8": (np.int8([100, 100]), 3e38),  # finite but for their product
    }[dtype]
    block = Block(0, 24, np.array([2, 3]), CodedValues(dtype, data, scale))
    message = pb.ToServer()
    pieces = convert.blocks_to_message([wire.IndexChooser().encode(block)], message.push.blocks)
    before = shard.picture()
    stream = shard.say(
        push_frame(message.push.blocks, b"".join(pieces), incarnation=5), incarnation=5
    )
    refusal, _ = stream.last("refusal")
    assert (refusal.reason, refusal.step) == (pb.REASON_NON_FINITE, 1)
    assert shard.core.accounts.rejected == {"non_finite": 1}
    assert shard.core.accounts.workers[ROGUE].refused == 1
    assert shard.picture() == before


def test_a_push_of_an_epoch_from_the_future_does_not_hold_up_its_group():
    shard = Shard("bsp")
    shard.say(incarnation=5, id=HONEST)
    stream = shard.say(push_frame(incarnation=5, epoch=2**32 - 1), incarnation=5)
    refusal, _ = stream.last("refusal")
    assert refusal.reason == pb.REASON_STALE_EPOCH
    assert refusal.epoch == shard.core.membership.epoch


def test_a_long_step_leaves_room_for_whoever_comes_next():
    shard = Shard("asgd")
    shard.say(push_frame(incarnation=5, step=2**53 - 5, base_version=0), incarnation=5)
    assert shard.core.version == 1
    welcome, _ = shard.say(incarnation=5).last("welcome")
    assert welcome.last_applied_step == 2**53 - 5
    last = push_frame(incarnation=5, step=2**53 - 4, base_version=1)
    shard.say(last, last, incarnation=5)
    assert shard.core.version == 2


def test_a_refused_hello_cannot_act_for_the_worker_it_named():
    shard = Shard("asgd")
    imposter = Stream(shard.server)
    frames = [
        frame(hello=shard.hello(id=HONEST)),
        frame(report=pb.Report(document='{"id": 1, "bytes_up": 9}')),
        frame(pull=pb.Pull()),
    ]
    imposter.incoming = lambda: iter(frames)  # all at once, before the core has judged

    def holder():
        yield frame(hello=shard.hello(id=HONEST, incarnation=7))
        imposter.read()

    stream = Stream(shard.server, holder()).read()
    reasons = [one.refusal.reason for one, _ in imposter.received]
    assert pb.REASON_ID_TAKEN in reasons
    said = {one.WhichOneof("body") for one, _ in stream.received}
    assert said <= {"welcome", "waiting"}
    assert not shard.server.reports


def test_a_stream_that_breaks_before_its_welcome_leaves_the_id_free():
    shard = Shard("asgd")
    broken = Stream(shard.server, [])
    broken.incoming = lambda: iter([frame(hello=shard.hello())])  # gone before the core runs
    broken.read()
    assert broken.last("welcome")[0] is not None
    assert shard.say().last("welcome")[0] is not None

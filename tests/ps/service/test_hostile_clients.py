"""10^5 random and mutated messages against the real reader, server and core change nothing.

A StreamReader reads an honest worker's stream to its end. Between the frames other streams send
messages from a seeded generator. Every generated push carries a defect that no mutation
repairs, so the model must equal the result of the honest worker alone.
"""

import math

import numpy as np
import pytest
from absl import logging

from tests.ps.hostile_client import Liar
from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame, push_frame
from tests.virtual.run import MiniWorker
from tests.virtual.toy import KERNELS
from thinwire.ops.downlink.types import Operation
from thinwire.ops.types import Block, CodedValues
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import framing, messages, push_head
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.worker.core.messages import ShardReply

NUM_MESSAGES = 100_000  # number of frames in `make product`; a fifth of them in every run
ROUNDS = 50  # pushes of the honest worker


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    yield
    logging.set_verbosity(before)


class Honest:
    """The honest worker, whose pushes must be applied: the real worker core on its own stream."""

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
        message.push.kind = self.shard.kind
        push_head.head_to_message(outgoing.head, message.push)
        push_head.origin_to_message(outgoing.origins[0], message.push)
        coded = [IndexChooser().encode(block) for block in outgoing.shards[0]]
        pieces = messages.blocks_to_message(coded, message.push.blocks)
        return framing.frames(message, pieces)

    def take(self):
        reply, payload = self.stream.last("reply")
        sizes = [piece.size for piece in self.shard.run.layouts[0].slices]
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

    def train(self, between):
        self.stream = Stream(self.shard.server)
        self.stream.frames = self.life(between)
        return self.stream.read()


#: Method -> settings with which one worker can push without waiting for the rogue.
CHOICES = {
    "adacomp": {"compression_rate": 0.25},
    "asgd": {},
    "esync": {"max_local_steps": 1, "overrides": {"sync": "asp"}},
}


@pytest.mark.parametrize(
    ("name", "num_messages"),
    [
        ("adacomp", NUM_MESSAGES // 5),
        *(pytest.param(name, NUM_MESSAGES, marks=pytest.mark.product) for name in CHOICES),
    ],
)
def test_a_hundred_thousand_lies_change_nothing(name, num_messages):
    shard = Shard(name, **CHOICES[name])
    honest, liar = Honest(shard), Liar(shard, seed=11)

    def between():
        liar.streams(num_messages // 2 // ROUNDS)
        shard.board.document()

    honest.train(between)
    core = shard.core
    assert liar.sent >= num_messages // 2
    assert min(liar.ends.values()) > num_messages // 1000, liar.ends
    assert (core.version, core.samples) == (ROUNDS, 8 * ROUNDS)
    assert core._members[HONEST].last_step == ROUNDS
    account = core.counters.workers[HONEST]
    assert (account.pushes, account.refused) == (ROUNDS, 0)
    assert core.counters.workers[ROGUE].pushes == 0
    assert core.counters.rejected["non_finite"] > num_messages // 100
    assert core.counters.rejected["malformed"] > num_messages // 100
    assert core.counters.lost_updates == 0
    assert core.stop_reason is None
    assert core._members[ROGUE].last_step <= 2**53
    assert set(shard.server.connections.workers) <= {HONEST, ROGUE}
    assert np.mean(honest.losses[-10:]) < 0.8 * np.mean(honest.losses[:10])
    status = shard.board.status()
    assert status.rejected_pushes["non_finite"] == core.counters.rejected["non_finite"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_non_finite_pushes_are_refused_and_counted(value, dtype):
    shard = Shard("asgd")
    data, scale = {
        "float32": (np.float32([1, value]), 1.0),
        "float16": (np.float16([1, value]), 1.0),
        "bfloat16": ((np.float32([1, value]).view(np.uint32) >> 16).astype(np.uint16), 1.0),
        "int8": (np.int8([100, 100]), 3e38),  # finite values with an infinite product
    }[dtype]
    block = Block(0, 24, np.array([2, 3]), CodedValues(dtype, data, scale))
    message = pb.ToServer()
    pieces = messages.blocks_to_message([IndexChooser().encode(block)], message.push.blocks)
    before = shard.picture()
    stream = shard.say(
        push_frame(message.push.blocks, b"".join(pieces), incarnation=5), incarnation=5
    )
    refusal, _ = stream.last("refusal")
    assert (refusal.reason, refusal.step) == (pb.REASON_NON_FINITE, 1)
    assert shard.core.counters.rejected == {"non_finite": 1}
    assert shard.core.counters.workers[ROGUE].refused == 1
    assert shard.picture() == before


def test_a_push_of_an_epoch_from_the_future_does_not_hold_up_its_group():
    shard = Shard("bsp")
    shard.say(incarnation=5, id=HONEST)
    stream = shard.say(push_frame(incarnation=5, epoch=2**32 - 1), incarnation=5)
    refusal, _ = stream.last("refusal")
    assert refusal.reason == pb.REASON_STALE_EPOCH
    assert refusal.epoch == shard.core.membership.epoch


def test_a_long_step_leaves_a_place_for_the_next_client():
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
    imposter.incoming = lambda: iter(frames)  # all together, before the core has handled one

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
    broken.incoming = lambda: iter([frame(hello=shard.hello())])  # closed before the core runs
    broken.read()
    assert broken.last("welcome")[0] is not None
    assert shard.say().last("welcome")[0] is not None

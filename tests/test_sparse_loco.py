"""SparseLoCo as a composition: the rule in numpy, its equalities, its bytes, its restart."""

import copy

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import KERNELS, method
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.downlink.types import ModelRequest, Operation, RelayedRounds
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.push_head import PushHead
from thinwire.ops.sharding.flat_updates import flatten
from thinwire.ops.types import ModelSpec, ShardLayout, Slice, TensorSpec
from thinwire.ops.weighting.base import Arrival
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core.model import ShardModel
from thinwire.ps.wire.replies import blocks_of_reply

BASE = [1, -2, 0.5, 3]
#: D = b - w of two workers in three rounds.
ROUNDS = (
    ([0.1, -0.2, 0.05, 0], [0.3, 0, -0.05, 0.4]),
    ([0.2, 0.1, 0, -0.1], [0, 0.1, 0.1, 0.3]),
    ([-0.1, 0, 0.2, 0.1], [0.1, -0.4, 0, 0.1]),
)
EXPECTED = ([1, -1.9, 0.5, 2.8], [0.8525, -1.9, 0.5, 2.65], [0.667125, -1.9, 0.3774375, 2.65])


class Workers:
    """Codecs of some workers and the shard that merges their updates; one tensor."""

    def __init__(self, chosen, base, nb_workers):
        size = len(base)
        self.spec = ModelSpec((TensorSpec("v", (size,)),))
        self.layout = ShardLayout((Slice(0, 0, size),))
        self.method, theta = chosen, np.array(base, np.float32)
        self.shard = ShardModel(chosen, theta, KERNELS, Budget(99), Schedule(0.1), self.spec)
        self.states = [chosen.codec.init(self.spec, KERNELS) for _ in range(nb_workers)]
        self.sent = []

    def round(self, changes):
        """Send w - b of each worker, and release them together."""
        arrivals, version, self.sent = [], self.shard.version, []
        for number, change in enumerate(changes):
            context = EncodeContext(version + 1, 0.1, np.random.default_rng(number), KERNELS)
            packet, self.states[number] = self.method.codec.encode(
                [np.array(change, np.float32)], self.states[number], context
            )
            update = flatten(packet.blocks, self.layout, KERNELS)
            self.sent.append(packet.blocks)
            given = Arrival(
                number + 1, update, version, head=PushHead(version + 1), blocks=packet.blocks
            )
            arrivals.append(given)
        assert len(self.shard.apply(arrivals, version)) == len(changes)
        return self.shard.theta


def sparse_loco(nb_workers=2, **choices):
    return method("sparseloco", nb_workers, **choices)


def test_the_rule_by_hand():
    """Source: the vector of the rule, beta 0.95, chunks of 4, k 1, without bits."""
    workers = Workers(sparse_loco(chunk=4, chunk_k=1, value_dtype="float32"), BASE, 2)
    for changes, expected in zip(ROUNDS, EXPECTED, strict=True):
        theta = workers.round([-np.float32(change) for change in changes])
        np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-6)


def test_the_row_is_the_paper_s():
    chosen = sparse_loco()
    rows = dict(chosen.fingerprint())
    assert chosen.pacer.longest_round == 30 and chosen.local.optimizer == "adamw"
    assert (chosen.codec.decay, chosen.codec.carry) == (0.95, 0)
    inner = chosen.codec.inner
    assert (inner.chunk, inner.chunk_k, inner.value_dtype) == (4096, 64, "int2")
    assert (chosen.server.global_lr, chosen.server.momentum) == (1.0, 0.0)
    assert len(chosen.sync.groups) == 1 and chosen.down_codec.relays
    assert rows["codec.decay"] == "0.95"
    plain = sparse_loco(overrides={"codec": "dense"})
    assert plain.codec == method("bsp", 2).codec, "the codec's hyper-parameters go with it"
    assert sparse_loco(error_feedback=False).codec == inner, "and the decay with the feedback"


def test_with_everything_sent_it_is_the_mean_of_the_changes():
    """k = chunk and no bits: FedAvg of workers with as many samples."""
    rng, size = np.random.default_rng(4), 100
    base = rng.standard_normal(size).astype(np.float32)
    few = {"overrides": {"pacer": "fixed"}, "local_steps": 30, "local_optimizer": "adamw"}
    runs = [
        Workers(sparse_loco(3, chunk=8, chunk_k=8, value_dtype="float32"), base, 3),
        Workers(method("bsp", 3, **few), base, 3),
    ]
    for _ in range(5):
        changes = rng.standard_normal((3, size)).astype(np.float32)
        one, other = (run.round(changes) for run in runs)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value_dtype", ["int2", "means2", "sign"])
def test_workers_of_a_whole_run_learn(value_dtype):
    chosen = method(
        "sparseloco",
        3,
        chunk=8,
        chunk_k=2,
        value_dtype=value_dtype,
        local_steps=4,
        local_optimizer="sgd",
    )
    run = MiniRun(chosen, iter_max=60, rate=0.3).run()
    batch = np.arange(len(run.problem.y))
    assert not run.deadlocked()
    assert run.problem.gradient(run.theta, batch)[0] < 0.5


def coded_bytes(blocks, chooser=None):
    """Bytes of blocks on the wire, descriptions included."""
    message, chooser = pb.Push(), chooser or IndexChooser()
    pieces = messages.blocks_to_message([chooser.encode(block) for block in blocks], message.blocks)
    return sum(map(len, pieces)) + message.ByteSize()


@pytest.mark.parametrize(
    ("down_codec", "operation", "times"),
    [("relay", Operation.RELAY, 3290), ("delta", Operation.SET, 787)],
)
def test_bytes_of_both_ways_against_bsp(down_codec, operation, times):
    """H 30 and 4 workers: 2 x 30 dense messages for one coded push and one reply."""
    chosen = sparse_loco(4, overrides={"down_codec": down_codec})
    size = 128 * 4096
    rng = np.random.default_rng(0)
    workers = Workers(chosen, np.zeros(size, np.float32), 4)
    for _ in range(3):
        workers.round(rng.standard_normal((4, size)).astype(np.float32))
    version = workers.shard.version
    reply = workers.shard.gather(ModelRequest(1, 3, version - 1))
    assert reply.operation is operation
    up = max(coded_bytes(blocks) for blocks in workers.sent)
    if isinstance(reply.update, RelayedRounds):
        ((round_,),) = (reply.update.rounds,)
        assert len(round_.updates) == 4 and round_.rate == -1.0
        others = [each for each in round_.updates if not reply.update.is_own(each)]
        assert len(others) == 3
        down = sum(coded_bytes(each.blocks) for each in others)
    else:
        down = coded_bytes(blocks_of_reply(reply.update, workers.layout))
    assert 4 * size / up > 208
    assert 30 * 2 * 4 * size / (up + down) > times


def test_a_restart_goes_on_bit_for_bit():
    """A worker that restores its state sends the same packets as before."""
    chosen = sparse_loco(2, chunk=8, chunk_k=2)
    rng = np.random.default_rng(5)
    changes = rng.standard_normal((8, 2, 40)).astype(np.float32)
    whole = Workers(chosen, np.zeros(40), 2)
    for each in changes[:4]:
        whole.round(each)
    again = Workers(chosen, np.zeros(40), 2)
    again.states = copy.deepcopy(KERNELS.as_saved(whole.states))
    again.shard.load_state_dict(copy.deepcopy(whole.shard.state_dict(soft=False)), soft=False)
    for each in changes[4:]:
        assert whole.round(each).tobytes() == again.round(each).tobytes()

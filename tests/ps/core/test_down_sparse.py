"""Sparse replies of a shard keep their promises under any message loss."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.lossy import SIZE, SPEC, World, eager, sending
from tests.virtual.run import MiniRun
from tests.virtual.toy import KERNELS, Softmax
from thinwire.ops.downlink import replicas
from thinwire.ops.downlink.sparse import DownSparse
from thinwire.ops.downlink.types import ModelRequest, Operation, ShardView
from thinwire.ops.types import VALUE_DTYPES

DOWN = ("sparse", "auto")


# -- invariants -----------------------------------------------------------------------------------

WORKERS = st.integers(1, 2)
LOST = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("push"), WORKERS, st.sampled_from([0.0, 1.0, 1.0, 30.0]), LOST),
    st.tuples(st.just("push"), WORKERS, st.just(1.0), LOST),
    st.tuples(st.just("be_born"), WORKERS),
    st.tuples(st.just("forget"), WORKERS),
    st.tuples(st.just("pull"), WORKERS, LOST),
    st.tuples(st.just("save")),
    st.tuples(st.just("restart")),
)


@settings(max_examples=35, deadline=None)
@given(
    st.sampled_from(DOWN),
    st.sampled_from(VALUE_DTYPES),
    st.sampled_from(["topk", "dense"]),
    st.sampled_from([0, 1, 3]),
    st.lists(EVENTS, max_size=25),
)
def test_nothing_is_lost_and_nobody_drifts(down_codec, dtype, codec, resync_every, happenings):
    """I1 after every reply (in `World.check`), and I3: all that was left out comes in the end."""
    chosen = sending(
        down_codec, codec=codec, down_value_dtype=dtype, resync_every=resync_every, down_ratio=0.1
    )
    world = World(eager(chosen))
    for what, *arguments in happenings:
        getattr(world, what)(*arguments)
    world.settle(1, 1)  # a worker with an expired lease may have to send Hello first
    summary = world.counts
    assert summary["mismatches"] == 0
    assert summary["copies"] <= world.nb_workers
    world.settle(1, 60)
    if dtype == "float32":
        np.testing.assert_array_equal(world.base(1), world.theta)
    else:
        np.testing.assert_allclose(world.base(1), world.theta, rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(WORKERS, st.sampled_from([0.0, 1.0]), LOST), max_size=20))
def test_with_everything_sent_a_worker_has_the_shard_bit_for_bit(happenings):
    """I2: ratio 1 and float32."""
    world = World(sending(down_ratio=1.0, compression_rate=0.05))
    for number, size, num_lost in happenings:
        world.push(number, size, num_lost)
        np.testing.assert_array_equal(world.base(number), world.theta)


@pytest.mark.parametrize(
    ("name", "dtype", "choices"),
    [
        ("asgd", "float32", {}),
        ("bsp", "bfloat16", {}),
        ("ssp", "int8", {"staleness_bound": 1}),
        ("gsp", "float16", {"groups": ((1, 2), (3,))}),
        ("gsp", "float32", {"groups": ((1, 2), (3,)), "staleness_bound": 1}),
        ("esync", "int8", {}),
    ],
)
def test_every_shard_and_rule_keeps_what_its_workers_have(name, dtype, choices):
    chosen = sending("auto", name, 3, "dense", down_ratio=0.3, down_value_dtype=dtype, **choices)
    run = MiniRun(eager(chosen, push_factor=8.0), iter_max=40, nb_ps=3)
    run.join_all()
    num_checked = 0
    while run.turn():
        for worker, (shard, layout) in itertools.product(
            run.workers.values(), enumerate(run.layouts)
        ):
            version = worker.core.versions[shard]
            held = run.shards[shard].model.downlink.copy_of(worker.number, version)
            if held is None or worker.replies:  # the exchange is not complete
                continue
            starts = [(piece.tensor, piece.start) for piece in layout.slices]
            offsets = (0, 16, 24, 28)
            mine = [
                worker.core.base[offsets[tensor] + start :][: piece.size]
                for (tensor, start), piece in zip(starts, layout.slices, strict=True)
            ]
            np.testing.assert_array_equal(np.concatenate(mine), held)
            num_checked += 1
    assert num_checked > 40
    assert sum(shard.model.downlink.summary()["sparse"] for shard in run.shards) > 20
    assert np.isfinite(run.theta).all()


def test_equals_the_paper_s_server():
    """M and V_k of DGS in float64, ten lines."""
    world = World(sending(codec="dense", down_ratio=0.2))
    rng = np.random.default_rng(world.decoder and 1)
    rng.standard_normal(SIZE, np.float32)  # the initial weights
    total, sent = np.zeros(SIZE), {1: np.zeros(SIZE), 2: np.zeros(SIZE)}
    for number in (1, 2, 2, 1, 2, 1, 1, 1, 2, 2):
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        world.push(number)
        total -= 0.1 * gradient
        for start, stop in itertools.pairwise(SPEC.offsets):
            rest = (total - sent[number])[start:stop]
            best = np.argsort(-abs(rest), kind="stable")[: max(1, int(0.2 * (stop - start)))]
            sent[number][start:stop][best] += rest[best]
        np.testing.assert_allclose(world.base(number), world.initial + sent[number], atol=1e-6)
    assert Operation.SET in world.operations


# -- the replies -------------------------------------------------------------------------------


def test_a_retry_is_given_the_same_reply_and_nothing_moves():
    world = World(sending(codec="dense"))
    world.push(1)
    before = world.base(1).copy()
    world.push(2)
    world.push(1, num_lost=2)
    assert world.counts["sparse"] == 5
    changed = np.flatnonzero(world.base(1) != before)
    assert 0 < len(changed) <= 6 + 1 + 1  # of one reply, not of three


def test_a_worker_of_which_nothing_is_known_is_sent_all():
    world = World(sending())
    world.push(1)
    full = world.counts["full"]
    world.forget(1)
    assert world.counts["bytes"] == 4 * (2 * SIZE + 30)  # the most there were; and the scratch
    assert world.core.model.downlink.state["replicas"].keys() == {"2"}
    world.push(1)
    assert world.counts["full"] == full + 1
    np.testing.assert_array_equal(world.base(1), world.theta)


def test_a_reply_no_smaller_than_the_model_is_the_model():
    world = World(sending(codec="dense", down_ratio=1.0))
    world.push(1)
    assert world.operations == {Operation.FULL}
    half = World(sending(codec="dense", down_ratio=1.0, down_value_dtype="bfloat16"))
    half.push(1)
    assert half.operations == {Operation.FULL, Operation.ADD}


def test_nothing_to_say_is_no_blocks():
    world = World(sending())
    world.push(1, size=0.0)
    assert world.operations == {Operation.FULL, Operation.NONE}
    assert world.lives[1].core.versions == [1]


def test_a_snapshot_of_worker_1s_iteration_is_everybodys_next_reply():
    """In the updates N, 2 N ... of worker 1, and of that very moment."""
    world = World(sending(resync_every=4))
    for _ in range(3):
        world.push(1)
        world.push(2)
    assert world.counts["resyncs"] == 0
    world.push(1)  # its fourth
    snapshot = world.theta.copy()
    np.testing.assert_array_equal(world.base(1), snapshot)
    for _ in range(2):
        world.push(1)  # the model moves on, the snapshot does not
    assert world.counts["resyncs"] == 1
    world.push(2)
    np.testing.assert_array_equal(world.base(2), snapshot)
    assert not np.array_equal(world.theta, snapshot)
    for _ in range(5):
        world.push(2)  # its own iterations do not count
    assert world.counts["resyncs"] == 2
    world.push(1)
    world.push(1)  # its eighth
    assert world.counts["resyncs"] == 3


def original_trace(every, num_updates):
    """Return the updates of worker 1 in which the original program takes a snapshot.

    Its worker sends a gradient at its start, which the server discards and counts: "first hit 151".
    """
    return [
        update
        for iteration, update in enumerate(range(num_updates + 1), 1)
        if iteration > 1 and iteration % every == 1 % every
    ]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_snapshots_are_taken_in_the_updates_of_the_original(every):
    world, found = World(sending(resync_every=every)), []
    world.push(2)
    for update in range(1, 14):
        before = world.counts["resyncs"]
        world.push(1)
        if world.counts["resyncs"] > before:
            found.append(update)
    assert found == original_trace(every, 13)
    assert original_trace(150, 301) == [150, 300]


def test_a_snapshot_waits_for_its_workers_over_a_restart_of_the_shard():
    world = World(sending(resync_every=3))
    for _ in range(2):
        world.push(2)
        world.push(1)
    world.push(1)
    snapshot = world.theta.copy()
    world.push(1)
    world.save()
    world.restart()
    received = []
    for _ in range(3):  # the first finds another generation
        world.push(2)
        received.append(np.array_equal(world.base(2), snapshot))
    assert any(received) and not received[-1]


@pytest.mark.parametrize(("others", "is_whole"), [(3, False), (4, True)])
def test_a_very_stale_worker_is_sent_the_whole_model(others, is_whole):
    world = World(sending(max_staleness=4))
    world.push(1)
    for _ in range(others):
        world.push(2)
    full, resyncs = (world.counts[name] for name in ("full", "resyncs"))
    world.push(1)  # its own update is one more
    assert world.counts["full"] - full == world.counts["resyncs"] - resyncs == is_whole
    assert np.array_equal(world.base(1), world.theta) == is_whole


def test_a_wrong_checksum_brings_the_whole_model(monkeypatch):
    monkeypatch.setattr(replicas, "CHECKSUM_INTERVAL", 3)
    world = World(sending())
    for _ in range(4):
        world.push(1)
    assert world.counts["mismatches"] == 0
    world.base(1)[7] += np.float32(1e-7)  # a bit flips in the worker's memory
    world.lives[1].world.check = lambda number, reply: None
    world.push(1)
    del world.lives[1].world.check
    world.push(1)
    assert (world.counts["mismatches"], world.counts["resyncs"]) == (1, 1)
    np.testing.assert_array_equal(world.base(1), world.theta)
    for _ in range(6):
        world.push(1)
    assert world.counts["mismatches"] == 1


def test_a_checksum_out_of_place_does_no_harm():
    world = World(sending("delta"))
    outgoing = world.lives[1].core.begin(np.ones(SIZE, np.float32), 1, 0.5)
    origin = dataclasses.replace(outgoing.origins[0], base_checksum=2**32 - 1)
    world.exchange(1, dataclasses.replace(outgoing, origins=[origin]), 0)
    np.testing.assert_array_equal(world.base(1), world.theta)
    assert world.counts["mismatches"] == 0


# -- delay compensation ---------------------------------------------------------------------------


@pytest.mark.parametrize("down_codec", DOWN)
def test_a_delay_is_compensated_from_what_the_worker_really_has(down_codec):
    overrides = {"weighting": "dc_asgd"}
    chosen = sending(
        down_codec, nb_workers=3, codec="dense", dcasgd_lambda=5.0, overrides=overrides
    )
    chosen = eager(chosen, push_factor=8.0)
    run, problem = MiniRun(chosen, iter_max=60, rate=0.3), Softmax()
    run.join_all()
    num_apart = 0
    while run.shards[0].version < 60:
        before = run.theta
        bases = {number: worker.core.base.copy() for number, worker in run.workers.items()}
        num_logged = len(run.log)
        assert run.turn()
        number, batch = run.log[num_logged]
        g = problem.gradient(bases[number], batch)[1]
        stepped = before - 0.3 * (g + 5.0 * g * g * (before - bases[number]))
        np.testing.assert_allclose(run.theta, stepped, atol=2e-6)
        num_apart += not np.array_equal(before, bases[number])
    assert num_apart > 20
    assert run.shards[0].model.memory()["copies"] == 0  # one copy of each worker is enough
    assert run.shards[0].model.downlink.summary()["sparse"] > 20


# -- the codec alone ------------------------------------------------------------------------------


class AloneWithACodec:
    """One slice of 100 entries; each version adds 1 to all entries."""

    def __init__(self, **settings):
        self.codec, self.theta, self.version = DownSparse(0.1, **settings), np.zeros(100), 0
        self.theta = self.theta.astype(np.float32)
        self.state = self.codec.init(100)

    def go_on(self):
        self.theta += 1
        self.version += 1

    def reply(self, worker, step, base):
        shard = ShardView(self.theta, self.version, KERNELS, (0, 100))
        return self.codec.gather(ModelRequest(worker, step, base), shard, self.state)


def test_who_has_got_the_whole_model_gets_no_older_snapshot():
    shard = AloneWithACodec(resync_every=1)
    for worker in (1, 2):
        shard.reply(worker, 0, None)
    shard.go_on()
    shard.reply(1, 1, 0)  # takes the snapshot
    shard.go_on()
    assert shard.reply(2, 1, 1).operation is Operation.FULL  # the worker never got this base
    shard.go_on()
    reply = shard.reply(2, 2, 2)
    assert reply.operation is Operation.SET and (reply.update[0].values.data == 3).all()


def test_a_worker_that_pulls_gets_its_replica_and_the_rest_later():
    shard = AloneWithACodec()
    shard.reply(1, 0, None)
    shard.go_on()
    for base in (None, 0):
        reply = shard.reply(1, 0, base)
        assert (reply.operation, reply.version) == (Operation.FULL, 0)
        assert not np.asarray(reply.update.values).any()
    assert len(shard.reply(1, 1, 0).update[0].indices) == 10


def test_a_replica_stands_for_the_base_of_its_last_reply_alone():
    shard = AloneWithACodec()
    shard.reply(1, 0, None)
    shard.go_on()
    assert shard.codec.replica_of(1, 0, shard.state) is not None
    shard.reply(1, 1, 0)
    assert shard.codec.replica_of(1, 0, shard.state) is None
    assert (shard.codec.replica_of(1, 1, shard.state) == 1).sum() == 10

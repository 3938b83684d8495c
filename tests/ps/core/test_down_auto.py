"""Down codec auto on a shard: starts as delta, exact until sparse replies are smaller."""

import dataclasses

import numpy as np
import pytest

from tests.virtual.lossy import SIZE, World, eager, sending
from tests.virtual.toy import KERNELS
from thinwire.ops.downlink import replicas
from thinwire.ops.downlink.sparse import DownAuto
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelRequest,
    Operation,
    RelayedRound,
    RelayedUpdate,
    ShardView,
)
from thinwire.ops.types import Block, CodedValues

pytestmark = pytest.mark.usefixtures("small_models_relay")


def test_auto_stays_exact_and_keeps_no_copies_while_little_changes():
    world = World(sending("auto", compression_rate=0.01))  # 3 of 36 entries a push
    for _ in range(10):
        world.push(1)
        np.testing.assert_array_equal(world.base(1), world.theta)
    assert (world.counts["copies"], world.counts["delta"]) == (0, 10)
    assert world.counts["bytes"] == 4 * SIZE + 4 * 9  # versions, and positions of three updates


def test_auto_switches_where_more_than_a_tenth_changes():
    world = World(eager(sending("auto", compression_rate=0.01)))
    for _ in range(8):
        world.push(1)
        assert world.counts["copies"] == 0
    world.push(2)
    assert world.counts["copies"] == 1
    np.testing.assert_array_equal(world.base(2), world.theta)  # that reply was still exact
    world.push(1, size=10.0)
    world.push(2)
    assert world.counts["sparse"] == 1


def test_auto_stays_exact_for_a_worker_that_was_away_for_a_moment():
    chosen = eager(sending("auto", compression_rate=0.01))
    patient = dataclasses.replace(chosen.down_codec, patience=3)
    world = World(dataclasses.replace(chosen, down_codec=patient))

    def reply_after(num_pushes):
        for _ in range(num_pushes):
            world.push(1)
        world.push(2)
        return world.counts["copies"]

    assert [reply_after(number) for number in (8, 8, 0, 8, 8)] == [0] * 5
    assert reply_after(8) == 1  # the third in a row
    np.testing.assert_array_equal(world.base(2), world.theta)


def test_auto_takes_no_model_that_was_sent_in_parts_for_an_exact_one():
    world = World(eager(sending("auto", compression_rate=0.1, down_ratio=0.03)))
    for _ in range(6):
        world.push(1)
        world.push(2)
    assert (world.base(2) != world.theta).any()
    world.forget(2)
    world.push(2, num_lost=1)  # the whole model is lost, and requested again from the old base
    np.testing.assert_array_equal(world.base(2), world.theta)


def test_auto_does_not_switch_where_that_would_not_pay():
    world = World(sending("auto", down_ratio=0.9))
    for _ in range(6):
        world.push(1)
        world.push(2)
    assert (world.counts["copies"], world.counts["sparse"]) == (0, 0)


def test_auto_stays_exact_while_replies_are_about_as_large_as_pushes():
    """DGC's warm-up is one case, where thinner replies would ruin the training."""
    world = World(sending("auto", compression_rate=0.4))
    for _ in range(6):
        world.push(1)
        world.push(2)
    assert (world.counts["copies"], world.counts["sparse"]) == (0, 0)
    thin = World(eager(sending("auto", compression_rate=0.01), push_factor=8.0))
    for _ in range(25):
        thin.push(1)
    assert thin.counts["copies"] == 0  # its own replies are as thin as its pushes
    thin.push(2)
    assert thin.counts["copies"] == 1


def test_a_reply_may_be_as_large_as_its_push_if_nothing_else_is_said():
    theta = np.arange(1000, dtype=np.float32)
    shard = ShardView(theta, 1, KERNELS, (0, 1000))
    for down_ratio, expected in ((None, 250), (0.02, 20)):
        policy = DownAuto(0.01, down_ratio)
        state = policy.init(1000)
        replicas.keep(1, shard, state, -theta)
        handed = policy.gather(ModelRequest(1, 7, 1, push_bytes=1000), shard, state)
        assert len(handed.update[0].indices) == expected


def test_a_relayed_reply_is_judged_by_its_own_bytes():
    """Seven coarse pushes are not eight times one, though new weights in their place would be."""
    size, num_values = 10_000, 200
    policy = DownAuto(0.001, patience=1)
    state, rng = policy.init(size), np.random.default_rng(0)
    shard = ShardView(np.zeros(size, np.float32), 0, KERNELS, (0, size))
    policy.gather(ModelRequest(1, 0, None), shard, state)
    for version in range(1, 8):
        indices = np.sort(rng.choice(size, num_values, replace=False))
        coded = CodedValues("float16", np.ones(num_values, np.float16))
        update = RelayedUpdate(2, version, (Block(0, size, indices, coded),))
        relayed = RelayedRound((update,), 1.0)
        state = policy.record_update(ModelChange(indices, version, relayed=relayed), state)
    now = dataclasses.replace(shard, version=7)
    reply = policy.gather(ModelRequest(1, 1, 0, push_bytes=577), now, state)
    assert reply.operation is Operation.RELAY and reply.update.num_bytes < 8 * 577
    assert reply.update.num_entries > 0.1 * size
    assert not state["replicas"]


def test_rounds_are_kept_from_when_there_is_somebody_to_relay_them_to():
    size, coded = 100, CodedValues("float16", np.ones(2, np.float16))
    policy = DownAuto(0.01)
    state = policy.init(size)
    shard = ShardView(np.zeros(size, np.float32), 0, KERNELS, (0, size))

    def push(version):
        indices = np.array([version, 50 + version])
        update = RelayedUpdate(1, version, (Block(0, size, indices, coded),))
        relayed = RelayedRound((update,), 1.0)
        policy.record_update(ModelChange(indices, version, relayed=relayed), state)
        return dataclasses.replace(shard, version=version)

    policy.gather(ModelRequest(1, 0, None), shard, state)
    now = push(1)
    assert not state["delta"]["scratch"]["rounds"]
    lost = policy.gather(ModelRequest(1, 0, 0), now, state)  # without its push: it restarted
    assert lost.operation is Operation.SET and lost.update.indices.tolist() == [1, 51]
    policy.gather(ModelRequest(2, 0, None), now, state)
    for version in (2, 3):
        now = push(version)
    reply = policy.gather(ModelRequest(2, 1, 1), now, state)
    assert reply.operation is Operation.RELAY and len(reply.update.rounds) == 2
    policy.forget(2, state)
    push(4)
    assert not state["delta"]["scratch"]["rounds"]


def test_delta_keeps_no_copies():
    world = World(sending("delta"))
    for _ in range(4):
        world.push(1)
        world.push(2)
    counts = world.counts
    assert (counts["copies"], counts["sparse"]) == (0, 0)
    assert 4 * SIZE <= counts["bytes"] <= 5 * SIZE  # versions, and positions of a quarter

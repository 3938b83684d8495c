"""A snapshot of a shard, which another thread writes to a file while the shard trains on."""

import numpy as np
import pytest

from tests.virtual.toy import KERNELS, method
from thinwire.ops.buffers import copied
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.types import Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.model import ShardModel

SIZE = 1 << 19  # an array of this size is not copied when the snapshot is made


def push(shard, seed):
    update = np.random.default_rng(seed).standard_normal(SIZE, np.float32)
    shard.apply([Arrival(1, Update(None, update), shard.version)], shard.version)


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov", "yogi"])
def test_the_slots_in_a_snapshot_are_those_of_its_version(optimizer):
    chosen = method("asgd", 1, overrides={"server_optimizer": optimizer})
    shard = ShardModel(chosen, np.zeros(SIZE, np.float32), KERNELS, Budget(9), Schedule(0.1))
    shard.freezer.turn_on(copied)
    push(shard, 1)
    expected, snapshot = shard.state_dict(soft=False)["optimizer"], shard.snapshot()["optimizer"]
    for seed in (2, 3):
        push(shard, seed)
    assert snapshot.keys() == expected.keys()
    for name, slot in snapshot.items():
        np.testing.assert_array_equal(np.asarray(slot), expected[name])


def test_the_arrays_of_a_weighting_in_a_snapshot_are_those_of_its_version():
    chosen = method("dcasgd", 1, dcasgd_variant="adaptive")
    shard = ShardModel(chosen, np.zeros(SIZE, np.float32), KERNELS, Budget(9), Schedule(0.1))
    shard.freezer.turn_on(copied)
    push(shard, 1)
    expected = shard.state_dict(soft=False)["weighting"]["mean_squares"]
    snapshot = shard.snapshot()["weighting"]["mean_squares"]
    push(shard, 2)
    assert snapshot.keys() == expected.keys() != set()
    for name, squares in snapshot.items():
        np.testing.assert_array_equal(np.asarray(squares), expected[name])
        assert np.any(shard.state_dict(soft=False)["weighting"]["mean_squares"][name] != squares)

"""A worker's replica of the model: steps like the PS, exports and imports its whole state."""

import numpy as np
import pytest

from tests.virtual.toy import method
from thinwire.ops.kernels import load_kernels
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.types import Update
from thinwire.ops.weighting.base import Arrival
from thinwire.proto import peers_pb2 as peers
from thinwire.ps.core.model import ShardModel
from thinwire.worker.collective.mailbox import RoundId
from thinwire.worker.collective.replica import Replica

BODIES = load_kernels("numpy")
OPTIMIZERS = [("sgd", {}), ("momentum", {}), ("adam", {})]


def some(size=20, seed=3):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def bsp(optimizer="sgd", **choices):
    return method("bsp", overrides={"server_optimizer": optimizer}, **choices)


def replica(chosen, version=4):
    made = Replica(np.zeros(20, np.float32), chosen, BODIES)
    made.fetched(RoundId(0, version), some())
    return made


@pytest.mark.parametrize(("optimizer", "choices"), OPTIMIZERS)
def test_it_steps_bit_for_bit_as_the_ps_does(optimizer, choices):
    chosen = bsp(optimizer, **choices)
    model = ShardModel(chosen, some(), BODIES, Budget(100), Schedule(0.1))
    mine = replica(chosen, 0)
    for number in range(1, 6):
        gradient = some(seed=number)
        model.apply([Arrival(1, Update(None, gradient), number - 1)], number - 1)
        mine.step(gradient, 0.1, RoundId(0, number))
    np.testing.assert_array_equal(mine.theta, model.theta)
    assert (mine.at, mine.stepped) == (RoundId(0, 5), True)


def test_changes_of_weights_are_added():
    chosen = method("bsp", overrides={"pacer": "fixed"}, local_steps=2, global_lr=0.5)
    mine = replica(chosen)
    mine.step(np.ones(20, np.float32), 0.1, RoundId(0, 5))
    np.testing.assert_allclose(mine.theta, some() + 0.5, rtol=1e-6)


@pytest.mark.parametrize(("optimizer", "choices"), OPTIMIZERS)
def test_a_peer_takes_over_weights_and_slots(optimizer, choices):
    chosen = bsp(optimizer, **choices)
    first, second = replica(chosen), replica(chosen)
    first.step(some(seed=9), 0.1, RoundId(0, 5))
    ask = peers.ModelQuery(generation=0, version=5, digest=second.digest())
    holding, pieces = first.answer(ask)
    assert holding.standing == peers.STANDING_STEPPED
    assert not holding.same
    second.adopt(memoryview(b"".join(pieces)), RoundId(0, 5))
    for each in (first, second):
        each.step(some(seed=10), 0.1, RoundId(0, 6))
    np.testing.assert_array_equal(first.theta, second.theta)
    assert first.digest() == second.digest()
    same, nothing = first.answer(peers.ModelQuery(version=6, digest=second.digest()))
    assert same.same
    assert not nothing


def test_it_says_where_it_stands():
    mine = replica(bsp())
    assert mine.answer(peers.ModelQuery(version=4))[0].standing == peers.STANDING_FETCHED
    for elsewhere in (peers.ModelQuery(version=3), peers.ModelQuery(version=4, generation=1)):
        holding, pieces = mine.answer(elsewhere)
        assert (holding.standing, holding.version) == (peers.STANDING_ELSEWHERE, 4)
        assert not pieces
    nowhere = Replica(np.zeros(20, np.float32), bsp(), BODIES)
    assert nowhere.answer(peers.ModelQuery())[0].standing == peers.STANDING_ELSEWHERE


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ValueError, match="a peer's model and optimizer have 8 bytes"):
        replica(bsp()).adopt(memoryview(b"12345678"), RoundId(0, 5))


def test_slots_of_an_earlier_life_count_only_at_their_version():
    chosen = bsp("momentum")
    before = replica(chosen)
    before.step(some(seed=9), 0.1, RoundId(0, 5))
    saved, weights = before.save(), before.theta.copy()
    fits, other = replica(chosen), replica(chosen)
    for mine, version in ((fits, 5), (other, 6)):
        mine.restore(saved)
        mine.fetched(RoundId(1, version), weights)
        mine.step(some(seed=10), 0.1, RoundId(1, version + 1))
    before.step(some(seed=10), 0.1, RoundId(0, 6))
    np.testing.assert_array_equal(fits.theta, before.theta)
    assert not np.array_equal(other.theta, before.theta)

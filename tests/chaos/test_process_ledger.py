"""The ledger of acknowledged pushes notices what is lost, and what is there twice."""

import types

import pytest

from tests.chaos.process_ledger import Ledger
from tests.chaos.proxy_messages import Hearing

WORKER, SHARD = 1, 0


class Found:
    """What a replay led to: the newest step, how many pushes, which version."""

    def __init__(self, applied, pushes, version=9):
        self.applied, self.num, self.core = applied, pushes, types.SimpleNamespace(version=version)

    def applied_step(self, worker):
        return self.applied

    def pushes(self, worker):
        return self.num


@pytest.fixture
def heard():
    """A worker was told of steps 1, 2 and 4; step 3 was refused, and 5 is on its way."""
    hearing = Hearing()
    told = hearing.told[WORKER, SHARD]
    told.steps, told.refused, told.pushed, told.version = {1, 2, 4}, {3}, 5, 9
    return hearing


@pytest.fixture
def ledger(heard):
    return Ledger(types.SimpleNamespace(hearing=heard, nb_workers=1, nb_ps=1))


def test_all_that_was_told_is_there_once(ledger):
    ledger.check(SHARD, Found(4, 3))


def test_a_push_whose_answer_was_lost_counts(ledger, heard):
    ledger.check(SHARD, Found(5, 4))
    heard.told[WORKER, SHARD].steps.add(6)  # 5 stays in, though nobody was told
    ledger.check(SHARD, Found(6, 5))
    with pytest.raises(AssertionError, match="4 pushes"):
        ledger.check(SHARD, Found(6, 4))


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (Found(2, 2), "told of step 4, only 2"),
        (Found(4, 2), "2 pushes were applied"),
        (Found(4, 4), "4 pushes were applied"),
        (Found(4, 3, version=8), "told of version 9, 8"),
    ],
)
def test_what_is_lost_or_double_is_noticed(ledger, found, complaint):
    with pytest.raises(AssertionError, match=complaint):
        ledger.check(SHARD, found)


def test_a_push_of_a_worker_that_died_may_be_in_or_not(ledger):
    ledger.worker_died(WORKER)
    ledger.check(SHARD, Found(5, 4))
    ledger.check(SHARD, Found(5, 3))
    with pytest.raises(AssertionError):
        ledger.check(SHARD, Found(5, 5))


def test_an_event_that_was_cut_off_is_not_missed(ledger, heard):
    before, after = Found(4, 3), Found(2, 2, version=8)
    ledger.check(SHARD, before)
    ledger.undo(SHARD, before, after)
    ledger.check(SHARD, after)
    assert heard.told[WORKER, SHARD].version == 8

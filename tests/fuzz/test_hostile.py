"""A few thousand invalid messages and hostile datagrams; tests.fuzz.hostile sends a million."""

import collections

import pytest
from absl import logging

from tests.fuzz import hostile, hostile_datagrams
from tests.fuzz.hostile import Outcome


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


@pytest.mark.parametrize("name", ["adacomp", "dgt"])
def test_lies_change_nothing_and_each_is_counted(name):
    outcome = hostile.lie(name, 1600, seed=1)
    assert outcome.sent >= 1600
    assert outcome.rounds >= 1
    assert min(outcome.refused[why] for why in ("malformed", "non_finite", "hello")) > 0
    assert outcome.taken["heartbeat"] and outcome.taken["pull"]


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "all"])
def test_hostile_datagrams_change_nothing_and_each_is_counted(filtered):
    outcome = hostile_datagrams.flood(2500, 3, filtered)
    assert outcome.rounds >= 1
    for reason in ("tag", "duplicate", "bounds", "not_finite", "short"):
        assert outcome.refused[reason] > 5, outcome.refused
    assert filtered or outcome.refused["empty"] > 5


def test_what_is_not_counted_is_noticed():
    counted = Outcome(5, collections.Counter(tag=3), collections.Counter(heartbeat=2))
    counted.check()
    with pytest.raises(AssertionError, match="5 sent, 4 counted"):
        Outcome(5, collections.Counter(tag=3), collections.Counter(heartbeat=1)).check()
    with pytest.raises(AssertionError, match="grown"):
        Outcome(growth=1 << 30).check()

"""A joining worker of a collective run gets the current model from a neighbor."""

import numpy as np
import pytest

from tests.virtual.toy import method
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ConfigurationError
from thinwire.worker.collective.mailbox import CollectiveMember, RoundId
from thinwire.worker.collective.peers import PeerLost
from thinwire.worker.collective.replica import Neighbours, Replica

BODIES = load_kernels("numpy")
AT = RoundId(0, 4)


def replica(value=0.0, at=AT, stepped=False):
    made = Replica(np.zeros(3, np.float32), method("bsp"), BODIES)
    made.fetched(at, np.full(3, value, np.float32))
    made.stepped = stepped
    return made


class Streams:
    """Answers as the replicas of other workers would; None is a worker that does not."""

    def __init__(self, **holders):
        self.holders = {int(name[1:]): holder for name, holder in holders.items()}
        self.members = [CollectiveMember(worker, 7, "") for worker in sorted(self.holders)]

    def query(self, member, question, timeout_seconds):
        holder = self.holders[member.worker]
        if holder is None:
            raise PeerLost(f"worker {member.worker} does not answer")
        holding, pieces = holder.answer(question)
        return holding, memoryview(b"".join(pieces))


@pytest.mark.parametrize(
    ("others", "leads", "agreed", "value"),
    [
        ({}, True, True, 1.0),
        ({"w2": replica(2.0), "w3": replica(3.0)}, True, True, 1.0),  # the lowest has its own
        ({"w1": replica(2.0), "w3": replica(3.0)}, False, True, 2.0),  # the others the lowest's
        ({"w1": replica(2.0), "w3": replica(3.0, stepped=True)}, False, True, 3.0),
        ({"w2": None, "w3": replica(3.0, stepped=True)}, True, True, 3.0),
        ({"w2": None, "w3": replica(3.0)}, True, False, 1.0),  # worker 2 may have stepped
        ({"w1": replica(2.0, RoundId(0, 3)), "w3": replica(3.0)}, False, False, 1.0),
    ],
)
def test_all_start_from_one_model(others, leads, agreed, value):
    mine, streams = replica(1.0), Streams(**others)
    assert Neighbours(streams, mine).agree(streams.members, leads) is agreed
    np.testing.assert_array_equal(mine.theta, np.full(3, value))
    assert mine.at == AT


def test_one_that_is_ahead_is_caught_up_with():
    """The neighbor has done the next round, and waits for this worker to report that too."""
    goal = RoundId(0, 5)
    mine, streams = replica(1.0), Streams(w2=None, w3=replica(5.0, goal, stepped=True))
    neighbours = Neighbours(streams, mine)
    assert neighbours.agree(streams.members, leads=True)
    assert neighbours.ahead
    assert neighbours.take_over(goal, streams.members)
    np.testing.assert_array_equal(mine.theta, np.full(3, 5))
    assert (mine.at, mine.stepped, neighbours.ahead) == (goal, True, False)


def test_nobody_has_finished():
    streams = Streams(w2=None, w3=replica(3.0, stepped=True))
    mine = replica(1.0)
    assert not Neighbours(streams, mine).take_over(RoundId(0, 5), streams.members)
    assert mine.at == AT


def test_a_peer_of_another_model_is_no_peer():
    other = Replica(np.zeros(5, np.float32), method("bsp"), BODIES)
    other.fetched(AT, np.zeros(5, np.float32))
    streams = Streams(w1=other)
    with pytest.raises(ConfigurationError, match="20 bytes.* 12"):
        Neighbours(streams, replica()).agree(streams.members, leads=False)

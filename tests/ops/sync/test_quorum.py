"""--sync=quorum: its vector, its equality with bsp, its flags, and runs with a slow worker."""

import numpy as np
import pytest

from tests.command_line import run_of
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.sync.quorum import Quorum
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import ConfigurationError

#: K = 2 of 3 with a grace period of 1 s: (time, pushing worker or None, workers of the releases).
VECTOR = [
    (1.0, 1, []),
    (2.0, 2, []),  # the quorum is complete, the grace period begins
    (2.9, None, []),
    (3.0, None, [(1, 2)]),
    (3.5, 3, []),  # late: worker 3 waits in the next round
    (4.0, 1, []),  # the quorum of that round is complete
    (4.5, 2, [(1, 2, 3)]),  # all have pushed, so the grace period ends
    (5.0, 2, []),
    (6.0, 3, []),
    (7.5, None, [(2, 3)]),
]


def test_the_vector():
    rounds, steps = Rounds(Quorum(((1, 2, 3),), 2, 1.0)), {1: 0, 2: 0, 3: 0}
    for worker in steps:
        rounds.join(worker)
    rounds.advance(0.0)
    for now, worker, released in VECTOR:
        if worker is not None:
            steps[worker] += 1
            rounds.submit(ArrivalToken(worker, steps[worker]), now)
        found = rounds.advance(now).released
        assert [tuple(token.worker for token in tokens) for tokens in found] == released, now
    assert rounds.clocks() == {1: 2, 2: 3, 3: 2}


def test_fewer_live_workers_than_the_quorum_go_on():
    rounds = Rounds(Quorum(((1, 2, 3),), 2, 9.0))
    rounds.join(1)
    assert rounds.advance(0.0).proceeding == [1]
    rounds.submit(ArrivalToken(1, 1), 1.0)
    assert rounds.advance(1.0).released == [(ArrivalToken(1, 1),)]


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_a_quorum_of_all_workers_is_bsp(nb_ps):
    runs = [
        MiniRun(method("bsp", 3, **chosen), iter_max=30, nb_ps=nb_ps, rate=0.05).run()
        for chosen in ({}, {"overrides": {"sync": "quorum"}, "quorum": 3})
    ]
    assert not runs[1].deadlocked()
    np.testing.assert_array_equal(runs[0].theta, runs[1].theta)


@pytest.mark.parametrize("quorum", [1, 2, 3])
@pytest.mark.parametrize("nb_ps", [1, 3])
def test_every_quorum_trains(quorum, nb_ps):
    chosen = method("bsp", 4, overrides={"sync": "quorum"}, quorum=quorum)
    run = MiniRun(chosen, iter_max=24, nb_ps=nb_ps, rate=0.05).run()
    assert not run.deadlocked()
    assert [core.version for core in run.shards] == [24] * nb_ps
    assert np.isfinite(run.theta).all()


def test_more_than_half_is_the_default():
    found = [run_of("--sync=quorum", f"--nb_workers={n}").method.sync.sizes for n in (1, 2, 3, 4)]
    assert found == [[1], [2], [2], [3]]


def test_rounds_of_some_workers_are_no_common_epochs():
    chosen = method("bsp", 2, overrides={"sync": "quorum"})
    assert not chosen.ends_epochs_together and method("bsp", 2).ends_epochs_together


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sync=quorum", "--nb_workers=2", "--quorum=3"], "--quorum=3: expected 1 to 2"),
        (["--sync=bsp", "--quorum=1"], "--quorum=1 is for --sync=quorum"),
        (["--sync=quorum", "--groups=1,2|3,4"], "--groups is for --sync=gsp"),
        (["--sync=quorum", "--staleness_bound=1"], "--staleness_bound=1 is for"),
        (["--sync=quorum", "--fraction=0.5"], "--fraction=0.5"),
        (["--sync=quorum", "--collective=ring"], "--sync=quorum"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        run_of(*arguments)


def pair_of_shards():
    shards = [Rounds(Quorum(((1, 2, 3),), 2), follows=follows) for follows in (False, True)]
    for shard in shards:
        for worker in (1, 2, 3):
            shard.join(worker)
        shard.advance(0.0)
    return shards


def released(shard, now):
    return [tuple(token.worker for token in tokens) for tokens in shard.advance(now).released]


def test_a_push_withdrawn_on_shard_0_does_not_wait_on_another_shard():
    """Shard 0 restarts, and its workers give up there what shard 1 has accepted."""
    first, second = pair_of_shards()
    second.submit(ArrivalToken(1, 4), 1.0)
    assert released(second, 1.0) == []
    first.withdraw(1, 4)
    assert first.advance(1.0).has_drawn
    second.follow(first.draws())
    assert released(second, 2.0) == [(1,)]


def test_a_worker_that_was_away_at_the_announcement_is_not_waited_for_forever():
    """The worker retries a push on shard 1 that shard 0 released, with other rounds in between."""
    first, second = pair_of_shards()
    for worker in (1, 2):
        first.submit(ArrivalToken(worker, 1), 1.0)
    assert released(first, 1.0) == [(1, 2)]
    for shard in (first, second):
        shard.leave(1)
        shard.leave(2)
        shard.advance(2.0)
    first.submit(ArrivalToken(3, 1), 3.0)
    assert released(first, 3.0) == [(3,)]
    second.follow(first.draws())
    second.submit(ArrivalToken(3, 1), 3.0)
    assert released(second, 3.0) == [(3,)]
    for shard in (first, second):
        shard.join(1)
        shard.join(2)
        shard.advance(4.0)
    second.follow(first.draws())
    for worker in (1, 2):
        second.submit(ArrivalToken(worker, 1), 5.0)
    assert released(second, 5.0) == [(1, 2)]

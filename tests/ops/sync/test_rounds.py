"""Rounds by quorum: shard 0 decides by pushes and time, other shards follow its releases."""

import collections
import copy
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.policy import PolicyFailed
from thinwire.ops.sync.base import Agreement, ArrivalToken, Ready, SyncRule
from thinwire.ops.sync.quorum import Quorum
from thinwire.ops.sync.rounds import Rounds
from thinwire.ps.core.serialization import from_plain, to_plain


def begun(nb_workers, quorum, grace=1.0, follows=False):
    rounds = Rounds(Quorum((tuple(range(1, nb_workers + 1)),), quorum, grace), follows=follows)
    for worker in range(1, nb_workers + 1):
        rounds.join(worker)
    assert rounds.advance(0.0).proceeding == list(range(1, nb_workers + 1))
    return rounds


def push(rounds, worker, step, now):
    rounds.submit(ArrivalToken(worker, step), now)
    return workers_of(rounds.advance(now))


def workers_of(turn):
    return [tuple(token.worker for token in release) for release in turn.released]


def test_a_quorum_is_released_after_its_grace_and_a_late_push_joins_the_next_round():
    rounds = begun(3, quorum=2)
    assert push(rounds, 1, 1, 5.0) == [] and rounds.next_deadline() is None
    assert push(rounds, 2, 1, 6.0) == [] and rounds.next_deadline() == 7.0
    assert workers_of(rounds.advance(6.9)) == []
    assert workers_of(rounds.advance(7.0)) == [(1, 2)] and rounds.next_deadline() is None
    assert push(rounds, 3, 1, 7.5) == []
    assert push(rounds, 1, 2, 8.0) == []
    assert push(rounds, 2, 2, 8.5) == [(1, 2, 3)]
    assert rounds.clocks() == {1: 2, 2: 2, 3: 1}


def test_all_pushes_end_a_round_without_grace():
    rounds = begun(2, quorum=1, grace=9.0)
    assert push(rounds, 1, 1, 1.0) == []
    assert push(rounds, 2, 1, 2.0) == [(1, 2)]


def test_a_deadline_outlives_a_break():
    rounds = begun(3, quorum=2)
    push(rounds, 1, 1, 5.0)
    push(rounds, 2, 1, 6.0)
    again = Rounds(rounds.rule)
    for soft in (False, True):
        again.load_state_dict(from_plain(to_plain(copy.deepcopy(rounds.state_dict(soft)))), soft)
    assert again.next_deadline() == 7.0
    assert workers_of(again.advance(7.0)) == [(1, 2)]


def test_only_shard_0_asks_the_rule():
    rounds = begun(3, quorum=1, grace=0.0, follows=True)
    assert push(rounds, 1, 1, 5.0) == []
    leader = begun(3, quorum=1, grace=0.0)
    assert push(leader, 1, 1, 5.0) == [(1,)]
    rounds.follow(leader.draws())
    assert workers_of(rounds.advance(5.0)) == [(1,)]
    assert rounds.may_proceed(2) and leader.draws()[-1].steps == (1,)


def test_a_rule_without_an_agreement_is_followed_by_its_releases():
    assert Quorum(((1,),), 1, 0.0).agreement is Agreement.RELEASES
    with pytest.raises(NotImplementedError):
        SyncRule().ready(Rounds(Quorum(((1,),), 1, 0.0)), 0.0)


def test_an_empty_release_is_an_error_of_the_rule():
    @dataclasses.dataclass(frozen=True)
    class Hasty(Quorum):
        def ready(self, rounds, now):
            return Ready([rounds.oldest(rounds.members(0))])

    rounds = Rounds(Hasty(((1, 2),), 1, 0.0))
    rounds.join(1)
    with pytest.raises(PolicyFailed, match=r"Hasty.ready"):
        rounds.advance(0.0)


def test_a_held_worker_proceeds_when_the_rule_lets_it():
    @dataclasses.dataclass(frozen=True)
    class AtMostOneAhead(Quorum):
        def may_proceed(self, rounds, worker):
            return rounds.lead(worker) <= 1

    rounds = Rounds(AtMostOneAhead(((1, 2),), 1, 0.0))
    for worker in (1, 2):
        rounds.join(worker)
    rounds.advance(0.0)
    for step in (1, 2):
        rounds.submit(ArrivalToken(1, step), 0.0)
        proceeding = rounds.advance(0.0).proceeding
        assert proceeding == ([1] if step == 1 else [])
    assert rounds.waiting() == {1} and not rounds.may_proceed(1)
    rounds.submit(ArrivalToken(2, 1), 1.0)
    assert rounds.advance(1.0).proceeding == [2, 1] or rounds.may_proceed(1)


def test_a_permission_may_depend_on_anything():
    """Worker 1 proceeds when worker 2 has a waiting push, although no clock has changed."""

    @dataclasses.dataclass(frozen=True)
    class WithCompany(Quorum):
        def ready(self, rounds, now):
            first = rounds.oldest([1])
            return Ready([first] if first else ())

        def may_proceed(self, rounds, worker):
            return not rounds.clock(1) or bool(rounds.oldest([2]))

    rounds = Rounds(WithCompany(((1, 2),), 1, 0.0))
    for worker in (1, 2):
        rounds.join(worker)
    rounds.advance(0.0)
    rounds.submit(ArrivalToken(1, 1), 0.0)
    assert rounds.advance(0.0).proceeding == []
    rounds.submit(ArrivalToken(2, 1), 1.0)
    assert rounds.advance(1.0).proceeding == [1]


@given(st.integers(2, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_every_shard_releases_the_rounds_of_shard_0(nb_workers, quorum, seed):
    """Pushes and announcements arrive in any order, and workers leave and return."""
    rng = random.Random(seed)
    shards = [begun(nb_workers, min(quorum, nb_workers), 0.5, follows=bool(n)) for n in (0, 1)]
    released, free = [[], []], [set(range(1, nb_workers + 1)) for _ in shards]
    steps, under_way, news, now = collections.Counter(), [], collections.deque(), 0.0

    def settle(shard):
        while True:
            turn = shards[shard].advance(now)
            released[shard] += [tuple(sorted(release)) for release in turn.released]
            free[shard] |= set(turn.proceeding)
            if shard == 0 and turn.has_drawn:
                news.append(shards[0].draws())
            if not turn.released and not turn.proceeding:
                break

    for _ in range(400):
        now += rng.random()
        for worker in sorted(free[0] & free[1]):
            if rng.random() < 0.7:
                free[0].remove(worker)
                free[1].remove(worker)
                steps[worker] += 1
                under_way += [(shard, ArrivalToken(worker, steps[worker])) for shard in (0, 1)]
        if under_way and rng.random() < 0.7:
            shard, token = under_way.pop(rng.randrange(len(under_way)))
            shards[shard].submit(token, now)
        settle(0)
        if news and rng.random() < 0.5:
            shards[1].follow(news.popleft())
        settle(1)
    assert len(released[0]) > 5
    behind = len(released[0]) - len(released[1])
    assert 0 <= behind <= len(news) + 2
    assert released[1] == released[0][: len(released[1])]

"""Partial participation: workers of each round are drawn by a seed or read from a file."""

import collections
import copy
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.policy import describe
from thinwire.ops.sync.base import ArrivalToken, Draw
from thinwire.ops.sync.drawn import DrawnSync, draw, parse_draws
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.sync_files import DrawsFile, read_draws


def begun(policy, workers, follows=False):
    """Return a rule with these workers, and the workers that may proceed."""
    rule = Rounds(policy, follows=follows)
    for worker in workers:
        rule.join(worker)
    return rule, rule.advance(0.0).proceeding


def submit(rule, worker):
    rule.submit(ArrivalToken(worker, rule.clocks()[worker] + 1), 0.0)
    turn = rule.advance(0.0)
    return [tuple(each.worker for each in arrivals) for arrivals in turn.released], turn.proceeding


def test_a_round_is_of_the_drawn_workers_and_nobody_else_proceeds():
    rule, free = begun(DrawnSync(10, 0.3, seed=4), range(1, 11))
    assert len(free) == 3 and tuple(free) == draw(4, 0, range(1, 11), 0.3)
    for number in range(1, 6):
        *first, last = free
        assert all(submit(rule, worker) == ([], []) for worker in first)
        released, then = submit(rule, last)
        assert released == [tuple(free)]
        assert tuple(then) == draw(4, number, range(1, 11), 0.3)
        free = then
    assert sum(rule.clocks().values()) == 15


def test_draws_depend_on_the_seed_the_round_and_the_live_workers_alone():
    live = list(range(1, 21))
    assert draw(1, 5, live, 0.2) == draw(1, 5, live[::-1], 0.2)
    assert draw(1, 5, live, 0.2) != draw(2, 5, live, 0.2) != draw(2, 6, live, 0.2)
    drawn = draw(1, 5, live, 0.2)
    absent = next(worker for worker in live if worker not in drawn)
    without = [worker for worker in live if worker != absent]
    assert draw(1, 5, without, 0.21) == drawn  # a worker that was not drawn has no effect


def test_everybody_is_drawn_as_often():
    counts = collections.Counter(
        worker for number in range(3000) for worker in draw(7, number, range(1, 11), 0.3)
    )
    assert sum(counts.values()) == 9000
    # Binomial of 3,000 draws of 0.3: 25.1 is one standard deviation.
    assert all(abs(count - 900) < 4 * 25.1 for count in counts.values()), counts


def test_a_worker_that_dies_does_not_hold_its_round():
    rule, free = begun(DrawnSync(6, 0.5, seed=1), range(1, 7))
    gone, *rest = free
    for worker in rest:
        assert submit(rule, worker) == ([], [])
    rule.leave(gone)
    turn = rule.advance(0.0)
    assert [[each.worker for each in one] for one in turn.released] == [rest]
    assert gone not in turn.proceeding


def test_a_round_whose_workers_have_all_died_is_drawn_again():
    rule, free = begun(DrawnSync(6, 0.34, seed=1), range(1, 7))
    for worker in free:
        rule.leave(worker)
    turn = rule.advance(0.0)
    left = [worker for worker in range(1, 7) if worker not in free]
    assert turn.released == [] and turn.has_drawn
    assert tuple(turn.proceeding) == draw(1, 0, left, 0.34)
    assert rule.draws()[-1].of_round == 0
    for worker in list(rule.live()):
        rule.leave(worker)
    assert rule.advance(0.0).proceeding == []
    rule.join(2)
    assert rule.advance(0.0).proceeding == [2]


def test_draws_of_a_file_are_repeated_and_then_drawn(tmp_path):
    path = tmp_path / "draws.txt"
    path.write_text("# a comment\n3 1\n2,4\n5\n")
    draws = read_draws(str(path), 5)
    rule, free = begun(DrawnSync(5, 0.4, seed=9, draws=draws), [1, 2, 3, 4])
    assert free == [1, 3]
    submit(rule, 1)
    assert submit(rule, 3) == ([(1, 3)], [2, 4])
    submit(rule, 4)
    _, free = submit(rule, 2)  # no worker of the third line is live
    assert tuple(free) == draw(9, 2, [1, 2, 3, 4], 0.4)


@pytest.mark.parametrize("text", ["", "# only\n", "1 x\n", "1\n\n2\n", "0\n", "7\n"])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(ConfigurationError, match="--draws=d"):
        parse_draws(text, "d", 6)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_draws(str(tmp_path / "none"), 2)


def test_a_run_leaves_a_file_that_repeats_it(tmp_path):
    kept = DrawsFile(tmp_path)
    rule, free = begun(DrawnSync(5, 0.4, seed=3), range(1, 6))
    drawn = [tuple(free)]
    kept.record(rule.draws())
    for _ in range(6):
        for worker in drawn[-1]:
            _, free = submit(rule, worker)
        drawn.append(tuple(free))
        kept.record(rule.draws())
        kept.record(rule.draws())
    assert list(parse_draws(kept.path.read_text(), "d", 5)) == drawn
    again = policy_resumed(DrawnSync(5, 0.4, seed=3), rule)
    for worker in range(1, 6):
        again.join(worker)
    again.advance(0.0)
    DrawsFile(tmp_path).record(again.draws())  # the same round, played again
    assert list(parse_draws(kept.path.read_text(), "d", 5)) == drawn


def policy_resumed(policy, rule, generation=1, follows=False):
    fresh = Rounds(policy, generation, follows)
    fresh.load_state_dict(copy.deepcopy(rule.state_dict(soft=False)), soft=False)
    return fresh


def test_a_restart_keeps_the_draws_and_a_break_everything():
    policy = DrawnSync(8, 0.25, seed=2)
    rule, free = begun(policy, range(1, 9))
    for _ in range(3):
        submit(rule, free[0])
        _, free = submit(rule, free[1])
    submit(rule, free[0])
    again = Rounds(policy)
    for soft in (False, True):
        again.load_state_dict(copy.deepcopy(rule.state_dict(soft)), soft)
    assert again.state_dict(soft=True) == rule.state_dict(soft=True)
    fresh = policy_resumed(policy, rule)
    assert fresh.clocks() == rule.clocks() and not fresh.live()
    for worker in range(1, 9):
        fresh.join(worker)
    assert fresh.advance(0.0).proceeding == list(free)
    assert fresh.draws()[0].number > rule.draws()[-1].number  # the announcement is void
    assert submit(again, free[1]) == submit(rule, free[1])


@given(st.integers(1, 9), st.floats(0.05, 1), st.integers(0, 2**32))
def test_rounds_are_complete_and_go_on_whatever_dies_and_joins(workers, fraction, seed):
    """Random delays, deaths and returns: no worker is drawn twice or waits for ever."""
    rng = random.Random(seed)
    rule = Rounds(DrawnSync(workers, fraction, seed))
    ids, computing, rounds = range(1, workers + 1), set(), 0
    steps = collections.Counter()
    for worker in ids:
        rule.join(worker)
    for _ in range(200):
        turn = rule.advance(0.0)
        for arrivals in turn.released:
            rounds += 1
            assert arrivals and len({each.worker for each in arrivals}) == len(arrivals)
        assert not computing & set(turn.proceeding)
        computing |= set(turn.proceeding)
        if turn.has_drawn:
            newest = rule.draws()[-1]
            assert newest.of_round == rounds
            assert newest.workers == draw(seed, rounds, rule.live(), fraction)
        assert set(computing) == set(rule.live()) - rule.waiting()
        assert computing or not rule.live(), "everybody waits"
        event = rng.random()
        if event < 0.1 and rule.live():
            gone = rng.choice(list(rule.live()))
            computing.discard(gone)
            rule.leave(gone)
        elif event < 0.2:
            rule.join(rng.choice(list(ids)))
        elif computing:
            worker = rng.choice(sorted(computing))
            computing.remove(worker)
            steps[worker] += 1
            if event < 0.25:
                rule.withdraw(worker, steps[worker])
                continue
            rule.submit(ArrivalToken(worker, steps[worker]), 0.0)


@given(st.integers(2, 7), st.floats(0.1, 1), st.integers(0, 2**32))
def test_a_shard_that_follows_releases_the_rounds_of_shard_0(workers, fraction, seed):
    """Pushes and announcements arrive in any order; workers continue if both shards let them."""
    rng = random.Random(seed)
    policy = DrawnSync(workers, fraction, seed)
    rules = [Rounds(policy), Rounds(policy, follows=True)]
    rounds, free, under_way = [[], []], [set(), set()], []
    news = collections.deque()

    def settle(shard):
        turn = rules[shard].advance(0.0)
        rounds[shard] += [tuple(each.worker for each in one) for one in turn.released]
        free[shard] |= set(turn.proceeding)
        if shard == 0 and turn.has_drawn:
            news.append(rules[0].draws())

    for shard in (0, 1):
        for worker in range(1, workers + 1):
            rules[shard].join(worker)
        settle(shard)
    for _ in range(300):
        for worker in sorted(free[0] & free[1]):
            free[0].remove(worker)
            free[1].remove(worker)
            under_way += [(0, worker), (1, worker)]
        if news and rng.random() < 0.3:
            rules[1].follow(tuple(news.popleft()))
            settle(1)
        elif under_way:
            shard, worker = under_way.pop(rng.randrange(len(under_way)))
            rules[shard].submit(ArrivalToken(worker, rules[shard].clocks()[worker] + 1), 0.0)
            settle(shard)
        else:
            assert news, "everybody waits"
    assert len(rounds[0]) > 10
    assert abs(len(rounds[0]) - len(rounds[1])) <= 1
    assert all(one == two for one, two in zip(*rounds, strict=False))


def test_a_shard_that_follows_drops_what_shard_0_has_forgotten():
    policy = DrawnSync(4, 0.5, seed=5)
    leader, free = begun(policy, range(1, 5))
    follower, _ = begun(policy, range(1, 5), follows=True)
    follower.follow(leader.draws())
    assert follower.advance(0.0).proceeding == free
    restarted = policy_resumed(DrawnSync(4, 0.5, seed=6), leader)  # with other live workers, say
    for worker in range(1, 5):
        restarted.join(worker)
    then = restarted.advance(0.0).proceeding
    follower.follow(restarted.draws())
    assert follower.advance(0.0).proceeding == then
    for worker in then:
        follower.submit(ArrivalToken(worker, 1), 0.0)
    assert len(follower.advance(0.0).released) == 1


def leading_and_following(policy):
    """Return a rule, the workers that it has drawn, and a rule that follows its first draw."""
    leader, free = begun(policy, range(1, 5))
    follower, _ = begun(policy, range(1, 5), follows=True)
    follower.follow(leader.draws())
    follower.advance(0.0)
    return leader, free, follower


def test_a_worker_that_gave_up_its_push_does_not_hold_a_shard_that_follows():
    leader, free, follower = leading_and_following(DrawnSync(4, 0.5, seed=5))
    submit(leader, free[0])
    submit(leader, free[1])
    follower.submit(ArrivalToken(free[0], 1), 0.0)
    follower.withdraw(free[1], 1)
    assert follower.advance(0.0).released == []  # the worker may still push
    follower.follow(leader.draws())
    (arrivals,) = follower.advance(0.0).released
    assert [each.worker for each in arrivals] == [free[0]]


def test_a_push_of_a_draw_that_a_following_shard_missed_is_an_update_of_its_own():
    """Its worker, drawn again, continues at that shard too, for shard 0 waits for its next push."""
    policy = DrawnSync(1, 1.0)
    leader, _ = begun(policy, [1])
    follower, _ = begun(policy, [1], follows=True)
    follower.follow(leader.draws())
    follower.advance(0.0)
    submit(leader, 1)  # the push does not reach the follower
    follower.leave(1)
    follower.join(1)
    follower.follow(leader.draws())
    follower.advance(0.0)
    follower.submit(ArrivalToken(1, 1), 0.0)
    turn = follower.advance(0.0)
    assert turn.released == [(ArrivalToken(1, 1),)] and list(turn.proceeding) == [1]
    assert follower.may_proceed(1) and follower.clocks() == leader.clocks()
    follower.submit(ArrivalToken(1, 2), 0.0)
    assert follower.advance(0.0).released == [(ArrivalToken(1, 2),)]


def test_settings_that_make_no_sense_are_refused_by_what_helps():
    def made(method="bsp", **choices):
        return compose(Choices.of(method, 4, **choices))

    for method in ("asgd", "ssp", "gsp"):
        with pytest.raises(ConfigurationError, match=r"--fraction=0.5 .*Use --sync=bsp"):
            made(method, fraction=0.5)
    with pytest.raises(ConfigurationError, match="--draws selects"):
        made("asgd", draws=((1, 2),))
    with pytest.raises(ConfigurationError, match="above 0 and at most 1"):
        made(fraction=1.5)
    with pytest.raises(ConfigurationError, match="--collective=ps"):
        made(fraction=0.5, collective="ring")
    with pytest.raises(ConfigurationError, match="--overlap"):
        made(fraction=0.5, overlap=True)
    with pytest.raises(ConfigurationError, match="--fraction"):
        made(fraction=0.5, aggregate="median")
    drawn = made(fraction=0.5, seed=3)
    assert not drawn.steps_together
    assert describe(drawn.sync) == {"nb_workers": 4, "fraction": 0.5}  # values that all nodes share
    assert made(fraction=1.0).sync == made().sync


def test_who_gave_up_its_push_before_the_draw_was_known_is_not_waited_for():
    follower, _ = begun(DrawnSync(2, 1.0), [1, 2], follows=True)
    follower.withdraw(1, 14)
    drawn = Draw(19, 0, (1, 2), after=(13, 9))
    follower.follow([drawn])
    follower.advance(0.0)
    over = dataclasses.replace(drawn, steps=(14, 10))
    follower.follow([over, Draw(20, 1, (2,), after=(10,))])
    follower.submit(ArrivalToken(2, 10), 0.0)
    assert follower.advance(0.0).released == [(ArrivalToken(2, 10),)]


def test_a_following_shard_that_restarts_plays_the_round_under_way_again():
    policy = DrawnSync(4, 0.5, seed=5)
    leader, free, follower = leading_and_following(policy)
    for rule in (leader, follower):
        for worker in free:
            rule.submit(ArrivalToken(worker, 1), 0.0)
    then = leader.advance(0.0).proceeding
    follower.follow(leader.draws())
    assert follower.advance(0.0).proceeding == then
    again = policy_resumed(policy, follower, follows=True)
    for worker in range(1, 5):
        again.join(worker)
    again.follow(leader.draws())
    assert again.advance(0.0).proceeding == then


def test_who_gave_up_an_earlier_push_is_waited_for_in_the_next_round():
    follower, _ = begun(DrawnSync(2, 1.0), [1, 2], follows=True)
    follower.withdraw(1, 14)
    drawn = Draw(20, 0, (1, 2), after=(14, 9))  # shard 0 has given step 14 up, too
    follower.follow([drawn])
    follower.advance(0.0)
    over = dataclasses.replace(drawn, steps=(15, 10))
    follower.follow([over, Draw(21, 1, (2,), after=(10,))])
    follower.submit(ArrivalToken(2, 10), 0.0)
    assert follower.advance(0.0).released == []
    follower.submit(ArrivalToken(1, 15), 0.0)
    assert follower.advance(0.0).released == [(ArrivalToken(1, 15), ArrivalToken(2, 10))]


def test_a_following_shard_does_not_wait_for_what_it_has_released():
    follower = Rounds(DrawnSync(2, 1.0), follows=True)
    steps = {"1": 5, "2": 6}
    state = {"clocks": dict(steps), "steps": steps, "void": {}, "rounds": 6, "followed": 2}
    follower.load_state_dict(state, soft=False)
    for worker in (1, 2):
        follower.join(worker)
    over = Draw(3, 6, (1, 2), steps=(5, 7), after=(4, 6))
    follower.follow([over, Draw(4, 7, (2,), after=(7,))])
    follower.advance(0.0)
    follower.submit(ArrivalToken(2, 7), 0.0)
    turn = follower.advance(0.0)
    assert turn.released == [(ArrivalToken(2, 7),)] and turn.proceeding == [2]


def test_what_a_round_has_released_is_not_over_before_it():
    """A shard that receives round and release together would take each push for a late one."""
    policy = DrawnSync(2, 1.0)
    leader, _ = begun(policy, [1, 2])
    follower, _ = begun(policy, [1, 2], follows=True)
    for worker in (1, 2):
        submit(leader, worker)
    over, newest = leader.draws()
    assert (over.steps, over.after, newest.after) == ((1, 1), (0, 0), (1, 1))
    follower.follow(leader.draws())
    follower.advance(0.0)
    follower.submit(ArrivalToken(1, 1), 0.0)
    assert follower.advance(0.0).released == []
    follower.submit(ArrivalToken(2, 1), 0.0)
    assert follower.advance(0.0).released == [(ArrivalToken(1, 1), ArrivalToken(2, 1))]


def test_what_was_given_up_is_past_after_a_restart():
    """A following shard separates abandoned pushes of the newest draw from those of earlier draws.

    Else it would not wait for the worker's next push in the round.
    """
    policy = DrawnSync(2, 1.0)
    rule, _ = begun(policy, [1, 2])
    rule.withdraw(1, 7)
    again = policy_resumed(policy, rule)
    for worker in (1, 2):
        again.join(worker)
    again.advance(0.0)
    assert again.draws()[-1].after == (7, 0)

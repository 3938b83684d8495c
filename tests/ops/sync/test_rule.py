"""The single synchronization rule: BSP, ASP, SSP and GSP are parameters of it."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.virtual.toy import method
from thinwire.ops.sync.base import Advance, ArrivalToken, Joiners
from thinwire.ops.sync.groups import format_groups, parse_groups, parse_groups_file
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.sync.rule import ClosedGroupSync, GroupSync, make_rule
from thinwire.ops.types import ConfigurationError


def joined(policy: GroupSync, workers, follows=False) -> Rounds:
    rule = Rounds(policy, follows=follows)
    for worker in workers:
        rule.join(worker)
    assert sorted(rule.advance(0.0).proceeding) == sorted(workers)
    return rule


def submit(rule, worker):
    """Submit a worker's next push; return released workers, and workers that may proceed."""
    rule.submit(ArrivalToken(worker, rule.clocks()[worker] + 1), 0.0)
    return advance(rule)


def advance(rule):
    turn = rule.advance(0.0)
    return [tuple(each.worker for each in arrivals) for arrivals in turn.released], turn.proceeding


def test_bsp_releases_all_together_in_order_of_id():
    rule = joined(make_rule("bsp", 3), [1, 2, 3])
    assert submit(rule, 3) == ([], [])
    assert submit(rule, 1) == ([], [])
    released, free = submit(rule, 2)
    assert released == [(1, 2, 3)]
    assert sorted(free) == [1, 2, 3]
    assert rule.clocks() == {1: 1, 2: 1, 3: 1}


def test_asp_releases_every_push_alone():
    rule = joined(make_rule("asp", 2), [1, 2])
    for _ in range(5):
        assert submit(rule, 2) == ([(2,)], [2])


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ssp_lets_a_worker_run_exactly_bound_ahead(bound):
    rule = joined(make_rule("ssp", 2, {"staleness_bound": bound}), [1, 2])
    started = 1  # both may start their first iteration
    while 1 in submit(rule, 1)[1]:
        started += 1
    assert started == bound + 1
    assert 1 in submit(rule, 2)[1]


def test_gsp_groups_step_by_themselves():
    rule = joined(make_rule("gsp", 3, {"groups": ((1, 2), (3,))}), [1, 2, 3])
    assert submit(rule, 3)[0] == [(3,)]
    assert submit(rule, 1)[0] == []
    assert submit(rule, 2)[0] == [(1, 2)]


def test_a_dead_worker_leaves_the_barrier_and_the_minimum():
    rule = joined(make_rule("bsp", 3), [1, 2, 3])
    for worker in (1, 2):
        rule.submit(ArrivalToken(worker, 1), 0.0)
    rule.leave(3)
    released, free = advance(rule)
    assert released == [(1, 2)]
    assert sorted(free) == [1, 2]

    rule = joined(make_rule("ssp", 2, {"staleness_bound": 0}), [1, 2])
    assert submit(rule, 1)[1] == []
    rule.leave(2)
    assert advance(rule)[1] == [1]


def test_a_late_worker_enters_at_the_round_boundary_with_the_minimal_clock():
    rule = joined(make_rule("bsp", 3), [1, 2])
    for _ in range(4):
        for worker in (1, 2):
            submit(rule, worker)
    rule.submit(ArrivalToken(1, 5), 0.0)
    rule.join(3)
    assert advance(rule) == ([], [])
    released, free = submit(rule, 2)
    assert released == [(1, 2)]
    assert sorted(free) == [1, 2, 3]
    assert rule.clocks()[3] == 5


def test_a_worker_may_have_several_arrivals_of_which_a_round_takes_the_oldest():
    rule = joined(make_rule("bsp", 2), [1, 2])
    for step in (2, 1, 2):
        rule.submit(ArrivalToken(1, step), 0.0)
    assert rule.advance(0.0).released == []
    rule.submit(ArrivalToken(2, 1), 0.0)
    assert rule.advance(0.0).released == [(ArrivalToken(1, 1), ArrivalToken(2, 1))]
    assert rule.has_submitted(1) and not rule.has_submitted(2)
    rule.submit(ArrivalToken(2, 2), 0.0)
    assert rule.advance(0.0).released == [(ArrivalToken(1, 2), ArrivalToken(2, 2))]
    assert rule.next_deadline() is None


def test_arrivals_outlive_a_break_and_clocks_a_restart():
    policy = make_rule("gsp", 4, {"groups": ((1, 2), (3, 4)), "staleness_bound": 1})
    rule = joined(policy, [1, 2, 3, 4])
    for worker in (1, 3, 4):
        submit(rule, worker)
    again, fresh = Rounds(policy), Rounds(policy)
    for soft in (False, True):
        again.load_state_dict(copy.deepcopy(rule.state_dict(soft)), soft)
    assert again.state_dict(soft=True) == rule.state_dict(soft=True)
    assert submit(again, 2) == submit(rule, 2)
    fresh.load_state_dict(rule.state_dict(soft=False), soft=False)
    assert fresh.clocks() == rule.clocks() and not fresh.live()


@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_ssp_never_exceeds_its_bound_and_never_blocks_everyone(workers, bound, seed, grouped):
    """Random delays, deaths and returns; groups with a bound too."""
    rng = random.Random(seed)
    ids = list(range(1, workers + 1))
    cut = rng.randint(1, workers)
    groups = tuple(g for g in (tuple(ids[:cut]), tuple(ids[cut:])) if g)
    rule = Rounds(GroupSync(groups if grouped else tuple((i,) for i in ids), bound))
    for worker in ids:
        rule.join(worker)
    computing = set(rule.advance(0.0).proceeding)
    for _ in range(150):
        event = rng.random()
        if event < 0.05 and len(rule.live()) > 1:
            gone = rng.choice(rule.live())
            computing.discard(gone)
            rule.leave(gone)
        elif event < 0.1:
            absent = [i for i in ids if i not in (*rule.live(), *rule.joining())]
            if absent:
                rule.join(rng.choice(absent))
        else:
            assert computing, "everybody waits for somebody"
            worker = rng.choice(sorted(computing))
            computing.discard(worker)
            rule.submit(ArrivalToken(worker, rule.clocks()[worker] + 1), 0.0)
        _, free = advance(rule)
        slowest = rule.min_clock()
        for worker in free:
            assert rule.clocks()[worker] - slowest <= bound
        computing.update(free)


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ("1,2|2,3", "exactly one group"),
        ("1|3", "exactly one group"),
        ("1||2", "empty group"),
        ("0,1", "exactly one group"),
        ("1,x", "expected worker ids"),
    ],
)
def test_bad_groups_are_refused(groups, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        GroupSync(parse_groups(groups))


def test_groups_must_name_every_worker():
    with pytest.raises(ConfigurationError, match="--nb_workers=4"):
        make_rule("gsp", 4, {"groups": ((1, 2), (3,))})


def test_parameters_of_another_rule_are_refused():
    with pytest.raises(ConfigurationError, match="--groups.*--sync=gsp.*--sync=bsp"):
        method("bsp", groups=((1,), (2,)))
    with pytest.raises(ConfigurationError, match="--staleness_bound=1.*=ssp, gsp.*--sync=asp"):
        method("asgd", staleness_bound=1)
    with pytest.raises(ConfigurationError, match="--staleness_bound=-1"):
        GroupSync(((1,),), -1)
    assert make_rule("ssp", 2).bound == 3


def test_groups_file_has_comments_and_blank_lines():
    text = "# fast ones\n1, 2\n\n3 4  # slow\n"
    assert parse_groups_file(text, "g.txt") == ((1, 2), (3, 4))
    assert parse_groups(format_groups(((1, 2), (3,)))) == ((1, 2), (3,))
    with pytest.raises(ConfigurationError, match="g.txt .* no group"):
        parse_groups_file("# nothing\n", "g.txt")


class EveryWorkerLookedAt(Rounds):
    """The same rule without counters: it looks at all workers for each result."""

    def leave(self, worker):
        for token in self._submitted.pop(worker, ()):
            del self._arrived_at[token]
        for workers in (self._live, self._joining):
            if worker in workers:
                workers.remove(worker)
        self._held.pop(worker, None)
        self._agreement.left(worker)

    def advance(self, now):
        released = []
        for number, group in enumerate(self.groups):
            members = [worker for worker in group if worker in self._live]
            pending = [worker for worker in members if worker in self._submitted]
            if pending and pending == members:
                released.append(tuple(self._submitted.pop(worker)[0] for worker in pending))
                for worker in pending:
                    self._clocks[worker] += 1
                    self._held[worker] = None
                pending = []
            if not pending:
                self._agreement.admit(number, at_boundary=True)
        bound, slowest = self.rule.bound, self.min_clock()
        free = [
            worker
            for worker in self._held
            if bound is None or self._clocks[worker] - slowest <= bound
        ]
        for worker in free:
            del self._held[worker]
        return Advance(released, free)

    def min_clock(self):
        return min((self._clocks[worker] for worker in self._live), default=0)


@given(st.integers(1, 8), st.none() | st.integers(0, 3), st.integers(1, 8), st.integers(0, 2**32))
def test_the_rule_is_what_looking_at_every_worker_gives(workers, bound, size, seed):
    rng = random.Random(seed)
    ids = range(1, workers + 1)
    groups = tuple(tuple(ids[start : start + size]) for start in range(0, workers, size))
    rule = GroupSync(groups, bound)
    both = (Rounds(rule), EveryWorkerLookedAt(rule))
    for _ in range(80):
        worker = rng.randint(1, workers)
        known = worker in both[0].live()
        waits = worker in both[0].waiting()
        verb = rng.choice(("submit", "submit", "submit", "leave")) if known else "join"
        for rule in both:
            if verb == "submit":
                if not waits:
                    rule.submit(ArrivalToken(worker, rule.clocks()[worker] + 1), 0.0)
            elif verb == "leave":
                rule.leave(worker)
            else:
                rule.join(worker)
        turns = [rule.advance(0.0) for rule in both]
        assert list(turns[0].released) == list(turns[1].released)
        assert list(turns[0].proceeding) == list(turns[1].proceeding)
        states = [rule.state_dict(soft=True) for rule in both]
        for field in ("live", "joining", "submitted", "held", "clocks"):
            assert states[0][field] == states[1][field]


def test_a_withdrawn_push_is_waited_for_again():
    rule = joined(GroupSync(((1, 2),)), [1, 2])
    rule.submit(ArrivalToken(1, 1), 0.0)
    rule.withdraw(1, 1)
    assert rule.may_proceed(1)
    assert submit(rule, 2)[0] == []
    assert submit(rule, 1)[0] == [(1, 2)]
    before = rule.state_dict(soft=True)
    rule.withdraw(1, 1)
    assert rule.state_dict(soft=True) == before  # nothing is there to be withdrawn


def test_a_worker_that_returns_holds_nobody_back():
    rule = joined(make_rule("ssp", 3, {"staleness_bound": 1}), [1, 2, 3])
    rule.leave(3)
    for _ in range(5):
        assert submit(rule, 1)[1] == [1]
        assert submit(rule, 2)[1] == [2]
    rule.join(3)
    assert advance(rule)[1] == [3]
    assert submit(rule, 1)[1] == [1]  # one ahead of the slowest: as if worker 3 had been there
    assert rule.clocks() == {1: 6, 2: 5, 3: 5}


def test_a_worker_that_joins_a_group_takes_over_its_clock():
    rule = joined(make_rule("gsp", 3, {"groups": ((1, 2), (3,)), "staleness_bound": 2}), [1, 3])
    for _ in range(2):
        submit(rule, 1)
    rule.join(2)
    assert advance(rule)[1] == [2]
    assert rule.clocks() == {1: 2, 2: 2, 3: 0}


def test_after_a_change_of_groups_nobody_runs_further_ahead_of_who_computes():
    rule = joined(make_rule("ssp", 3, {"staleness_bound": 2}), [1, 2, 3])
    for worker in (1, 3, 1, 3):
        submit(rule, worker)
    rule.pause()
    rule.regroup(((1, 2), (3,)))  # worker 2 computes its first iteration
    advance(rule)
    assert submit(rule, 3) == ([(3,)], [])  # worker 1 has done three, and worker 2 none


def test_a_change_of_groups_lets_those_go_on_that_the_bound_blocks_no_longer():
    """Otherwise the group would wait for a worker that waits for the group."""
    rule = joined(make_rule("ssp", 2, {"staleness_bound": 2}), [1, 2])
    for _ in range(3):
        submit(rule, 1)
    assert not rule.may_proceed(1)
    rule.regroup(((1, 2),))
    assert advance(rule)[1] == [1]


def test_rounds_that_are_complete_are_released_one_after_the_other():
    rule = joined(make_rule("bsp", 2), [1, 2])
    for worker in (1, 2):
        for step in (1, 2):
            rule.submit(ArrivalToken(worker, step), 0.0)
    for step in (1, 2):
        released = rule.advance(0.0).released
        assert released == [(ArrivalToken(1, step), ArrivalToken(2, step))]


def test_what_was_given_up_is_known_after_a_restart():
    """Another shard may have released it: it would wait here for a push that never comes."""
    rule = joined(make_rule("bsp", 2), [1, 2])
    rule.submit(ArrivalToken(1, 7), 0.0)
    rule.withdraw(1, 7)
    again = Rounds(make_rule("bsp", 2))
    again.load_state_dict(copy.deepcopy(rule.state_dict(soft=False)), soft=False)
    for worker in (1, 2):
        again.join(worker)
    again.advance(0.0)
    again.submit(ArrivalToken(2, 3), 0.0)
    assert again.over() == {1: 7, 2: 0}


def test_a_push_is_released_late_that_is_over_at_another_shard():
    rule = joined(make_rule("bsp", 2), [1, 2])
    rule.submit(ArrivalToken(1, 3), 0.0)
    assert rule.release_late({1: 2, 2: 9}) == []
    assert rule.release_late({1: 3, 2: 9}) == [(ArrivalToken(1, 3),)]
    assert rule.may_proceed(1) is False and advance(rule)[1] == [1]


def after_a_break(policy, rule):
    """Return the rule of a shard that continues without a restart, as after a move."""
    again = Rounds(policy, follows=rule.follows)
    for soft in (False, True):
        again.load_state_dict(copy.deepcopy(rule.state_dict(soft)), soft)
    return again


@pytest.mark.parametrize("has_break", [False, True])
def test_a_shard_that_follows_lets_a_joiner_in_where_shard_0_has(has_break):
    """Only after pushes that ended at shard 0 have ended here, and after the joiner's entry."""
    policy = make_rule("bsp", 3)
    rule = joined(policy, [1, 2], follows=True)
    rule.submit(ArrivalToken(1, 4), 0.0)
    rule.join(3)
    rule.expect([Joiners((3,), True, (1, 2), (4, 4))])
    if has_break:
        rule = after_a_break(policy, rule)
    assert advance(rule) == ([], []) and rule.joining() == (3,)
    rule.submit(ArrivalToken(2, 4), 0.0)
    released, free = advance(rule)
    assert released == [(1, 2)] and sorted(free) == [1, 2, 3]


def test_a_joiner_that_shard_0_has_not_let_in_waits_at_the_others():
    policy = make_rule("bsp", 2)
    rule = joined(policy, [1], follows=True)
    rule.join(2)
    rule.expect([Joiners((2,))])
    for each in (rule, after_a_break(policy, rule)):
        assert advance(each) == ([], []) and each.live() == (1,)
        each.expect([Joiners((2,), True)])
        assert advance(each)[1] == [2]


def test_a_closed_group_lets_nobody_in_while_its_members_compute():
    rule = joined(ClosedGroupSync(((1, 2, 3),)), [1, 2])
    rule.join(3)
    assert advance(rule) == ([], [])
    assert submit(rule, 1) == ([], [])
    released, free = submit(rule, 2)
    assert released == [(1, 2)] and sorted(free) == [1, 2, 3]


def test_a_push_that_is_sent_again_counts_for_one_round():
    rule = joined(make_rule("bsp", 2), [1, 2])
    for _ in range(2):
        rule.submit(ArrivalToken(1, 1), 0.0)
    assert submit(rule, 2)[0] == [(1, 2)]
    assert not rule.has_submitted(1)
    assert submit(rule, 2)[0] == []

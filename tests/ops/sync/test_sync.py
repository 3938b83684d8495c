"""The one SyncRule: BSP, ASP, SSP, GSP as parameters of it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.sync.groups import format_groups, parse_groups, parse_groups_file
from thinwire.ops.sync.rule import SyncRule, make_rule
from thinwire.ops.types import ConfigurationError


def joined(rule: SyncRule, workers) -> dict:
    state = rule.init()
    for worker in workers:
        state = rule.join(worker, state)
    _, admitted, state = rule.advance(state)
    assert sorted(admitted) == sorted(workers)
    return state


def push(rule, state, worker):
    return rule.advance(rule.push(worker, state))


def test_bsp_releases_all_together_in_order_of_id():
    rule = make_rule("bsp", 3)
    state = joined(rule, [1, 2, 3])
    assert push(rule, state, 3)[:2] == ([], [])
    assert push(rule, state, 1)[:2] == ([], [])
    released, free, state = push(rule, state, 2)
    assert released == [(1, 2, 3)]
    assert sorted(free) == [1, 2, 3]
    assert state["clocks"] == {1: 1, 2: 1, 3: 1}


def test_asp_releases_every_push_alone():
    rule = make_rule("asp", 2)
    state = joined(rule, [1, 2])
    for _ in range(5):
        released, free, state = push(rule, state, 2)
        assert released == [(2,)]
        assert free == [2]


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ssp_lets_a_worker_run_exactly_bound_ahead(bound):
    rule = make_rule("ssp", 2, bound=bound)
    state = joined(rule, [1, 2])
    started = 1  # both may start their first iteration
    while True:
        _, free, state = push(rule, state, 1)
        if 1 not in free:
            break
        started += 1
    assert started == bound + 1
    _, free, state = push(rule, state, 2)
    assert 1 in free


def test_gsp_groups_step_by_themselves():
    rule = make_rule("gsp", 3, groups=((1, 2), (3,)))
    state = joined(rule, [1, 2, 3])
    assert push(rule, state, 3)[0] == [(3,)]
    assert push(rule, state, 1)[0] == []
    assert push(rule, state, 2)[0] == [(1, 2)]


def test_a_dead_worker_leaves_the_barrier_and_the_minimum():
    rule = make_rule("bsp", 3)
    state = joined(rule, [1, 2, 3])
    state = rule.push(1, state)
    state = rule.push(2, state)
    released, free, state = rule.advance(rule.leave(3, state))
    assert released == [(1, 2)]
    assert sorted(free) == [1, 2]

    rule = make_rule("ssp", 2, bound=0)
    state = joined(rule, [1, 2])
    _, free, state = push(rule, state, 1)
    assert free == []
    assert rule.advance(rule.leave(2, state))[1] == [1]


def test_a_late_worker_enters_at_the_round_boundary_with_the_minimal_clock():
    rule = make_rule("bsp", 3)
    state = joined(rule, [1, 2])
    for _ in range(4):
        for worker in (1, 2):
            _, _, state = push(rule, state, worker)
    state = rule.push(1, state)
    released, free, state = rule.advance(rule.join(3, state))
    assert (released, free) == ([], [])
    released, free, state = push(rule, state, 2)
    assert released == [(1, 2)]
    assert sorted(free) == [1, 2, 3]
    assert state["clocks"][3] == 5


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
    rule = SyncRule(groups if grouped else tuple((i,) for i in ids), bound)
    state = rule.init()
    for worker in ids:
        state = rule.join(worker, state)
    _, free, state = rule.advance(state)
    computing = set(free)
    for _ in range(150):
        event = rng.random()
        if event < 0.05 and len(state["live"]) > 1:
            gone = rng.choice(state["live"])
            computing.discard(gone)
            state = rule.leave(gone, state)
        elif event < 0.1:
            absent = [i for i in ids if i not in (*state["live"], *state["joining"])]
            if absent:
                state = rule.join(rng.choice(absent), state)
        else:
            assert computing, "everybody waits for somebody"
            worker = rng.choice(sorted(computing))
            computing.discard(worker)
            state = rule.push(worker, state)
        _, free, state = rule.advance(state)
        slowest = rule.min_clock(state)
        for worker in free:
            assert state["clocks"][worker] - slowest <= bound
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
        SyncRule(parse_groups(groups))


def test_groups_must_name_every_worker():
    with pytest.raises(ConfigurationError, match="--nb_workers=4"):
        make_rule("gsp", 4, groups=((1, 2), (3,)))


def test_parameters_of_another_rule_are_refused():
    with pytest.raises(ConfigurationError, match="--sync=gsp"):
        make_rule("bsp", 2, groups=((1,), (2,)))
    with pytest.raises(ConfigurationError, match="no bound"):
        make_rule("asp", 2, bound=1)
    with pytest.raises(ConfigurationError, match="0 \\(lockstep\\)"):
        SyncRule(((1,),), -1)


def test_groups_file_has_comments_and_blank_lines():
    text = "# fast ones\n1, 2\n\n3 4  # slow\n"
    assert parse_groups_file(text, "g.txt") == ((1, 2), (3, 4))
    assert parse_groups(format_groups(((1, 2), (3,)))) == ((1, 2), (3,))
    with pytest.raises(ConfigurationError, match="holds no group"):
        parse_groups_file("# nothing\n", "g.txt")


class EveryWorkerLookedAt(SyncRule):
    """The same rule without a memory: whatever is asked is found by looking at all workers."""

    def leave(self, worker, state):
        for field in ("live", "joining", "pushed", "held"):
            state[field] = [other for other in state[field] if other != worker]
        return state

    def advance(self, state):
        released = []
        for number, group in enumerate(self.groups):
            members = [worker for worker in group if worker in state["live"]]
            pending = [worker for worker in members if worker in state["pushed"]]
            if pending and pending == members:
                released.append(tuple(pending))
                for worker in pending:
                    state["clocks"][worker] += 1
                    state["pushed"].remove(worker)
                    state["held"].append(worker)
                pending = []
            if not pending:
                self._admit(number, state)
        slowest = self.min_clock(state)
        free = [
            worker
            for worker in state["held"]
            if self.bound is None or state["clocks"][worker] - slowest <= self.bound
        ]
        state["held"] = [worker for worker in state["held"] if worker not in free]
        return released, free, state

    def min_clock(self, state):
        return min((state["clocks"][worker] for worker in state["live"]), default=0)

    def _touch(self, worker, state):
        pass


@given(st.integers(1, 8), st.none() | st.integers(0, 3), st.integers(1, 8), st.integers(0, 2**32))
def test_the_rule_is_what_looking_at_every_worker_gives(workers, bound, size, seed):
    rng = random.Random(seed)
    ids = range(1, workers + 1)
    groups = tuple(tuple(ids[start : start + size]) for start in range(0, workers, size))
    rules = (SyncRule(groups, bound), EveryWorkerLookedAt(groups, bound))
    states = [rule.init() for rule in rules]
    for _ in range(80):
        worker = rng.randint(1, workers)
        known = worker in states[0]["live"]
        waits = worker in (*states[0]["pushed"], *states[0]["held"])
        verb = rng.choice(("push", "push", "push", "leave")) if known else "join"
        if verb != "push" or not waits:
            states = [
                getattr(rule, verb)(worker, state)
                for rule, state in zip(rules, states, strict=True)
            ]
        results = [rule.advance(state) for rule, state in zip(rules, states, strict=True)]
        assert results[0][:2] == results[1][:2]
        for field in ("live", "joining", "pushed", "held", "clocks"):
            assert states[0][field] == states[1][field]


def test_a_withdrawn_push_is_waited_for_again():
    rule = SyncRule(((1, 2),))
    state = rule.init()
    for worker in (1, 2):
        state = rule.join(worker, state)
    _, free, state = rule.advance(state)
    assert free == [1, 2]
    state = rule.withdraw(1, rule.push(1, state))
    assert rule.goes_on(1, state)
    released, _, state = rule.advance(rule.push(2, state))
    assert released == []
    released, _, state = rule.advance(rule.push(1, state))
    assert released == [(1, 2)]
    assert rule.withdraw(1, state) == state  # nothing is there to be withdrawn

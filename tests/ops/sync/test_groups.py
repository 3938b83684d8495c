"""Groups and shares from speeds: the chosen k, determinism, no lost examples."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.fractions import ranges, read_fractions
from thinwire.ops.sync import groups as sync_groups
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.sync.rule import GroupSync
from thinwire.ops.types import ConfigurationError

speeds_of_all = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=12).map(
    lambda values: dict(enumerate(values, start=1))
)


@pytest.mark.parametrize(
    ("speeds", "groups"),
    [
        ([100, 101, 99, 100], "1,2,3,4"),
        ([100, 120, 90, 110], "1,2,3,4"),
        ([100, 100, 50, 50], "1,2|3,4"),
        ([100] * 20 + [50], ",".join(map(str, range(1, 21))) + "|21"),
        ([4, 2, 1, 4.1, 2.1, 1.1, 3.9, 1.9, 0.9], "1,4,7|2,5,8|3,6,9"),
        ([1, 10, 100, 1000], "1|2|3|4"),
        ([7], "1"),
    ],
)
def test_the_number_of_groups_follows_from_the_speeds(speeds, groups):
    measured = dict(enumerate(map(float, speeds), start=1))
    assert sync_groups.format_groups(sync_groups.propose_groups(measured, len(speeds))) == groups


def test_who_was_not_measured_is_alone():
    assert sync_groups.propose_groups({2: 5.0, 4: 5.1}, 5) == ((1,), (2, 4), (3,), (5,))
    assert sync_groups.propose_groups({}, 2) == ((1,), (2,))


@given(speeds_of_all, st.floats(0.001, 1000.0))
@settings(max_examples=200)
def test_groups_are_runs_of_like_speeds_whatever_the_unit(speeds, unit):
    groups = sync_groups.propose_groups(speeds, len(speeds))
    assert sorted(worker for group in groups for worker in group) == sorted(speeds)
    spans = sorted((min(speeds[w] for w in g), max(speeds[w] for w in g)) for g in groups)
    assert all(high <= 1.4 * low * (1 + 1e-9) for low, high in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert sync_groups.propose_groups(dict(reversed(speeds.items())), len(speeds)) == groups
    if max(speeds.values()) <= 1.39 * min(speeds.values()):
        assert len(groups) == 1
    scaled = sync_groups.propose_groups(
        {w: unit * speed for w, speed in speeds.items()}, len(speeds)
    )
    assert abs(len(scaled) - len(groups)) <= 1  # a ratio of just 1.4 may fall to either side


def squares(values):
    return sum((value - sum(values) / len(values)) ** 2 for value in values)


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=8).map(sorted), st.floats(0.01, 3.0))
@settings(max_examples=200)
def test_clusters_are_the_best_of_the_smallest_number_that_will_do(values, width):
    def cost(cuts):
        return sum(squares(values[a:b]) for a, b in itertools.pairwise(cuts))

    cuts = sync_groups._clusters(values, width)
    for number in range(1, len(cuts)):
        every = [
            (0, *inner, len(values))
            for inner in itertools.combinations(range(1, len(values)), number - 1)
        ]
        best = min(map(cost, every))
        if number == len(cuts) - 1:
            assert cost(cuts) <= best + 1e-9
        else:  # every best cut into fewer is too wide somewhere, up to rounding
            tight = [c for c in every if cost(c) <= best]
            assert any(
                max(values[b - 1] - values[a] for a, b in itertools.pairwise(c)) > width - 1e-9
                for c in tight
            )


def test_shares_are_the_paper_s():
    """12 workers in groups of 6, 4, 2 and speeds 1 : 2 : 3: shares .05, .1, .15 of it."""
    groups = (tuple(range(1, 7)), tuple(range(7, 11)), (11, 12))
    speeds = {w: float(level) for level, group in enumerate(groups, start=1) for w in group}
    parts = sync_groups.shares(groups, speeds)
    assert [parts[w] for w in (1, 7, 11)] == pytest.approx([1 / 20, 2 / 20, 3 / 20])
    assert sum(parts.values()) == pytest.approx(1.0)


@given(speeds_of_all, st.integers(0, 3))
def test_shares_are_equal_within_a_group_and_a_file_of_them_loses_nothing(
    tmp_path_factory, speeds, absent
):
    nb_workers = len(speeds) + absent
    groups = sync_groups.propose_groups(speeds, nb_workers)
    parts = sync_groups.shares(groups, speeds)
    assert list(parts) == list(range(1, nb_workers + 1))
    assert all(len({parts[worker] for worker in group}) == 1 for group in groups)
    assert math.fsum(parts.values()) == pytest.approx(1.0, abs=1e-12)
    path = tmp_path_factory.mktemp("shares") / "shares.txt"
    path.write_text("# made by a test\n" + sync_groups.format_shares(parts))
    fractions = read_fractions(path, nb_workers)
    owned = ranges(1_000_000_000, nb_workers, fractions)
    assert [run.start for run in owned[1:]] == [run.stop for run in owned[:-1]]
    assert (owned[0].start, owned[-1].stop) == (0, 1_000_000_000)
    for worker, run in enumerate(owned, start=1):
        assert len(run) == pytest.approx(parts[worker] * 1e9, abs=2)


def test_throughput_is_that_of_the_slowest_times_the_members():
    speeds = {1: 4.0, 2: 3.0, 3: 1.0}
    assert sync_groups.throughput(((1, 2), (3,)), speeds) == 7.0
    assert sync_groups.throughput(((1, 2, 3),), speeds) == 3.0
    assert sync_groups.throughput(((1, 2), (3, 4), (5,)), speeds) == 7.0  # 4 and 5 are not there


@pytest.mark.parametrize(
    ("current", "speeds", "worth"),
    [
        ("1,2|3,4", [4, 4, 1, 1], False),  # as proposed
        ("1,2|3,4", [4, 1, 1, 1], True),  # worker 2 holds worker 1 back
        ("1,2|3,4", [4.4, 4, 1, 1.1], False),
        ("1|2,3,4", [1, 1, 1, 1], True),  # no worker needs to be stale
        ("1,2,3,4", [1, 1.05, 1, 1], False),
        ("1,2,3,4", [2, 2, 1, 1], True),
    ],
)
def test_groups_change_for_a_gain_only(current, speeds, worth):
    measured = dict(enumerate(map(float, speeds), start=1))
    groups = sync_groups.parse_groups(current)
    proposed = sync_groups.propose_groups(measured, 4)
    assert sync_groups.is_worth_changing(groups, proposed, measured) is worth


@given(st.lists(st.floats(1, 10), min_size=4, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_no_speeds_make_groups_change_forth_and_back(values, random):
    """For the same speeds at most one of two partitions is to be left for the other."""
    speeds = dict(enumerate(values, start=1))

    def some_groups():
        labels = [random.randrange(3) for _ in values]
        found = {label: [w for w in speeds if labels[w - 1] == label] for label in labels}
        return tuple(sorted(map(tuple, found.values())))

    one, other = some_groups(), some_groups()
    assert not (
        sync_groups.is_worth_changing(one, other, speeds)
        and sync_groups.is_worth_changing(other, one, speeds)
    )


def test_a_thousand_workers_are_grouped_at_once():
    rng = np.random.default_rng(1)
    speeds = {w: float(2 ** (w % 3) * rng.normal(1, 0.03)) for w in range(1, 1001)}
    assert [len(group) for group in sync_groups.propose_groups(speeds, 1000)] == [334, 333, 333]


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ((0, 60.0), "--groups_warmup_updates=0"),
        ((1, -1.0), "--regroup_interval_seconds=-1"),
        ((1, math.nan), "--regroup_interval_seconds=nan"),
    ],
)
def test_settings_that_are_none(settings_, words):
    with pytest.raises(ConfigurationError, match=words):
        sync_groups.AutoGroups(*settings_)


def test_the_name_of_a_large_group_is_short_enough_for_a_summary():
    assert sync_groups.name_of((1, 2, 4)) == "1,2,4"
    assert Rounds(GroupSync((tuple(range(1, 501)),))).name_of(7) == "1,2,...,500"
    assert Rounds(DrawnSync(500, 0.1)).name_of(7) == "1,2,...,500"


def test_a_group_that_nobody_measured_gets_the_share_of_the_slowest():
    shares = sync_groups.shares(((1,), (2,), (3,)), {1: 1.0, 2: 3.0})
    assert shares == {1: 0.2, 2: 0.6, 3: 0.2}

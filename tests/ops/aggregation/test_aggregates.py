"""Robust aggregates: median and trimmed mean equal plain numpy; incompatible settings fail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.toy import method
from thinwire.ops.aggregation.aggregates import Mean, Median, TrimmedMean
from thinwire.ops.aggregation.merge import mean_update
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.types import ConfigurationError, SpareUpdate, Update

VALUES = st.floats(-1e6, 1e6, width=32)


@st.composite
def stacks(draw):
    """One to seven updates of one to nine entries: [m, n] float32."""
    m, n = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    rows = draw(st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=m, max_size=m))
    return np.array(rows, np.float32)


def dense(stack):
    return [Update(None, row.copy()) for row in stack]


@given(stacks())
@settings(max_examples=100, deadline=None)
def test_the_median_is_numpys(stack):
    merged = Median().merge(dense(stack), stack.shape[1])
    assert merged.indices is None and merged.values.dtype == np.float32
    expected = np.median(stack.astype(np.float64), axis=0)
    np.testing.assert_allclose(merged.values, expected, rtol=1e-5, atol=0.1)


@given(stacks(), st.floats(0.01, 0.49))
@settings(max_examples=100, deadline=None)
def test_the_trimmed_mean_is_the_mean_of_what_sorting_leaves(stack, fraction):
    rule, m = TrimmedMean(fraction), len(stack)
    cut = 0 if m < 3 else max(1, int(fraction * m + 1e-9))
    expected = np.sort(stack.astype(np.float64), axis=0)[cut : m - cut].mean(0)
    merged = rule.merge(dense(stack), stack.shape[1])
    np.testing.assert_allclose(merged.values, expected, rtol=1e-5, atol=0.5)


@given(stacks(), st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_one_of_three_or_more_cannot_leave_the_others_range(stack, who):
    if len(stack) < 3:
        return
    who %= len(stack)
    others = np.delete(stack, who, axis=0)
    stack[who] = 1e30
    for rule in (Median(), TrimmedMean(0.3)):
        merged = rule.merge(dense(stack), stack.shape[1]).values
        slack = 1e-5 * np.abs(others).max() + 1e-6
        assert (merged <= others.max(0) + slack).all()
        assert (merged >= others.min(0) - slack).all()


def test_vectors():
    stack = np.array([[1, 9, -4], [2, 7, -4], [30, 8, 5], [4, 6, 6]], np.float32)
    np.testing.assert_array_equal(Median().merge(dense(stack), 3).values, [3, 7.5, 0.5])
    np.testing.assert_array_equal(TrimmedMean(0.25).merge(dense(stack), 3).values, [3, 7.5, 0.5])
    np.testing.assert_array_equal(Median().merge(dense(stack[:3]), 3).values, [2, 8, -4])
    np.testing.assert_array_equal(Mean().merge(dense(stack), 3).values, [9.25, 7.5, 0.75])


def test_more_entries_than_are_sorted_at_a_time():
    stack = np.random.default_rng(1).normal(size=(5, 40_001)).astype(np.float32)
    np.testing.assert_array_equal(Median().merge(dense(stack), 40_001).values, np.median(stack, 0))


def test_updates_are_left_as_they_are():
    stack = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    updates = dense(stack)
    for rule in (Median(), TrimmedMean()):
        rule.merge(updates, 6)
    np.testing.assert_array_equal([each.values for each in updates], stack)


def test_entries_that_are_not_sent_count_as_zero():
    def sparse(indices, values):
        return Update(np.array(indices, np.int64), np.array(values, np.float32))

    updates = [sparse([0, 2], [5, 1]), sparse([2, 4], [3, 7]), sparse([2], [2])]
    merged = Median().merge(updates, 6)
    np.testing.assert_array_equal(merged.indices, [0, 2, 4])
    np.testing.assert_array_equal(merged.values, [0, 2, 0])
    mixed = Median().merge([*updates, Update(None, np.full(6, 4, np.float32))], 6)
    assert mixed.indices is None
    np.testing.assert_array_equal(mixed.values, [2, 0, 2.5, 0, 2, 0])


def test_the_mean_is_what_it_always_was():
    updates = dense(np.random.default_rng(2).normal(size=(3, 50)).astype(np.float32))
    np.testing.assert_array_equal(Mean().merge(updates, 50).values, mean_update(updates, 50).values)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("bsp", {"nb_workers": 2}, "3 or more members"),
        ("gsp", {"nb_workers": 5, "groups": ((1, 2, 3), (4, 5))}, "has 2"),
        ("gsp", {"nb_workers": 6, "auto_groups": AutoGroups(12)}, "not known"),
        ("bsp", {"nb_workers": 4, "overrides": {"codec": "topk"}}, "--codec=topk"),
        ("dgs", {"nb_workers": 4, "overrides": {"sync": "bsp"}}, "--codec=dgs"),
        ("bsp", {"nb_workers": 4, "collective": "ring"}, "--collective=ring"),
    ],
)
def test_a_robust_rule_is_refused_where_it_cannot_work(rule, name, choices, message):
    with pytest.raises(ConfigurationError, match=message):
        method(name, aggregate=rule, **choices)


def test_a_robust_rule_is_warned_of_where_every_update_is_alone():
    assert any("median" in text for text in method("asgd", 4, aggregate="median").warnings)
    assert not any("median" in text for text in method("bsp", 4, aggregate="median").warnings)


def test_settings_of_another_rule_are_refused():
    with pytest.raises(ConfigurationError, match="trim_fraction"):
        method("bsp", 4, aggregate="median", trim_fraction=0.2)
    with pytest.raises(ConfigurationError, match="below 0.5"):
        method("bsp", 4, aggregate="trimmed_mean", trim_fraction=0.5)
    with pytest.raises(ConfigurationError, match="expected one of mean"):
        compose(Choices.of(method="bsp", nb_workers=4, aggregate="mode"))


def test_nodes_must_agree_on_the_rule():
    rows = dict(method("bsp", 4, aggregate="trimmed_mean", trim_fraction=0.3).fingerprint())
    assert rows["aggregate"] == "trimmed_mean"
    assert rows["aggregate.trim_fraction"] == "0.3"
    assert dict(method("bsp", 4).fingerprint())["aggregate"] == "mean"


def test_a_dense_mean_may_take_the_memory_of_an_update_and_has_the_same_bits():
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal(40_000).astype(np.float32) for _ in range(3)]
    for row in rows:
        row[:7] = -0.0
    total = np.zeros(40_000, np.float32)
    for row in rows:
        total += row
    total /= np.float32(3)
    kept = [Update(None, row.copy()) for row in rows]
    assert Mean().merge(kept, 40_000).values.tobytes() == total.tobytes()
    assert all(np.array_equal(each.values, row) for each, row in zip(kept, rows, strict=True))
    for number in range(3):
        spare = [Update(None, row.copy()) for row in rows]
        spare[number] = SpareUpdate(None, rows[number].copy())
        merged = Mean().merge(spare, 40_000)
        assert merged.values is spare[number].values
        assert merged.values.tobytes() == total.tobytes()

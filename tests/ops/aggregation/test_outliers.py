"""The outlier guard: its limits, the running median, and norms of every size."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.aggregation.outliers import LEAST_NORMS, WINDOW, Guards, norm_of
from thinwire.ops.types import ConfigurationError


def noted(guards, norms):
    state = guards.init()
    for norm in norms:
        state = guards.record(norm, state)
    return state


def test_nothing_is_guarded_against_unless_asked_for():
    guards = Guards()
    assert not guards.active
    assert guards.limit(noted(guards, [1.0] * 50))[0] == math.inf


def test_the_median_takes_some_norms_before_it_acts():
    guards = Guards(update_norm_factor=3.0)
    assert guards.limit(noted(guards, [2.0] * (LEAST_NORMS - 1)))[0] == math.inf
    limit, why = guards.limit(noted(guards, [2.0] * LEAST_NORMS))
    assert limit == 6.0
    assert "--update_norm_factor=3" in why


def test_only_the_newest_norms_count():
    guards = Guards(update_norm_factor=2.0)
    state = noted(guards, [100.0] * WINDOW + [1.0] * WINDOW)
    assert len(state["norms"]) == WINDOW
    assert guards.limit(state)[0] == 2.0


def test_the_lower_of_two_limits_holds():
    guards = Guards(max_update_norm=5.0, update_norm_factor=2.0)
    assert guards.limit(guards.init()) == (5.0, "--max_update_norm=5")
    assert guards.limit(noted(guards, [1.0] * 20))[0] == 2.0
    assert guards.limit(noted(guards, [9.0] * 20))[0] == 5.0


def test_updates_of_nothing_do_not_make_everything_an_outlier():
    guards = Guards(update_norm_factor=2.0)
    assert guards.limit(noted(guards, [0.0] * 20))[0] == math.inf


@given(st.lists(st.floats(0, 1e30), min_size=LEAST_NORMS, max_size=60))
def test_the_limit_is_the_factor_times_numpys_median(norms):
    guards = Guards(update_norm_factor=4.0)
    median = float(np.median(norms))
    assert guards.limit(noted(guards, norms))[0] == (4.0 * median if median else math.inf)


def test_a_minority_cannot_move_the_median_far():
    guards = Guards(update_norm_factor=10.0)
    state = noted(guards, [1.0, 1.1, 0.9, 1e6] * 10)
    assert guards.limit(state)[0] <= 11.0


@pytest.mark.parametrize("size", [0, 1, 5, 70_000])
def test_norms_are_numpys(size):
    values = np.random.default_rng(3).normal(size=size).astype(np.float32)
    expected = np.linalg.norm(values.astype(np.float64))
    assert norm_of(values) == pytest.approx(expected, rel=1e-12)


def test_norms_stay_finite_where_float32_ends():
    assert norm_of(np.full(4, 3e38, np.float32)) == pytest.approx(6e38, rel=1e-6)
    assert norm_of(np.full(4, 1e-40, np.float32)) == pytest.approx(2e-40, rel=1e-4)


def test_terms_double_and_stay_finite():
    guards = Guards(quarantine_after=3, quarantine_seconds=5.0)
    assert [guards.term_seconds(times) for times in (0, 1, 2)] == [5.0, 10.0, 20.0]
    assert math.isfinite(guards.term_seconds(100_000))


@pytest.mark.parametrize(
    "choices",
    [
        {"max_update_norm": -1.0},
        {"max_update_norm": math.inf},
        {"max_update_norm": math.nan},
        {"update_norm_factor": 1.0},
        {"update_norm_factor": math.nan},
        {"quarantine_after": -1},
        {"quarantine_after": 2, "quarantine_seconds": 0.0},
        {"quarantine_seconds": 5.0},
    ],
)
def test_what_cannot_work_is_refused(choices):
    with pytest.raises(ConfigurationError, match="--"):
        Guards(**choices)

"""The counted staleness equals a scan of the whole window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import Update
from thinwire.ops.weighting import hit_counts
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ops.weighting.per_entry import PerEntry

KERNELS = load_kernels("numpy")
SIZE = 40


@given(
    st.integers(0, 2**32),
    st.integers(1, 200),  # distance of the oldest requested version
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_counts_equal_the_walk_over_all_releases(seed, reach, dense):
    rng = np.random.default_rng(seed)
    state, first, history = hit_counts.begin(SIZE, 1024), 0, []
    for version in range(300):
        assert version == first + len(history)
        base = int(rng.integers(first, version + 1))
        indices = np.sort(rng.choice(SIZE, 7, replace=False))
        asked = None if dense and version % 3 == 0 else indices
        scratch = np.zeros(SIZE, np.uint16)
        expected = KERNELS.hits(history[base - first :], asked, scratch)
        found = hit_counts.since(base, first, history, asked, KERNELS, state)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.int32
        touched = None if dense and rng.random() < 0.2 else indices.astype(np.int32)
        history.append(touched)
        hit_counts.record(touched, version, first, state)
        moved = max(first, version + 1 - int(rng.integers(reach // 2, reach + 1)))
        del history[: moved - first]
        first = moved


def test_marks_begin_with_a_long_window_and_end_with_it():
    state = hit_counts.begin(SIZE, 1024)
    one = np.array([3], np.int32)
    for version in range(2 * hit_counts.MARK_INTERVAL):
        hit_counts.record(one, version, 0, state)
    assert state["marks"] == []
    assert state["counts"].size == 0
    for version in range(2 * hit_counts.MARK_INTERVAL, 200):
        hit_counts.record(one, version, 0, state)
    assert [mark["version"] for mark in state["marks"]] == [64, 96, 128, 160, 192]
    hit_counts.record(one, 200, 150, state)
    assert state["marks"] == []


@pytest.mark.parametrize(("window", "dtype"), [(65535, np.uint16), (65536, np.uint32)])
def test_differences_fit_the_counts(window, dtype):
    assert hit_counts.begin(SIZE, window)["counts"].dtype == dtype


def test_history_reaches_back_to_the_oldest_base_and_no_further_than_the_window():
    policy, update = PerEntry(window=4), Update(np.array([3]), np.ones(1, np.float32))
    for lag, length in ((1, 2), (3, 4), (9, 4)):
        state = policy.init(SIZE)
        for version in range(20):
            oldest = max(0, version - lag)
            context = ReleaseContext(version, oldest, KERNELS, np.zeros(SIZE, np.float32), {})
            _, state = policy.weigh([Arrival(1, update, version)], context, state)
            assert state["first"] + len(state["history"]) == version + 1
        assert len(state["history"]) == length

"""How the rows of a window are dealt to the workers."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thinwire.script.data.places import places
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.data.place import UnfilledRounds, deal

SEEDS = st.tuples(*[st.integers(0, 2**31 - 1)] * 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.integers(1, 20), SEEDS)
def test_each_row_is_one_workers_and_parts_differ_by_one_row_at_most(num_rows, num_workers, seed):
    owners = deal(num_rows, num_workers, seed)
    np.testing.assert_array_equal(owners, deal(num_rows, num_workers, seed))
    sizes = np.bincount(owners, minlength=num_workers + 1)
    assert sizes[0] == 0 and len(sizes) == num_workers + 1
    assert sizes[1:].tolist() == [
        len(range(worker, num_rows, num_workers)) for worker in range(num_workers)
    ]


def test_run_fit_epoch_and_window_each_decide():
    ways = {tuple(deal(64, 2, seed)) for seed in itertools.product((0, 1), repeat=4)}
    assert len(ways) == 16


PATTERNS = {
    "alternating": lambda rows, period: rows % period,
    "sorted": lambda rows, period: rows * period // len(rows),
    "in blocks": lambda rows, period: rows // 7 % period,
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PATTERNS)),
    st.integers(2, 6),
    st.sampled_from((2, 3, None)),
    st.integers(6, 48),
    st.integers(0, 2**31 - 1),
)
def test_no_pattern_of_classes_gives_a_worker_only_some(pattern, num_workers, period, window, seed):
    """The share of a class among a worker's rows is within 5 standard deviations of the whole's.

    The number of a class's rows that a worker has of one window is hypergeometric. So its share p
    of all n rows has the variance p (1 - p) (num_workers - 1) / n, where windows divide evenly.
    """
    total = 1200 // window * window
    labels = PATTERNS[pattern](np.arange(total), period or num_workers)
    owners = np.concatenate(
        [deal(window, num_workers, (seed, 0, 0, number)) for number in range(total // window)]
    )
    limit = 5 * np.sqrt(0.25 * num_workers / total)
    for worker, label in itertools.product(range(1, num_workers + 1), np.unique(labels)):
        share = np.mean(labels[owners == worker] == label)
        assert abs(share - np.mean(labels == label)) < limit


@pytest.mark.parametrize("deals_alike", (True, False))
def test_a_place_deals_by_its_fit(deals_alike):
    first, second = (
        dataclasses.replace(place, deals_alike=deals_alike, fit=FitNumber(before=number))
        for number, place in enumerate(places(2)[:1] * 2)
    )
    of_fits = [place.positions(40, 0, 3).tolist() for place in (first, second)]
    of_epochs = [first.positions(40, epoch, 3).tolist() for epoch in (0, 1)]
    assert (of_fits[0] == of_fits[1]) is (of_epochs[0] == of_epochs[1]) is deals_alike


def test_rounds_without_rows_are_taken_once():
    unfilled = UnfilledRounds()
    assert unfilled.take() == 0
    unfilled.note()
    unfilled.note()
    assert [unfilled.take(), unfilled.take()] == [2, 0]

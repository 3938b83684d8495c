"""The token bucket: its rate, its burst, debt, a clock that stands still or steps back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.proto.token_bucket import TokenBucket


def test_a_full_bucket_gives_its_burst_and_then_its_rate():
    bucket = TokenBucket(rate=100.0, burst=10.0)
    bucket.take(0.0, 10.0)
    assert bucket.wait_seconds(0.0) == 0.0  # empty is not in debt
    bucket.take(0.0, 5.0)
    assert bucket.wait_seconds(0.0) == pytest.approx(0.05)
    assert bucket.wait_seconds(0.04) == pytest.approx(0.01)
    assert bucket.wait_seconds(0.05) == pytest.approx(0.0)


def test_it_holds_no_more_than_its_burst():
    bucket = TokenBucket(rate=100.0, burst=10.0)
    bucket.take(0.0, 10.0)
    bucket.take(1000.0, 20.0)
    assert bucket.wait_seconds(1000.0) == pytest.approx(0.1)


def test_a_clock_that_steps_back_gives_nothing_twice():
    bucket = TokenBucket(rate=1.0, burst=0.0)
    bucket.take(10.0, 2.0)
    assert bucket.wait_seconds(5.0) == pytest.approx(2.0)
    assert bucket.wait_seconds(11.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_senseless_numbers_are_refused(rate, burst):
    with pytest.raises(ValueError, match=f"rate={rate}, burst={burst}"):
        TokenBucket(rate, burst)


@given(
    st.floats(1.0, 1e9),
    st.floats(0.0, 1e6),
    st.lists(st.tuples(st.floats(0.0, 0.1), st.floats(1.0, 1e5)), min_size=1, max_size=60),
)
def test_whoever_waits_as_told_never_exceeds_the_rate(rate, burst, steps):
    bucket = TokenBucket(rate, burst)
    now = taken = 0.0
    for pause, amount in steps:
        now += pause
        now += bucket.wait_seconds(now)
        assert taken <= (burst + rate * now) * (1 + 1e-9) + 1e-6
        bucket.take(now, amount)
        taken += amount

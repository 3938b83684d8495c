"""Deadlines from measured times: vectors of RFC 6298, bounds, slow and fast peers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.runtime.failure_detector import Backoff, MeanDeviation, RetryDeadline, RtoEstimator

SECONDS = st.floats(1e-3, 1e3)


def plain_rfc_6298(samples):
    """SRTT and RTTVAR as sections 2.2 and 2.3 write them."""
    smoothed, variation = samples[0], samples[0] / 2
    for sample in samples[1:]:
        variation = (1 - 1 / 4) * variation + 1 / 4 * abs(smoothed - sample)
        smoothed = (1 - 1 / 8) * smoothed + 1 / 8 * sample
    return smoothed, variation


def spread_of(samples):
    spread = MeanDeviation()
    for sample in samples:
        spread.add(sample)
    return spread


@given(st.lists(SECONDS, min_size=1, max_size=40))
def test_the_spread_is_that_of_rfc_6298(samples):
    spread, (mean, deviation) = spread_of(samples), plain_rfc_6298(samples)
    assert spread.mean_seconds == pytest.approx(mean, rel=1e-9)
    assert spread.deviation_seconds == pytest.approx(deviation, rel=1e-9)
    assert spread.most_seconds == pytest.approx(mean + 4 * deviation, rel=1e-9)


def test_a_vector_by_hand():
    spread = spread_of([1.0, 3.0, 1.0])  # 1, 0.5; 1.25, 0.875; 1.21875, 0.71875
    assert (spread.mean_seconds, spread.deviation_seconds) == (1.21875, 0.71875)
    assert spread.most_seconds == 4.09375


def listening(period, count=40, least=2.0, most=30.0):
    arrivals = RtoEstimator(least, most)
    arrivals.begin(100.0)
    for beat in range(count):
        arrivals.record_beat(100.0 + period * beat)
    return arrivals


def test_nothing_is_known_before_two_beats():
    arrivals = RtoEstimator(2.0, 30.0)
    arrivals.begin(5.0)
    assert arrivals.deadline == 35.0
    arrivals.record_beat(6.0)
    assert arrivals.timeout_seconds == 30.0


def test_a_fast_peer_is_found_dead_long_before_a_slow_one():
    fast, slow = listening(0.5), listening(8.0)
    assert fast.timeout_seconds == 2.0
    assert slow.timeout_seconds == pytest.approx(16.0, rel=0.02)  # twice its beat
    assert slow.timeout_seconds > 8.0


def test_bulk_between_beats_is_life_and_no_beat():
    """4.8 MB at 1 Mbit/s: 40 s in which a beat comes behind the bulk, and pieces prove life."""
    arrivals = listening(3.0)
    timeout = arrivals.timeout_seconds
    now = arrivals.last_arrival_at
    for _ in range(1000):  # a burst of small pieces does not shorten anything
        now += 1e-3
        arrivals.record_arrival(now)
    assert arrivals.timeout_seconds == timeout
    for _ in range(16):  # pieces of 2.5 s each
        now += 2.5
        assert now < arrivals.deadline
        arrivals.record_arrival(now)
    arrivals.record_beat(now)  # 41 s after the last one
    assert arrivals.timeout_seconds > 2 * timeout


def test_a_silence_that_proved_to_be_none_is_not_suspected_again():
    arrivals = listening(1.0)
    assert arrivals.timeout_seconds == 2.0
    now = arrivals.last_arrival_at + 7.0
    arrivals.record_arrival(now)
    assert arrivals.timeout_seconds == pytest.approx(14.0)
    for beat in range(1, 60):
        arrivals.record_beat(now + beat)
    assert arrivals.timeout_seconds == 2.0  # forgotten again


def test_false_alarms_double_the_patience_up_to_the_bound():
    arrivals = listening(4.0)
    before = arrivals.timeout_seconds
    arrivals.record_alarm()
    assert arrivals.timeout_seconds == pytest.approx(2 * before)
    for _ in range(10):
        arrivals.record_alarm()
    assert arrivals.timeout_seconds == 30.0


def test_who_stood_still_has_heard_nobody():
    arrivals = listening(1.0)
    timeout, now = arrivals.timeout_seconds, arrivals.last_arrival_at + 50.0
    arrivals.excuse(49.5, now)
    arrivals.record_beat(now)
    assert arrivals.timeout_seconds == pytest.approx(timeout)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("record_beat", "record_arrival", "record_alarm", "begin")), SECONDS
        )
    )
)
def test_deadlines_keep_to_their_bounds_and_replay_to_the_same_bits(history):
    once, again, now = RtoEstimator(1.0, 20.0), RtoEstimator(1.0, 20.0), 0.0
    for what, seconds in history:
        now += seconds
        for arrivals in (once, again):
            if what == "record_alarm":
                arrivals.record_alarm()
            else:
                getattr(arrivals, what)(now)
        assert 1.0 <= once.timeout_seconds <= 20.0
        assert once.last_arrival_at <= now
    assert dataclasses.asdict(once) == dataclasses.asdict(again)


@given(SECONDS, st.integers(2, 60))
def test_a_regular_peer_is_never_suspected(period, count):
    arrivals = RtoEstimator(2.5 * period, 10 * period)
    arrivals.begin(0.0)
    for beat in range(count):
        assert beat * period <= arrivals.deadline
        arrivals.record_beat(beat * period)


def test_attempts_grow_with_failures_and_follow_what_succeeds():
    attempts = RetryDeadline(2.0, 15.0)
    assert attempts.timeout_seconds == 2.0
    for expected in (4.0, 8.0, 15.0, 15.0):
        attempts.fail()
        assert attempts.timeout_seconds == expected
    attempts.succeed(3.0)  # 3 + 4 * 1.5
    assert attempts.timeout_seconds == 9.0
    for _ in range(2000):
        attempts.fail()
    assert attempts.timeout_seconds == 15.0


def test_pauses_double_and_are_drawn():
    backoff = Backoff(0.2, 1.0)
    assert [backoff.next_seconds(1.0) for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    assert Backoff(0.2, 1.0).next_seconds(0.0) == 0.1

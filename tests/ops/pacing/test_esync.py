"""ESync's state server on a fake clock: the golden numbers of local steps, and edge cases."""

import heapq

import pytest

from thinwire.ops.pacing.base import PaceReport
from thinwire.ops.pacing.esync import Esync
from thinwire.ops.types import ConfigurationError

SLOW, FAST = 3.5, 0.03


def local_steps(rule, seconds, rounds=30, query_seconds=0.0, seed=None, skip=2):
    """Simulate the worker loop with a barrier of no cost; return ({worker: mean steps}, idle).

    A question takes `query_seconds` before it is decided. The mean is over rounds from `skip` on.
    """
    workers = sorted(seconds)
    state = rule.init()
    counts = {worker: [] for worker in workers}
    idle = dict.fromkeys(workers, 0.0)
    start_of_counted = 0.0
    now = 0.0
    last = dict(seed or seconds)
    for number in range(rounds):
        if number == skip:
            start_of_counted, idle = now, dict.fromkeys(workers, 0.0)
        steps = dict.fromkeys(workers, 0)
        arrived = {}
        events = []
        for worker in workers:
            state = rule.record(PaceReport(worker, 0, last[worker], now), state)
            heapq.heappush(events, (now + query_seconds + seconds[worker], worker, "done"))
        while events:
            time, worker, what = heapq.heappop(events)
            if what == "done":
                steps[worker] += 1
                last[worker] = seconds[worker]
                heapq.heappush(events, (time + query_seconds, worker, time))
                continue
            report = PaceReport(worker, steps[worker], last[worker], what, query_seconds)
            state = rule.record(report, state)
            ready, state = rule.answer(worker, workers, time, state)
            if ready:
                arrived[worker] = time
            else:
                heapq.heappush(events, (time + seconds[worker], worker, "done"))
        now = max(arrived.values())
        for worker in workers:
            idle[worker] += now - arrived[worker]
            counts[worker].append(steps[worker])
        state = rule.released(workers, state)
    share = idle[workers[0]] / (now - start_of_counted)
    return {worker: sum(c[skip:]) / len(c[skip:]) for worker, c in counts.items()}, share, counts


UNEVEN = {1: FAST, 2: FAST, 3: SLOW, 4: FAST, 5: FAST, 6: SLOW}


@pytest.mark.parametrize(
    ("eps", "query_seconds", "steps", "idle"),
    [
        ("0.5", 0.0, 99, 0.151),
        ("0.5", 0.005, 85, 0.151),
        ("0.03", 0.0, 115, 0.014),
        ("0.03", 0.005, 99, 0.011),
    ],
)
def test_golden_local_steps(eps, query_seconds, steps, idle):
    found, share, _ = local_steps(Esync(eps=eps, smoothing="none"), UNEVEN, 30, query_seconds)
    for worker, seconds in UNEVEN.items():
        expected = 1 if seconds == SLOW else steps
        assert abs(found[worker] - expected) <= 1
    assert abs(share - idle) < 0.01


def test_seeds_of_the_first_round():
    rule = Esync(eps="0.5", smoothing="none")
    true = local_steps(rule, UNEVEN, 1, skip=0)[2]
    third = local_steps(rule, UNEVEN, 1, seed={w: s / 3 for w, s in UNEVEN.items()}, skip=0)[2]
    assert abs(true[1][0] - 100) <= 1
    # The slow devices' step is taken for SLOW / 3 = 1.17 s. A margin of 0.5 s would stop the fast
    # ones after 22 steps; it is clamped to a fifth of the slowest step, 0.23 s: 31 steps.
    assert rule.margin([FAST, SLOW / 3], rule.init()) == pytest.approx(SLOW / 15)
    assert third[1][0] == 31


def test_equal_devices_take_one_step():
    found, _, _ = local_steps(Esync(eps="0.03"), dict.fromkeys(range(1, 7), 0.2))
    assert set(found.values()) == {1}


def test_two_equally_slow_devices_take_one_step():
    found, _, _ = local_steps(Esync(), {1: 1.0, 2: 1.0, 3: 0.1})
    assert found[1] == found[2] == 1
    assert 8 <= found[3] <= 10


def test_a_margin_beyond_the_slowest_step_is_cut():
    rule = Esync(eps="0.5", smoothing="none")
    found, _, _ = local_steps(rule, {1: 0.01, 2: 0.3})
    assert rule.margin([0.01, 0.3], rule.init()) == pytest.approx(0.06)
    assert found[1] > 20


def test_nobody_is_let_go_before_all_have_spoken():
    rule = Esync()
    state = rule.record(PaceReport(1, 5, 0.1, 0.0), rule.init())
    assert rule.answer(1, [1, 2], 1.0, state)[0] is False
    assert rule.answer(1, [1], 1.0, state)[0] is True  # the other left: now the slowest itself


def test_a_slowest_long_overdue_stops_nobody():
    rule = Esync(smoothing="none")
    state = rule.record(PaceReport(2, 0, 1.0, 0.0), rule.init())
    state = rule.record(PaceReport(1, 3, 0.1, 1.2), state)
    assert rule.answer(1, [1, 2], 1.2, state)[0] is True
    state = rule.released([1], state)
    state = rule.record(PaceReport(1, 3, 0.1, 1.6), state)
    assert rule.answer(1, [1, 2], 1.6, state)[0] is False


def test_the_slowest_must_have_begun_the_round():
    rule = Esync(smoothing="none")
    state = rule.init()
    for worker, seconds in ((1, 0.1), (2, 1.0)):
        state = rule.record(PaceReport(worker, 1, seconds, 0.0), state)
    state = rule.released([1, 2], state)
    state = rule.record(PaceReport(1, 1, 0.1, 0.95), state)
    assert rule.answer(1, [1, 2], 0.95, state)[0] is False
    state = rule.record(PaceReport(2, 0, 1.0, 0.0), state)
    assert rule.answer(1, [1, 2], 0.95, state)[0] is True


def test_one_pause_does_not_make_a_fast_device_the_slowest():
    times = [0.1, 0.1, 0.1, 3.0, 0.1, 0.1, 0.1, 0.1]
    smooth, sharp = Esync(smoothing="ema:0.2"), Esync(smoothing="none")
    states = []
    for rule in (smooth, sharp):
        state = rule.record(PaceReport(2, 0, 1.0, 0.0), rule.init())
        for seconds in times[:4]:
            state = rule.record(PaceReport(1, 1, seconds, 0.1), state)
        states.append(rule.answer(1, [1, 2], 0.1, state)[0])
    assert states == [False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps": "fast"},
        {"eps": "0"},
        {"eps": "nan"},
        {"query": "never"},
        {"smoothing": "ema:0"},
        {"smoothing": "ema:2"},
        {"smoothing": "max:0"},
        {"smoothing": "median"},
        {"max_local_steps": -1},
    ],
)
def test_bad_values_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Esync(**wrong)


def test_nobody_waits_for_ever_for_one_that_does_not_begin():
    """It may wait for the others at a shard that is a round behind; until then they train on."""
    rule, state = Esync(), Esync().init()
    for worker, seconds in ((1, 0.5), (2, 1.0)):
        state = rule.record(PaceReport(worker, 1, seconds, 0.0), state)
    state = rule.released((1, 2), state)
    told = []
    for steps in range(1, 111):
        state = rule.record(PaceReport(1, steps, 0.5, 0.5 * steps), state)
        ready, state = rule.answer(1, (1, 2), 0.5 * steps, state)
        told.append(ready)
    assert told.index(True) == 100  # the 101st step ends beyond 30 s and 20 steps of the slowest
    assert all(told[100:])


def steps_until_ready(rule, state, most=1000):
    """Return the number of steps of 0.5 s of worker 1 in a round with worker 2."""
    for steps in range(1, most):
        state = rule.record(PaceReport(1, steps, 0.5, 0.5 * steps), state)
        ready, state = rule.answer(1, (1, 2), 0.5 * steps, state)
        if ready:
            state = rule.pushed(1, state)
            return steps
    return most


def test_the_long_wait_is_once_while_the_slowest_begins_only_after_the_others_push():
    """Shards that are a round apart stay so: each round would cost 30 s and 20 steps."""
    rule, state = Esync(), Esync().init()
    for worker, seconds in ((1, 0.5), (2, 1.0)):
        state = rule.record(PaceReport(worker, 1, seconds, 0.0), state)
    waits = []
    for _ in range(3):
        state = rule.released((1, 2), state)
        waits.append(steps_until_ready(rule, state))
        state = rule.record(PaceReport(2, 0, 1.0, 0.0), state)
        state = rule.pushed(2, state)
    assert waits == [101, 3, 3]  # then more than one step of the slowest
    state = rule.released((1, 2), state)
    state = rule.record(PaceReport(2, 0, 1.0, 0.0), state)
    assert steps_until_ready(rule, state) == 1  # worker 1 is about to end its round
    state = rule.released((1, 2), state)
    assert steps_until_ready(rule, state) == 101


def test_nor_for_one_that_never_reports():
    """Since a restart of this shard it has not finished the exchange that it is in elsewhere."""
    rule, state = Esync(), Esync().init()
    told = []
    for steps in range(1, 101):
        state = rule.record(PaceReport(1, steps, 0.5, 0.5 * steps), state)
        ready, state = rule.answer(1, (1, 2), 0.5 * steps, state)
        told.append(ready)
    assert told.index(True) == 80  # the 81st step ends after 30 s and after 20 of its steps
    assert all(told[80:])


@pytest.mark.parametrize("others", [(), (2,), (2, 3)])
def test_who_no_round_waits_for_yet_trains_on(others):
    """A restarted shard has no rounds yet, or its group's round continues without the newcomer."""
    rule = Esync()
    state = rule.record(PaceReport(1, 7, 0.1, 0.0), rule.init())
    for other in others:
        state = rule.record(PaceReport(other, 1, 1.0, 0.0), state)
    told, state = rule.answer(1, others, 0.1, state)
    assert told is False
    told, state = rule.answer(1, (1,), 0.2, state)  # let in, and alone
    assert told is True


@pytest.mark.parametrize("eps", ["auto", "0.5"])
def test_a_margin_of_no_measured_steps_is_nothing(eps):
    assert Esync(eps=eps).margin([], Esync().init()) == 0.0
    assert Esync(eps=eps).summary(Esync().init())["eps_seconds"] is None

"""The learning rate as a function of the spent share of the budget."""

import pytest

from thinwire.ops.optimizers.schedule import (
    Budget,
    RateCurve,
    RateInRound,
    Schedule,
    parse_drops,
    parse_schedule,
)
from thinwire.ops.types import ConfigurationError


def test_drops_multiply_once_reached():
    schedule = Schedule(0.1, parse_drops("0.5:0.1,0.8:0.5"))
    assert schedule.rate(0.49) == 0.1
    assert schedule.rate(0.5) == pytest.approx(0.01)
    assert schedule.rate(1.0) == pytest.approx(0.005)


@pytest.mark.parametrize("text", ["0.5", "0.5:", "0.8:1,0.5:1", "0.5:0", "1.2:0.1", "a:b", "0:1"])
def test_bad_schedules_are_refused(text):
    with pytest.raises(ConfigurationError, match="--lr_schedule"):
        parse_drops(text)


def test_the_nearer_limit_ends_the_run():
    budget = Budget(iter_max=100, examples=50)
    assert budget.end(10, 49) is None
    assert budget.end(10, 50) == "epochs"
    assert budget.end(100, 10) == "iter_max"
    assert budget.fraction(10, 25) == 0.5
    assert budget.fraction(60, 25) == 0.6


def test_without_limits_nothing_ends_and_the_rate_stays():
    budget = Budget(iter_max=None)
    assert budget.end(10**9, 10**9) is None
    assert budget.fraction(10**9, 10**9) == 0.0
    assert Budget(None, 50).fraction(10**9, 25) == 0.5


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_cosine_is_that_of_keras(warmup):
    num_steps, first = 40, int(40 * warmup)
    keras = pytest.importorskip("keras")
    theirs = keras.optimizers.schedules.CosineDecay(
        0.0 if first else 0.3,
        num_steps - first,
        alpha=0.1,
        **({"warmup_target": 0.3, "warmup_steps": first} if first else {}),
    )
    ours = parse_schedule(0.3, f"cosine:warmup={warmup},floor=0.1")
    found = [ours.rate(step / num_steps) for step in range(num_steps + 1)]
    wanted = [float(theirs(step)) for step in range(num_steps + 1)]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def test_a_line_falls_evenly_after_the_warm_up():
    line = parse_schedule(0.2, "linear:warmup=0.5")
    found = [line.rate(each) for each in (0, 0.25, 0.5, 0.75, 1)]
    assert found == pytest.approx([0, 0.1, 0.2, 0.1, 0])
    assert parse_schedule(0.2, "linear") == RateCurve(0.2, shape="linear")
    assert parse_schedule(0.2, "0.5:0.1") == Schedule(0.2, ((0.5, 0.1),))


@pytest.mark.parametrize(
    "text",
    ["cosine:0.1", "cosine:warmup=1", "linear:floor=-1", "cosine:floor=nan", "linear:half=0.5"],
)
def test_bad_curves_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"warmup=A,floor=B"):
        parse_schedule(0.1, text)


def test_within_a_round_the_rate_is_that_of_the_steps_so_far():
    line = RateCurve(1.0, shape="linear")
    by_updates = RateInRound(line, Budget(10), nb_workers=4, longest_round=8)
    assert by_updates.rate(3, 0, 0, 0) == pytest.approx(0.7)
    assert by_updates.rate(3, 0, 4, 0) == pytest.approx(0.65)
    by_examples = RateInRound(line, Budget(None, 1000), nb_workers=4, longest_round=0)
    assert by_examples.rate(3, 300, 5, 50) == pytest.approx(0.5)

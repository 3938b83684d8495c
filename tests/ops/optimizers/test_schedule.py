"""Learning rate by the share of the budget."""

import pytest

from thinwire.ops.optimizers.schedule import Budget, Schedule, parse_drops
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

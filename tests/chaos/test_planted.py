"""Each planted bug breaks the checks that are meant to find the bug."""

import pytest

from tests.chaos.planted import PLANTS
from tests.chaos.process_search import ProcessTrial, Strike, play
from tests.chaos.search import Trial, shrink, simulate

#: Bugs that one of the first runs finds; `make product` tries the others.
QUICK = ("lost-after-the-acknowledgement", "applied-twice", "epoch-skipped-by-one-shard")
SEED = 5


def found(name, most):
    """Return the first run that shows a bug."""
    for number in range(most):
        trial = Trial.of(SEED, number)
        verdict = simulate(trial, name)
        if verdict.promises & PLANTS[name].promises:
            return trial, verdict
    raise AssertionError(f"{name} was not found in {most} runs")


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_found(name):
    trial, _ = found(name, 3)
    assert not simulate(trial).violations


@pytest.mark.product
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.simulated])
def test_a_bug_is_found_within_minutes_and_its_run_made_small(name):
    trial, verdict = found(name, 600)
    small, still = shrink(trial, verdict, lambda each: simulate(each, name))
    assert still.promises & verdict.promises
    assert len(small.plans) <= len(trial.plans) and small.case.iter_max <= trial.case.iter_max
    assert not simulate(small).violations, "without the bug"


@pytest.mark.product
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["lock-that-is-not-held", "lost-after-the-acknowledgement", "applied-twice"]
)
def test_a_bug_is_found_in_real_processes(name):
    """A second process on the same files is detected by a lock, lost replies by repeated pushes."""
    kinds = {"lock-that-is-not-held": ("second process",), "applied-twice": ("lost answers",)}
    strikes = tuple(
        Strike(1.0 + number, kind, "ps-0", number)
        for number, kind in enumerate(2 * kinds.get(name, ("reset",)))
    )
    trial = ProcessTrial(1, 1, "asgd", "on", 1, 3, strikes, tuple(range(len(strikes))))
    broken = play(trial, name).promises
    assert broken & PLANTS[name].promises, broken


def test_there_are_ten_at_least():
    assert len(PLANTS) >= 10 and all(plant.promises for plant in PLANTS.values())


def test_a_trial_is_repeated_by_its_number_and_gets_smaller():
    trial = Trial.of(3, 17)
    assert trial == Trial.of(3, 17)
    for smaller in trial.smaller():
        sizes = len(smaller.plans), smaller.case.nb_workers, smaller.case.iter_max
        assert sizes < (len(trial.plans), trial.case.nb_workers, trial.case.iter_max)

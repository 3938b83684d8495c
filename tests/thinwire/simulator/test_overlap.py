"""--overlap on the virtual clock: a step takes the longer of computing and exchanging."""

import numpy as np
import pytest

from tests.thinwire.simulator.toy import ToyTrainer, played, simulated
from thinwire.ops.types import Link

LATE = Link(delay_ms=200)  # an exchange takes 0.4 s


def ahead(name, nb_workers, choices=None, **settings):
    return played(name, nb_workers, choices={"overlap": True, **(choices or {})}, **settings)


@pytest.mark.parametrize(("step", "each"), [("0.5", 0.5), ("0.1", 0.4)])
def test_the_longer_one_counts(step, each):
    waits = played("asgd", 1, steps=step, links=(LATE,), iter_max=20)
    overlaps = ahead("asgd", 1, steps=step, links=(LATE,), iter_max=20)
    start = 0.8 + float(step)  # Hello, the first model, the first gradient
    assert overlaps.clock.now == pytest.approx(start + 19 * each + 0.2)
    assert waits.clock.now == pytest.approx(start + 19 * (float(step) + 0.4) + 0.2)


def test_one_worker_takes_the_steps_of_delayed_sgd():
    simulation = ahead("asgd", 1, iter_max=12, links=(LATE,))
    trainer, twin = ToyTrainer(), simulated("asgd", 1)
    weights, shard = trainer.weights.copy(), twin.workers[0]._own.shard
    before = weights.copy()
    for _ in range(12):
        step = trainer.step(before, trainer.statistics, shard, {})
        before = weights.copy()
        weights -= np.float32(0.1) * step.gradient
    core = simulation.shards[0].core
    np.testing.assert_array_equal(core.model.theta, weights)
    assert {age: count for age, count in core.counters.staleness.items() if count} == {0: 1, 1: 11}


@pytest.mark.parametrize(
    ("name", "nb_ps"),
    [("bsp", 2), ("asgd", 1), ("ssp", 2), ("gsp", 1), ("adacomp", 2), ("dgs", 1), ("dgt", 2)],
)
def test_every_method_ends_with_a_death_and_a_return(name, nb_ps):
    failures = "2@4-9"
    simulation = ahead(name, 3, nb_ps=nb_ps, iter_max=80, links=(LATE,), failures=failures)
    assert simulation.end == "iter_max"
    assert [shard.core.version for shard in simulation.shards] == [80] * nb_ps
    again = ahead(name, 3, nb_ps=nb_ps, iter_max=80, links=(LATE,), failures=failures)
    np.testing.assert_array_equal(
        simulation.shards[0].core.model.theta, again.shards[0].core.model.theta
    )


def test_who_makes_nothing_but_nan_gives_up():
    simulation = ahead("asgd", 1, trainer=ToyTrainer(poisoned=True), iter_max=10)
    assert simulation.end == "diverged"

"""A round computed ahead equals a plain loop, and is dropped when the worker dies."""

import dataclasses

import numpy as np
import pytest

from tests.thinwire.simulator.toy import BATCH, ToyTrainer, dataset, simulated
from tests.virtual.toy import Softmax
from thinwire.data.loading import take_shards

STEPS, ROUNDS = 5, 4


class CountingTrainer(ToyTrainer):
    """Counts its mini-batches; makes NaN of those that begin at some examples of the walk."""

    def __init__(self, poisoned_places=()):
        super().__init__()
        self.poisoned_places, self.num_computed = poisoned_places, 0

    def step(self, weights, statistics, shard, local):
        place = shard.cursor.place
        step = super().step(weights, statistics, shard, local)
        self.num_computed += 1
        if place in self.poisoned_places:
            step = dataclasses.replace(step, gradient=np.full_like(step.gradient, np.nan))
        return step


def rounds(trainer, **settings):
    """Return a simulation of one worker that takes rounds of STEPS steps of 1 s."""
    choices = {"local_steps": STEPS}
    return simulated("fedavg", 1, "1", choices, trainer=trainer, iter_max=ROUNDS, **settings)


@pytest.mark.parametrize("poisoned", [(), (0,), (2 * BATCH, 4 * BATCH, 9 * BATCH)])
def test_it_is_a_plain_loop_that_leaves_out_what_is_not_finite(poisoned):
    simulation = rounds(CountingTrainer(poisoned))
    simulation.play(lambda now: None, lambda: False)
    problem, weights = Softmax(), ToyTrainer().weights.copy()
    (shard,) = take_shards(simulation._run, dataset())
    for _ in range(ROUNDS):
        base, taken = weights.copy(), 0
        while taken < STEPS:
            place = shard.cursor.place
            chosen = shard.images[shard.cursor.next(), 0].astype(int)
            if place not in poisoned:
                gradient = problem.gradient(weights, chosen)[1].astype(np.float32)
                weights -= np.float32(0.1) * gradient
                taken += 1
        weights = base + (weights - base)
    np.testing.assert_array_equal(simulation.shards[0].core.model.theta, weights)
    assert simulation.workers[0]._steps.num_non_finite == len(poisoned)


def test_it_does_not_wait_for_the_calendar():
    trainer = CountingTrainer()
    simulation = rounds(trainer)
    simulation.play(lambda now: None, lambda: simulation.clock.now >= 1.5)
    assert trainer.num_computed == STEPS
    assert simulation.workers[0]._steps.num_steps < STEPS


def test_what_a_death_cuts_short_is_computed_again():
    trainer = CountingTrainer()
    simulation = rounds(trainer, failures="1@2.5-3")
    simulation.play(lambda now: None, lambda: False)
    undisturbed = rounds(CountingTrainer())
    undisturbed.play(lambda now: None, lambda: False)
    place = simulation.workers[0]._own.shard.cursor.place
    assert place == undisturbed.workers[0]._own.shard.cursor.place + 2 * BATCH
    assert simulation.shards[0].core.version == ROUNDS


def test_whoever_is_asked_how_long_a_round_is_takes_one_step_after_the_other():
    trainer = CountingTrainer()
    simulation = simulated("esync", 1, "1", trainer=trainer, iter_max=3)
    simulation.play(
        lambda now: None, lambda: simulation.clock.now >= 0.5
    )  # its first step takes 1 s
    assert trainer.num_computed == 1

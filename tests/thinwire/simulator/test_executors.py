"""Gradients computed in threads equal gradients computed in sequence, without side effects."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from tests.thinwire.simulator.toy import KERNELS, ToyTrainer, dataset, simulated
from thinwire.data.loading import TrainingShard
from thinwire.data.pipeline.cursor import Cursor
from thinwire.models.flat_model import SharedModel
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.simulator import executors
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.trainer import Trainer
from thinwire.worker.train_step import TrainStep

ROWS = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
LABELS = np.arange(40, dtype=np.int32) % 3


@pytest.mark.parametrize("name", ["bsp", "asgd", "fedavg"])
@pytest.mark.parametrize("overlap", [False, True])
def test_threads_change_no_bit_whoever_dies_in_a_step(name, overlap):
    if name == "fedavg" and overlap:
        pytest.skip("local steps do not overlap an exchange")
    choices = {"overlap": True} if overlap else {}
    inline = simulated(name, 4, "0.5,0.3,0.2,0.7", choices, iter_max=40, failures="2@3.1-6.3")
    run, own = inline._run, inline.own
    with ThreadPoolExecutor(4) as threads:
        beside = Simulation(run, own, ToyTrainer(), dataset(), KERNELS, executor=threads)
        for simulation in (inline, beside):
            assert simulation.play(lambda now: None, lambda: False) == "iter_max"
    ours, theirs = (each.shards[0].core for each in (inline, beside))
    np.testing.assert_array_equal(ours.model.theta, theirs.model.theta)
    assert ours.counters.workers == theirs.counters.workers


def test_a_step_that_a_death_cuts_short_is_dealt_out_again():
    simulation = simulated("asgd", 1, "1", iter_max=3, failures="1@1.5-2")
    simulation.play(lambda now: None, lambda: False)
    assert simulation.workers[0]._own.shard.cursor.place == 3 * 8


def model():
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, "relu", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3),
    ]
    made = keras.Sequential([keras.Input((6,)), *layers])
    made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def test_a_step_is_that_of_a_worker_and_changes_no_variable():
    built = model()
    before = [each.numpy() for each in built.variables]
    trainer, alone = Trainer(SharedModel.of(built), False, 0.0), TrainStep(SharedModel.of(model()))
    local = trainer.local_of(1)
    shard = TrainingShard(
        ROWS, LABELS, Cursor(np.arange(40), 8, 1), {}, lambda chosen, _: ROWS[chosen]
    )
    fork, weights = shard.fork(), aligned(trainer.spec.num_parameters)
    weights[:] = trainer.weights
    gradient = np.empty_like(weights)
    for _ in range(3):
        step = trainer.step(weights, trainer.statistics, shard, local)
        alone.set_weights(weights)
        loss = alone.gradients(*fork.next(), gradient)
        np.testing.assert_array_equal(step.gradient, gradient)
        assert (step.loss, step.samples) == (loss, 8)
        for name, value in alone.save_local().items():
            np.testing.assert_array_equal(step.local[name], value)
        local = step.local
        weights -= np.float32(0.1) * gradient
    for variable, value in zip(built.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(executors, "_num_cores", lambda: 8)
    assert [executors.num_together(workers, False) for workers in (1, 4, 100)] == [1, 4, 8]
    assert executors.num_together(100, on_gpu=True) == 1
    assert [executors.threads_of_each(0, together) for together in (1, 4, 8)] == [8, 2, 1]
    assert executors.threads_of_each(3, 8) == 3

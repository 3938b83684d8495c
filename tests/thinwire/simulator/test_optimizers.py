"""Simulated runs with any Keras optimizer: one worker takes the same steps as Keras alone."""

import keras
import numpy as np
import pytest

from tests.thinwire.simulator.toy import ToyTrainer, played, simulated
from tests.virtual.toy import SPEC
from thinwire.ops.optimizers.schedule import Schedule, parse_schedule
from thinwire.ops.optimizers.server import OPTIMIZERS
from thinwire.ops.sharding.split import shard_positions

STEPS, RATE = 20, 0.02
LOCAL = 4  # local steps of a round
MOMENTUM = {"momentum": {"momentum": 0.9}}


class KerasAlone:
    """Keras' own optimizer on the toy model's variables, for as many steps as a simulated run."""

    def __init__(self, name, rate=RATE):
        self.trainer = ToyTrainer()
        self.weights = self.trainer.weights.copy()
        sizes = np.cumsum([tensor.size for tensor in SPEC.tensors])[:-1]
        self.split = lambda flat: [
            part.reshape(tensor.shape)
            for part, tensor in zip(np.split(flat, sizes), SPEC.tensors, strict=True)
        ]
        self.variables = [
            keras.Variable(values, name=tensor.path)
            for values, tensor in zip(self.split(self.weights), SPEC.tensors, strict=True)
        ]
        made = getattr(keras.optimizers, OPTIMIZERS[name])
        self.optimizer = made(learning_rate=rate, **MOMENTUM.get(name, {}))
        self.optimizer.build(self.variables)

    def step(self, gradient):
        self.optimizer.apply(self.split(gradient), self.variables)
        self.weights = np.concatenate([each.numpy().ravel() for each in self.variables])

    def run(self, shards, num_steps):
        """Step with the mean gradient of the workers' batches, which `shards` deal out."""
        for _ in range(num_steps):
            gradients = []
            for shard in shards:
                step = self.trainer.step(self.weights, self.trainer.statistics, shard, {})
                gradients.append(step.gradient)
            self.step(np.mean(gradients, axis=0, dtype=np.float32))
        return self.weights


def shards_of(name, nb_workers, **settings):
    """Return each worker's examples, as the run of the same seed deals them out."""
    return [worker._own.shard for worker in simulated(name, nb_workers, **settings).workers]


def model_of(simulation):
    flat = np.empty(SPEC.num_parameters, np.float32)
    for shard in simulation.shards:
        for slot, place in enumerate(shard_positions(SPEC, shard.layout)):
            start, end = shard.layout.offsets[slot], shard.layout.offsets[slot + 1]
            flat[place] = shard.core.model.theta[start:end]
    return flat


#: One that keeps nothing, one for each kind of slots: `make product` steps with all. Each class
#: steps as Keras alone in tests/test_compiled_optimizers.py as well.
ON_ONE_SHARD = ("sgd", "adagrad", "adafactor")
ON_TWO = ("momentum", "adamw", "lamb", "muon")


@pytest.mark.parametrize(
    ("optimizer", "name", "nb_workers", "nb_ps"),
    [
        *((optimizer, "asgd", 1, 1) for optimizer in ON_ONE_SHARD),
        *(
            pytest.param(optimizer, "asgd", 1, 1, marks=pytest.mark.product)
            for optimizer in OPTIMIZERS
            if optimizer not in ON_ONE_SHARD
        ),
        *((optimizer, "bsp", 2, 2) for optimizer in ON_TWO),
    ],
)
def test_the_server_steps_as_keras_alone(optimizer, name, nb_workers, nb_ps):
    choices = {"overrides": {"server_optimizer": optimizer}}
    settings = {"nb_ps": nb_ps, "iter_max": STEPS, "schedule": Schedule(RATE)}
    simulation = played(name, nb_workers, choices=choices, **settings)
    assert simulation.end == "iter_max"
    expected = KerasAlone(optimizer).run(shards_of(name, nb_workers), STEPS)
    np.testing.assert_allclose(model_of(simulation), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adafactor", "muon"])
def test_local_steps_are_those_of_keras_alone(optimizer):
    choices = {
        "overrides": {"pacer": "fixed"},
        "local_steps": LOCAL,
        "local_optimizer": optimizer,
    }
    settings = {"iter_max": STEPS // LOCAL, "schedule": Schedule(RATE)}
    simulation = played("bsp", 1, choices=choices, **settings)
    expected = KerasAlone(optimizer).run(shards_of("bsp", 1), STEPS)
    np.testing.assert_allclose(model_of(simulation), expected, rtol=0, atol=1e-5)


def test_a_curve_goes_on_within_rounds():
    theirs = keras.optimizers.schedules.CosineDecay(
        0.0, STEPS - 2, warmup_target=RATE, warmup_steps=2, alpha=0.1
    )
    choices = {
        "overrides": {"pacer": "fixed"},
        "local_steps": LOCAL,
        "local_optimizer": "adamw",
    }
    ours = parse_schedule(RATE, "cosine:warmup=0.1,floor=0.1")
    simulation = played("bsp", 1, choices=choices, iter_max=STEPS // LOCAL, schedule=ours)
    expected = KerasAlone("adamw", theirs).run(shards_of("bsp", 1), STEPS)
    np.testing.assert_allclose(model_of(simulation), expected, rtol=0, atol=1e-5)

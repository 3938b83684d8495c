"""train_steps and loops that a script writes in the style of its backend."""

import keras
import numpy as np
import pytest

from tests.backends.fits import (
    BATCH,
    LOSS,
    TOLERANCE,
    X,
    Y,
    alone,
    compiled,
    difference,
    network,
    scripts,
)
from thinwire import ConfigurationError, distribute

IS_JAX = keras.backend.backend() == "jax"
only_jax = pytest.mark.skipif(not IS_JAX, reason="the state of a step is JAX's")

if IS_JAX:
    import jax

    class OwnStep(keras.Sequential):
        """A train_step of the script's own, which returns the loss under another name."""

        clips = False

        def train_step(self, state, data):
            weights, others, slots, metrics = state
            x, y = data

            def compute(weights, others):
                logits, others = self.stateless_call(weights, others, x, training=True)
                return LOSS(y, logits), others

            (loss, others), grads = jax.value_and_grad(compute, has_aux=True)(weights, others)
            weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
            if self.clips:
                weights = [jax.numpy.clip(weight, -0.4, 0.4) for weight in weights]
            return {"own": loss}, (weights, others, slots, metrics)

else:
    import torch

    class OwnStep(keras.Sequential):
        """A train_step of the script's own, which returns the loss under another name."""

        clips = False

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = LOSS(y, self(x, training=True))
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
                if self.clips:
                    for weight in weights:
                        weight.assign(torch.clip(weight.value, -0.4, 0.4))
            return {"own": loss.detach()}


class Clipping(OwnStep):
    """Clips the weights after each step."""

    clips = True


def sgd():
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_a_train_step_of_the_script(method, tmp_path):
    make = compiled(sgd, kind=OwnStep)
    expected, _ = alone(make, epochs=3)
    settings = {} if method == "bsp" else {"compression_rate": 1}
    nb_workers = 2 if method == "bsp" else 1
    with scripts(tmp_path, method, nb_workers, **settings) as run:
        for model, history in run.fit(make, epochs=3):
            assert difference(model, expected) <= TOLERANCE
            assert history["own"][-1] < history["own"][0]


@pytest.mark.parametrize(("method", "settings"), [("bsp", {}), ("dgs", {"compression_rate": 1})])
def test_a_train_step_that_changes_weights_itself(method, settings, tmp_path):
    make = compiled(sgd, kind=Clipping)
    expected, _ = alone(make, epochs=3)
    with scripts(tmp_path, method, 1, **settings) as run:
        [(model, _)] = run.fit(make, epochs=3)
    assert difference(model, expected) <= TOLERANCE
    assert max(np.abs(weight).max() for weight in model.get_weights()) <= 0.4 + 1e-6


def batches(model, settings):
    """Yield this worker's half of each batch."""
    number, workers = settings["id_worker"], settings["nb_workers"]
    for start in list(range(0, len(X), BATCH)) * 3:
        rows = np.arange(start, start + BATCH)[number - 1 :: workers]
        yield X[rows], Y[rows]


def loop(model, optimizer, pairs):
    """Train by a loop in the style of the backend; the model has its weights at the end."""
    optimizer.build(model.trainable_variables)
    if IS_JAX:

        def compute(weights, others, x, y):
            logits, others = model.stateless_call(weights, others, x, training=True)
            return LOSS(y, logits), others

        @jax.jit
        def step(state, x, y):
            weights, others, slots = state
            gradient = jax.value_and_grad(compute, has_aux=True)
            (loss, others), grads = gradient(weights, others, x, y)
            weights, slots = optimizer.stateless_apply(slots, grads, weights)
            return loss, (weights, others, slots)

        variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        state = tuple([variable.value for variable in part] for part in variables)
        for x, y in pairs:
            _, state = step(state, x, y)
        for part, values in zip(variables, state, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)
        return
    for x, y in pairs:
        model.zero_grad()
        LOSS(torch.as_tensor(y), model(torch.as_tensor(x), training=True)).backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_a_loop_of_the_script(method, tmp_path):
    expected = network()
    loop(expected, sgd(), batches(expected, {"id_worker": 1, "nb_workers": 1}))

    def script(settings):
        model, optimizer = network(), sgd()
        optimizer = distribute(optimizer, settings, model=model)
        loop(model, optimizer, batches(model, settings))
        assert optimizer.thinwire.num_exchanges >= 11
        return model

    nb_workers, settings = (2, {}) if method == "bsp" else (1, {"compression_rate": 1})
    with scripts(tmp_path, method, nb_workers, **settings) as run:
        for model in run.each(script):
            assert difference(model, expected) <= TOLERANCE


def test_a_loop_of_train_on_batch(tmp_path):
    make = compiled(sgd)
    expected = make()
    for x, y in batches(expected, {"id_worker": 1, "nb_workers": 1}):
        expected.train_on_batch(x, y)

    def script(settings):
        model = distribute(make(), settings)
        for x, y in batches(model, settings):
            model.train_on_batch(x, y)
        return model

    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(script):
            assert difference(model, expected) <= TOLERANCE


@only_jax
def test_a_loop_with_moving_statistics_is_refused_with_the_way_out(tmp_path):
    def script(settings):
        model, optimizer = network(keras.layers.BatchNormalization()), sgd()
        optimizer = distribute(optimizer, settings, model=model)
        with pytest.raises(Exception, match="bn_sync=false"):
            loop(model, optimizer, batches(model, settings))
        return True

    with scripts(tmp_path, "bsp", 1) as run:
        assert run.each(script) == [True]


@only_jax
def test_a_train_step_with_two_optimizers_is_refused_with_the_way_out(tmp_path):
    class Two(OwnStep):
        """Steps twice with two optimizers."""

        def train_step(self, state, data):
            _, state = OwnStep.train_step(self, state, data)
            return OwnStep.train_step(self, state, data)

    def script(settings):
        model = distribute(compiled(sgd, kind=Two)(), settings)
        with pytest.raises(ConfigurationError, match="KERAS_BACKEND"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        return True

    with scripts(tmp_path, "bsp", 1) as run:
        assert run.each(script) == [True]

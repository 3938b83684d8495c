"""train_steps and loops that a script writes in the style of its backend."""

import keras
import numpy as np
import pytest

from tests.backends.fits import (
    BATCH,
    TOLERANCE,
    X,
    Y,
    alone,
    compiled,
    difference,
    network,
    scripts,
)
from tests.backends.train_steps import Clipping, OwnStep, Twice, loop, sgd
from thinwire import ConfigurationError, distribute

only_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the state of a step is JAX's"
)


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
    def script(settings):
        model = distribute(compiled(sgd, kind=Twice)(), settings)
        with pytest.raises(ConfigurationError, match="KERAS_BACKEND"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        return True

    with scripts(tmp_path, "bsp", 1) as run:
        assert run.each(script) == [True]

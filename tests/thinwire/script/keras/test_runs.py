"""Scripts of all kinds in real runs: precision, embeddings, several fits, uneven ends, errors."""

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    X,
    Y,
    alone,
    assert_same,
    plain_model,
    scripts,
)
from thinwire import W_global, distribute
from thinwire.ops.types import ConfigurationError


def compiled(optimizer=None, **options):
    def make():
        model = plain_model()
        model.compile(optimizer() if optimizer else "adam", loss=LOSS, **options)
        return model

    return make


def scaled():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**8, dynamic_growth_steps=3
    )


@pytest.mark.parametrize("method", ["bsp", pytest.param("esync", marks=pytest.mark.product)])
def test_a_loss_scale_grows_as_it_does_alone(method, tmp_path):
    make = compiled(scaled)
    expected, _ = alone(make, epochs=2)
    nb_workers = 2 if method == "bsp" else 1
    with scripts(tmp_path, method, nb_workers) as run:
        for model, _ in run.fit(make, epochs=2):
            assert_same(model, expected)
            found, wanted = model.optimizer, expected.optimizer
            assert float(found.dynamic_scale) == float(wanted.dynamic_scale) == 2.0**10
            assert int(found.iterations) == int(wanted.iterations) == 8


def test_an_overflow_of_one_worker_skips_the_round(tmp_path):
    make = compiled(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-4), 2.0**127),
        loss_weights=[1000.0],
    )
    with scripts(tmp_path, "bsp", 2) as run:
        for model, _ in run.fit(make, epochs=1):
            assert float(model.optimizer.dynamic_scale) < 2.0**127
            assert np.isfinite(model.get_weights()[0]).all()


def embeddings():
    W_global.clear()
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32", name="in"),
            keras.layers.Embedding(400, 4, name="rows", embeddings_initializer="ones"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(4, name="logits", kernel_initializer="ones"),
        ],
        name="words",
    )
    model.compile(keras.optimizers.SGD(0.1), loss=LOSS)
    return model


@pytest.mark.product
def test_embeddings_travel_as_rows(tmp_path):
    words = np.random.default_rng(1).integers(0, 400, (96, 3)).astype(np.int32)
    expected = embeddings()
    expected.fit(words, Y, batch_size=BATCH, shuffle=False, verbose=0)
    with scripts(tmp_path, "bsp", 2) as run:

        def script(settings):
            model = distribute(embeddings(), settings)
            model.fit(words, Y, batch_size=BATCH, shuffle=False, verbose=0)
            return model

        for model in run.each(script):
            assert_same(model, expected)
            assert model.thinwire.last.nnz_up <= 12 * 3 * 4 + 4 * 12 + 4


@pytest.mark.product
def test_a_rate_that_is_set_after_the_last_step_is_that_of_the_next_fit(tmp_path):
    make = compiled(lambda: keras.optimizers.Adam(0.3))

    def train(model, **options):
        def halve(epoch, logs):
            model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2

        for _ in range(2):
            halved = keras.callbacks.LambdaCallback(on_epoch_end=halve)
            model.fit(X, Y, callbacks=[halved], **options, verbose=0)
        return model, float(model.optimizer.learning_rate)

    options = {"batch_size": BATCH, "shuffle": False}
    expected, rate = train(make(), **options)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, found in run.each(
            lambda settings: train(distribute(make(), settings), **options)
        ):
            assert_same(model, expected)
            assert found == pytest.approx(rate)


@pytest.mark.parametrize(
    "method", ["bsp", *(pytest.param(m, marks=pytest.mark.product) for m in ("asgd", "dgs"))]
)
def test_two_fits_and_a_second_compile(method, tmp_path):
    with scripts(tmp_path, method, 2) as run:

        def script(settings):
            model = distribute(compiled()(), settings)
            options = {"batch_size": BATCH, "verbose": 0}
            model.fit(X, Y, epochs=1 if settings["id_worker"] == 1 else 3, **options)
            first = model.get_weights()
            model.compile(keras.optimizers.Adam(0.0001), loss=LOSS)
            model.fit(X, Y, epochs=1, **options)
            return first, model.get_weights()

        (one, last), (two, end) = run.each(script)
    for mine, theirs in zip([*one, *last], [*two, *end], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one[0], last[0])


class OwnSGD(keras.optimizers.SGD):
    """An optimizer that a PS cannot build."""


def test_an_optimizer_of_the_script_steps_on_the_workers_or_not_at_all(tmp_path):
    make = compiled(lambda: OwnSGD(0.1))
    expected, _ = alone(make)
    with scripts(tmp_path / "a", "dgs", 1, compression_rate=1) as run:
        assert_same(run.fit(make)[0][0], expected)
    with scripts(tmp_path / "b", "bsp", 1) as run, pytest.raises(ConfigurationError, match="dgs"):
        run.fit(make)
